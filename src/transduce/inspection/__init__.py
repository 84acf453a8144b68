"""Looking inside: what every head attends to, as a picture in the terminal, SVG, PNG or one offline page."""

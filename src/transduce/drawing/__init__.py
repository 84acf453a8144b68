"""Pictures and pages as plain text: SVG, HTML that needs no network, and blocks in the terminal."""

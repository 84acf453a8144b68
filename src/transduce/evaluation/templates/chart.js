for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector(".points").textContent);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const value = figure.querySelector(".value"), several = data.curves.length > 1;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), {left, right, width} = data.box;
    const at = Math.min(right, Math.max(left, (event.clientX - box.left) / box.width * width));
    const x = data.x[0] + (at - left) / (right - left) * (data.x[1] - data.x[0]);
    const values = data.curves.map(c => {
      const near = c.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return (several ? c.name + " " : "") + near[1].toLocaleString("en", {maximumSignificantDigits: 4});
    });
    value.textContent = data.name + " " + x.toLocaleString("en", {maximumFractionDigits: data.name == "update" ? 0 : 1}) + ": " + values.join(", ");
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    value.textContent = "";
    cursor.setAttribute("visibility", "hidden");
  });
}

for (const figure of document.querySelectorAll("figure.heat")) {
  const data = JSON.parse(figure.querySelector(".weights").textContent);
  const [layers, heads, rows, columns] = data.shape, size = rows * columns;
  const bytes = Uint8Array.from(atob(data.weights), c => c.charCodeAt(0));
  const rects = [...figure.querySelectorAll("rect:not(.frame)")], [layer, head] = figure.querySelectorAll("select");
  const value = figure.querySelector(".value");
  let view = new Float32Array(size);
  const draw = () => {
    view = new Float32Array(size);
    const ls = layer.value < 0 ? [...Array(layers).keys()] : [+layer.value];
    const hs = head.value < 0 ? [...Array(heads).keys()] : [+head.value];
    for (const l of ls) for (const h of hs) for (let i = 0; i < size; i++)
      view[i] += bytes[(l * heads + h) * size + i] / 255 / ls.length / hs.length;
    rects.forEach((rect, i) => rect.setAttribute("fill-opacity", Math.max(0.03, view[i] ** 0.75).toFixed(3)));
  };
  layer.addEventListener("change", draw); head.addEventListener("change", draw); draw();
  figure.addEventListener("pointerover", event => {
    const i = rects.indexOf(event.target);
    value.textContent = i < 0 ? "" :
      data.rows[Math.floor(i / columns)] + " \u2192 " + data.columns[i % columns] + "  " + view[i].toFixed(2);
  });
}

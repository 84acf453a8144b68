// Heat maps whose cells can be read.
import { at, format, isSigned, labelsOf, largest, matrix, page, placeText, shapeText, within } from "./record.js";
import { css, el, inkOn, paint, palette, shade, stepOf } from "./draw.js";

const FONT = "11px ui-monospace, 'DejaVu Sans Mono', Menlo, monospace";
const STEPS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
const measure = document.createElement("canvas").getContext("2d");

function widest(labels) {
  measure.font = FONT;
  return Math.ceil(Math.max(...labels.map((label) => measure.measureText(label).width)));
}

// A matrix as a picture with a readout of the cell under the pointer; arrow keys move over the cells.
// options: title, width, rows and columns (labels or null), rowName, columnName, mark (a row), largest (cell), most,
// signed, range and say (texts of the legend and of a value), pick, key.
export function heatMap(m, options) {
  const signed = options.signed ?? isSigned(m.data);
  const most = options.most ?? largest(m.data);
  const left = options.rows ? Math.min(widest(options.rows) + 8, 110) : 24;
  const top = options.columns ? Math.min(widest(options.columns) + 8, 110) : 16;
  const fitting = (options.width - left - 2) / m.columns;
  const across = Math.max(options.columns ? 12 : 3, Math.min(fitting, options.largest || 44));
  const down = options.rows ? 18 : Math.max(3, Math.min(across, 18, 480 / m.rows));
  const size = { width: Math.ceil(left + across * m.columns + 1), height: Math.ceil(top + down * m.rows + 1) };
  const canvas = el("canvas.map");
  drawMap(canvas, m, { ...options, signed, most, left, top, across, down, size });
  const readout = el("output.readout", { "aria-live": "polite" });
  const cursor = el("span.cursor", { hidden: true });
  let here = [Math.max(0, options.mark ?? 0), 0];
  const point = (row, column) => {
    here = [row, column];
    cursor.hidden = false;
    Object.assign(cursor.style, {
      left: `${left + column * across}px`,
      top: `${top + row * down}px`,
      width: `${across}px`,
      height: `${down}px`,
    });
    const value = at(m, row, column);
    readout.textContent =
      `${placeText(options.rowName, row, options.rows)}, ${placeText(options.columnName, column, options.columns)}: ` +
      (options.say ? options.say(value) : format(value));
  };
  const cellOf = (event) => {
    const place = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left - left) / across);
    const row = Math.floor((event.clientY - place.top - top) / down);
    return row >= 0 && column >= 0 && row < m.rows && column < m.columns ? [row, column] : null;
  };
  const box = el(
    "div.cells",
    {
      tabIndex: 0,
      role: "group",
      "data-key": options.key,
      "aria-label": `${options.title || "heat map"}, ${m.rows} by ${m.columns}; arrow keys read the cells`,
      pointermove: (event) => {
        const cell = cellOf(event);
        if (cell) point(...cell);
      },
      pointerleave: () => {
        if (document.activeElement !== box) cursor.hidden = true;
      },
      click: (event) => {
        const cell = cellOf(event);
        if (cell) {
          point(...cell);
          options.pick?.(...cell);
        }
      },
      focus: () => point(...here),
      blur: () => {
        cursor.hidden = true;
      },
      keydown: (event) => {
        if (event.key === "Enter") options.pick?.(...here);
        const step = stepOf(event, STEPS);
        if (step) point(within(here[0] + step[0], m.rows), within(here[1] + step[1], m.columns));
      },
    },
    canvas,
    cursor,
  );
  box.style.width = `${size.width}px`;
  const caption =
    options.title &&
    el("figcaption", el("b", options.title), options.shape ? el("code", ` ${shapeText(options.shape)}`) : null);
  const range = options.range || (signed ? `−${format(most)} to ${format(most)}` : `0 to ${format(most)}`);
  const legend = el("span", { className: signed ? "legend signed" : "legend" }, range);
  return el("figure", caption, el("div.scroll", box), el("div.under", legend, readout));
}

function drawMap(canvas, m, { rows, columns, mark, left, top, across, down, size, most, signed, say }) {
  const scale = Math.min(devicePixelRatio || 1, 2);
  const all = palette();
  canvas.width = size.width * scale;
  canvas.height = size.height * scale;
  Object.assign(canvas.style, { width: `${size.width}px`, height: `${size.height}px` });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.imageSmoothingEnabled = false;
  context.drawImage(paint(m, most, signed), left, top, across * m.columns, down * m.rows);
  context.font = FONT;
  context.fillStyle = css(all.soft);
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(12 / down));
  for (let i = 0; i < m.rows; i += rows ? 1 : every * 4) {
    context.fillStyle = css(i === mark ? all.text : all.soft);
    context.fillText(rows ? rows[i] : i + 1, left - 4, top + (i + 0.5) * down, left - 4);
  }
  context.fillStyle = css(all.soft);
  context.textAlign = "left";
  for (let j = 0; j < m.columns; j += columns ? 1 : Math.max(1, Math.ceil(28 / across))) {
    context.save();
    context.translate(left + (j + (columns ? 0.5 : 0)) * across, top - 4);
    if (columns) context.rotate(-Math.PI / 2);
    context.fillText(columns ? columns[j] : j + 1, 0, columns ? 0 : -3, top - 4);
    context.restore();
  }
  context.strokeStyle = css(all.line);
  context.strokeRect(left - 0.5, top - 0.5, across * m.columns + 1, down * m.rows + 1);
  if (across >= 40) {
    context.font = FONT.replace("11px", "10px");
    context.textAlign = "center";
    for (let i = 0; i < m.data.length; i++) {
      context.fillStyle = inkOn(shade(m.data[i], most, signed));
      const text = say ? say(m.data[i]) : format(m.data[i]);
      context.fillText(
        text,
        left + ((i % m.columns) + 0.5) * across,
        top + (Math.floor(i / m.columns) + 0.5) * down,
        across - 3,
      );
    }
  }
  if (mark !== undefined && mark >= 0) {
    context.strokeStyle = css(all.text);
    context.lineWidth = 1.5;
    context.strokeRect(left, top + mark * down, across * m.columns, down);
  }
}

// The width of a map in a figure, two of which share a wide panel.
const FIGURE = 28; // padding and border
export const mapWidth = (inHalf = true) => (page.width > 900 && inHalf ? (page.width - 18) / 2 : page.width) - FIGURE;

// An array of a record, or the matrix of one of its heads. rows, columns: the sides of its axes, if any.
export function arrayMap(record, array, { rows, columns, head = 0, ...options }) {
  const m = matrix(array, [head]);
  const labels = { rows: labelsOf(record, rows, m.rows), columns: labelsOf(record, columns, m.columns) };
  return heatMap(m, { shape: array.shape, ...labels, ...options });
}

// The matrix of a value, or that of a head.
export function valueMap(record, value, head, { pick, ...options }) {
  const lead = value.shape.slice(0, -2).map((size) => Math.min(head, size - 1));
  return arrayMap(record, value.data, {
    title: lead.length ? `${value.title}, head ${lead[0] + 1}` : value.title,
    head,
    rows: value.rows,
    columns: value.columns,
    rowName: value.axes.at(-2),
    columnName: value.axes.at(-1),
    pick: (i, j) => pick([...lead, i, j]),
    ...options,
  });
}

// Drawing: elements, colours, controls, heat maps, bars.
import { at, format, isSigned, largest, page, shapeText } from "./record.js";

const SVG = "http://www.w3.org/2000/svg";

// An element: properties; "data-", "aria-" and role as attributes; functions as listeners; children, null for none.
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (/^(data-|aria-|role$|for$|scope$|colspan$)/.test(name)) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// --- colours ------------------------------------------------------------------------------------------------------

let colours = null; // of the current theme, as [red, green, blue]

export const forgetColours = () => {
  colours = null;
};

function palette() {
  if (colours) return colours;
  const style = getComputedStyle(document.documentElement);
  const read = (name) =>
    [1, 3, 5].map((i) =>
      parseInt(
        style
          .getPropertyValue(name)
          .trim()
          .slice(i, i + 2),
        16,
      ),
    );
  const names = ["raised", "heat", "one", "two", "hidden", "text", "soft", "line", "surface"];
  colours = Object.fromEntries(names.map((name) => [name, read(`--${name}`)]));
  return colours;
}

export const css = (colour) => `rgb(${colour.map(Math.round).join(" ")})`;

// The colour of a value: one hue for 0 to `most`; orange below and blue above 0 for signed values.
export function shade(value, most, signed) {
  const all = palette();
  if (!Number.isFinite(value)) return all.hidden;
  const share = Math.min(1, Math.abs(value) / (most || 1)) ** 0.8;
  const end = !signed ? all.heat : value < 0 ? all.two : all.one;
  return all.raised.map((x, i) => x + (end[i] - x) * share);
}

function inkOn(colour) {
  const light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2];
  return light > 140 ? "#111111" : "#ffffff";
}

const LEVELS = 255; // on each side of 0

// The colours of all levels from −LEVELS to LEVELS, then of hidden cells, as numbers of 4 bytes.
function levelTable(signed) {
  const all = palette();
  const name = signed ? "signedLevels" : "levels";
  if (!all[name]) {
    const bytes = new Uint8ClampedArray(4 * (2 * LEVELS + 2)).fill(255);
    for (let i = 0; i <= 2 * LEVELS; i++) bytes.set(shade((i - LEVELS) / LEVELS, 1, signed), 4 * i);
    bytes.set(all.hidden, 4 * (2 * LEVELS + 1));
    all[name] = new Uint32Array(bytes.buffer);
  }
  return all[name];
}

// One pixel for each cell.
export function paint(m, most, signed, canvas = document.createElement("canvas")) {
  canvas.width = m.columns;
  canvas.height = m.rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(m.columns, m.rows);
  const table = levelTable(signed);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = LEVELS / (most || 1);
  for (let i = 0; i < pixels.length; i++) {
    const level = Math.round(m.data[i] * scale);
    pixels[i] = Number.isFinite(level)
      ? table[LEVELS + Math.max(-LEVELS, Math.min(LEVELS, level))]
      : table[2 * LEVELS + 1];
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// --- controls -----------------------------------------------------------------------------------------------------

export function selectBox(label, key, options, value, change) {
  const select = el("select", { "data-key": key, change: () => change(select.value) });
  select.append(...options.map(([text, one]) => new Option(text, one, false, String(one) === String(value))));
  return el("label", { className: "control" }, `${label} `, select);
}

export function buttonRow(label, key, options, value, change) {
  const buttons = options.map(([text, one]) =>
    el("button", {
      type: "button",
      textContent: text,
      "aria-pressed": String(one === value),
      "data-key": `${key}-${one}`,
      click: () => change(one),
    }),
  );
  return el("span", { className: "control", role: "group", "aria-label": label }, `${label} `, ...buttons);
}

// A row of tokens of which one is chosen; arrow keys move the choice.
export function tokenRow(label, key, tokens, place, change) {
  const buttons = tokens.map((token, i) =>
    el("button", {
      type: "button",
      className: "token",
      textContent: token,
      "aria-pressed": String(i === place),
      "data-key": i === place ? key : null,
      tabIndex: i === place ? 0 : -1,
      click: () => change(i),
    }),
  );
  const moved = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    change(Math.min(Math.max(place + step, 0), tokens.length - 1));
  };
  return el(
    "div",
    { className: "tokens", role: "group", "aria-label": label, keydown: moved },
    el("span", { className: "soft", textContent: `${label} ` }),
    ...buttons,
  );
}

// Arrow keys move the focus among the elements that `find` selects; one of them can be reached by tab.
export function rove(box, find) {
  const all = [...box.querySelectorAll(find)];
  const first = all.find((one) => one.matches("[aria-pressed='true']")) || all[0];
  for (const one of all) one.setAttribute("tabindex", one === first ? 0 : -1);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = all.indexOf(event.target);
    if (here < 0) return;
    const next = all[here + (step || 0)];
    if (step) {
      event.preventDefault();
      event.stopPropagation();
      next?.focus();
    }
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      all[here].dispatchEvent(new Event("click"));
    }
  });
}

// --- facts --------------------------------------------------------------------------------------------------------

// The equation, the shapes and the source line of what a section shows.
export function facts(equation, shapes, source) {
  const line = el("p", { className: "facts" });
  if (equation) line.append(el("code", { className: "equation", textContent: equation }));
  for (const [name, shape] of shapes || [])
    line.append(el("span", {}, `${name} `, el("code", { textContent: shapeText(shape) })));
  if (source) line.append(sourceLink(source));
  return line;
}

export function sourceLink(source) {
  const text = `${source.file}:${source.line}`;
  if (!source.code) return el("code", { textContent: text });
  return el(
    "details",
    { className: "code" },
    el("summary", {}, el("code", { textContent: text })),
    el("pre", { textContent: source.code }),
  );
}

export const note = (text) => el("p", { className: "soft", textContent: text });

// A bar for a share of 1; `mark` hatches it.
export function bar(share, text) {
  const inside = el("i");
  inside.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { className: "bar" }, el("span", { className: "rail" }, inside), el("b", { textContent: text }));
}

// --- heat maps ----------------------------------------------------------------------------------------------------

const FONT = "11px ui-monospace, 'DejaVu Sans Mono', Menlo, monospace";
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
  const canvas = el("canvas", { className: "map" });
  const draw = () => drawMap(canvas, m, { ...options, signed, most, left, top, across, down, size });
  draw();
  const readout = el("output", { className: "readout", "aria-live": "polite" });
  const cursor = el("span", { className: "cursor", hidden: true });
  let here = [Math.max(0, options.mark ?? 0), 0];
  const name = (labels, i, axis) => (labels ? `${axis || "token"} ${i + 1} “${labels[i]}”` : `${axis || "row"} ${i}`);
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
      `${name(options.rows, row, options.rowName)}, ${name(options.columns, column, options.columnName)}: ` +
      (options.say ? options.say(value) : format(value));
  };
  const cellOf = (event) => {
    const place = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left - left) / across);
    const row = Math.floor((event.clientY - place.top - top) / down);
    return row >= 0 && column >= 0 && row < m.rows && column < m.columns ? [row, column] : null;
  };
  const keys = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  const box = el(
    "div",
    {
      className: "cells",
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
        const step = keys[event.key];
        if (!step) return;
        event.preventDefault();
        event.stopPropagation();
        point(
          Math.min(Math.max(here[0] + step[0], 0), m.rows - 1),
          Math.min(Math.max(here[1] + step[1], 0), m.columns - 1),
        );
      },
    },
    canvas,
    cursor,
  );
  box.style.width = `${size.width}px`;
  const caption =
    options.title &&
    el(
      "figcaption",
      {},
      el("b", { textContent: options.title }),
      options.shape ? el("code", { textContent: ` ${shapeText(options.shape)}` }) : null,
    );
  const range = options.range || (signed ? `−${format(most)} to ${format(most)}` : `0 to ${format(most)}`);
  const legend = el("span", { className: signed ? "legend signed" : "legend", textContent: range });
  return el(
    "figure",
    {},
    caption,
    el("div", { className: "scroll" }, box),
    el("div", { className: "under" }, legend, readout),
  );
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
    context.fillText(rows ? rows[i] : i, left - 4, top + (i + 0.5) * down, left - 4);
  }
  context.fillStyle = css(all.soft);
  context.textAlign = "left";
  for (let j = 0; j < m.columns; j += columns ? 1 : Math.max(1, Math.ceil(28 / across))) {
    context.save();
    context.translate(left + (j + (columns ? 0.5 : 0)) * across, top - 4);
    if (columns) context.rotate(-Math.PI / 2);
    context.fillText(columns ? columns[j] : j, 0, columns ? 0 : -3, top - 4);
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

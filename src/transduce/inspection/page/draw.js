// Drawing: elements, colours, controls, bars.
import { shapeText } from "./record.js";

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

// Canvases hold colours and sizes, so they are drawn again when the theme or the width changes.
export function watchAppearance(redraw) {
  const again = () => {
    colours = null;
    redraw();
  };
  let { width } = document.documentElement.getBoundingClientRect();
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const now = document.documentElement.getBoundingClientRect().width;
      if (now !== width) {
        width = now;
        again();
      }
    }, 150);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    again();
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.theme;
    again();
  });
}

export function palette() {
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

export function inkOn(colour) {
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

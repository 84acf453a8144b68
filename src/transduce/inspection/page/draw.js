// Drawing: elements, colours, controls, bars.
import { shapeText, within } from "./record.js";

const SVG = "http://www.w3.org/2000/svg";

// An element, as "tag.class": its properties, if any; functions as listeners; "data-", "aria-", role and scope as
// attributes; then children, null for none.
export function el(name, ...content) {
  const [tag, ...classes] = name.split(".");
  const properties = content[0]?.constructor === Object ? content.shift() : {};
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  const isAttribute = (key) => /^(data-|aria-|role$|scope$)/.test(key);
  return filled(node, properties, content, (key, value) =>
    isAttribute(key) ? node.setAttribute(key, value) : (node[key] = value),
  );
}

export function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  return filled(node, attributes, children, (key, value) => node.setAttribute(key, value));
}

function filled(node, properties, children, assign) {
  const isGiven = (value) => value !== null && value !== undefined;
  for (const [key, value] of Object.entries(properties)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (isGiven(value)) assign(key, value);
  }
  node.append(...children.filter(isGiven));
  return node;
}

// A table. heads: texts of the columns, or [text, class].
export function table(name, heads, rows) {
  const cells = heads
    .map((head) => [head].flat())
    .map(([text, className]) => el("th", { scope: "col", className }, text));
  return el(name, el("thead", el("tr", ...cells)), el("tbody", ...rows));
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
  let theme = "";
  addEventListener("beforeprint", () => {
    theme = document.documentElement.dataset.theme ?? "";
    document.documentElement.dataset.theme = "light";
    again();
  });
  addEventListener("afterprint", () => {
    document.documentElement.dataset.theme = theme;
    again();
  });
  return again;
}

export function palette() {
  if (colours) return colours;
  const probe = document.body.appendChild(el("span"));
  const read = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
  };
  const names = ["raised", "heat", "one", "two", "hidden", "text", "soft", "line", "surface"];
  colours = Object.fromEntries(names.map((name) => [name, read(`--${name}`)]));
  probe.remove();
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
  const levels = levelTable(signed);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = LEVELS / (most || 1);
  for (let i = 0; i < pixels.length; i++) {
    const level = Math.round(m.data[i] * scale);
    pixels[i] = Number.isFinite(level)
      ? levels[LEVELS + Math.max(-LEVELS, Math.min(LEVELS, level))]
      : levels[2 * LEVELS + 1];
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// --- controls -----------------------------------------------------------------------------------------------------

// A button with a text or nodes. key: finds it again after it was drawn again.
export function button(content, click, { key, pressed, className, title, label, disabled } = {}) {
  const state = pressed === undefined ? null : String(pressed);
  const names = { "data-key": key, "aria-pressed": state, "aria-label": label };
  return el("button", { type: "button", className, title, disabled, ...names, click }, ...[content].flat());
}

export function selectBox(label, key, options, value, change) {
  const select = el("select", { "data-key": key, change: () => change(select.value) });
  select.append(...options.map(([text, one]) => new Option(text, one, false, String(one) === String(value))));
  return el("label.control", `${label} `, select);
}

export function buttonRow(label, key, options, value, change) {
  const buttons = options.map(([text, one]) =>
    button(text, () => change(one), { pressed: one === value, key: `${key}-${one}` }),
  );
  return el("span.control", { role: "group", "aria-label": label }, `${label} `, ...buttons);
}

// The step of a key, of which the event then has no other effect; nothing for other keys.
export function stepOf(event, steps) {
  const step = steps[event.key];
  if (step) {
    event.preventDefault();
    event.stopPropagation();
  }
  return step;
}

// The choice of one of several heads.
export const headBox = (key, n, head, change) =>
  selectBox(
    "head",
    key,
    Array.from({ length: n }, (_, i) => [i + 1, i]),
    head,
    (i) => change(Number(i)),
  );

// A row of tokens of which one is chosen; arrow keys move the choice.
export function tokenRow(label, key, tokens, place, change) {
  const buttons = tokens.map((token, i) => {
    const isChosen = i === place;
    const node = button(token, () => change(i), { className: "token", pressed: isChosen, key: isChosen ? key : null });
    node.tabIndex = isChosen ? 0 : -1;
    return node;
  });
  const moved = (event) => {
    const step = stepOf(event, { ArrowRight: 1, ArrowLeft: -1 });
    if (step) change(within(place + step, tokens.length));
  };
  return el(
    "div.tokens",
    { role: "group", "aria-label": label, keydown: moved },
    el("span.soft", `${label} `),
    ...buttons,
  );
}

// Arrow keys move the focus among the elements that `find` selects; one of them can be reached by tab.
export function rove(box, find) {
  const all = [...box.querySelectorAll(find)];
  const first = all.find((one) => one.matches("[aria-pressed='true']")) || all[0];
  for (const one of all) one.setAttribute("tabindex", one === first ? 0 : -1);
  box.addEventListener("keydown", (event) => {
    const here = all.indexOf(event.target);
    if (here < 0) return;
    const step = stepOf(event, { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 });
    if (step) all[here + step]?.focus();
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      all[here].dispatchEvent(new Event("click"));
    }
  });
}

// Swipes to the left and to the right, as steps.
export function swipeWith(box, move) {
  let start = null;
  const begin = ({ target, touches }) => (start = target.closest(".tokens, .scroll") ? null : touches[0]);
  box.addEventListener("touchstart", begin, { passive: true });
  box.addEventListener("touchend", ({ changedTouches: [end] }) => {
    if (!start) return; // what scrolls by itself
    const [x, y] = [end.clientX - start.clientX, end.clientY - start.clientY];
    if (Math.abs(x) > 60 && Math.abs(x) > 2 * Math.abs(y)) move(x < 0 ? 1 : -1);
  });
}

// --- facts --------------------------------------------------------------------------------------------------------

// The equation, the shapes by name and the source line of what a section shows.
export function facts(equation, shapes, source) {
  const line = el("p.facts");
  if (equation) line.append(el("code.equation", equation));
  for (const [name, shape] of Object.entries(shapes)) {
    if (shape) line.append(el("span", `${name} `, el("code", shapeText(shape))));
  }
  if (source) line.append(sourceLink(source));
  return line;
}

export function sourceLink(source) {
  const text = `${source.file}:${source.line}`;
  return el("details.code", el("summary", el("code", text)), el("pre", source.code));
}

export const controls = (...boxes) => el("p.controls", ...boxes);
export const note = (text) => el("p.soft", text);

// A bar for a share of 1; `mark` hatches it.
export function bar(share, text) {
  const inside = el("i");
  inside.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span.bar", el("span.rail", inside), el("b", text));
}

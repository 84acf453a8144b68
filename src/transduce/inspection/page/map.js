// The map: the paper's figure of this model, from the embedding at the bottom to the output at the top.
import { chosen, chosenPart, percent, queriesOf, set, view } from "./record.js";
import { button, el, rove, svg } from "./draw.js";

const NAMES = {
  embedding: "embedding",
  self_attention: "self-attention",
  cross_attention: "cross-attention",
  relay_attention: "relay attention",
  feed_forward: "feed-forward",
  norm: "norm",
  logits: "linear, softmax",
};
const COMPACT = 4; // layers from which the boxes are lower

// The colours of heads: classes of CSS, by label.
export const labelClass = (label) => `head-${label.replace(" ", "-")}`;

const isPreNorm = (part) => part.equation.startsWith("x + ");

const nameOf = (part) =>
  part.kind === "residual" ? (isPreNorm(part) ? "+" : "+ norm") : (NAMES[part.kind] ?? part.title.replace(/^.*, /, ""));

function dots(record, part) {
  const attention = record.attention.find((one) => one.name === part.name);
  if (!attention) return null;
  const { labels } = attention;
  return el(
    "span.dots",
    ...labels.map(({ label, shares }, head) =>
      button("", () => set({ part: part.name, map: part.name, head, open: "" }), {
        className: `dot ${labelClass(label)}`,
        title: `head ${head + 1}: ${label}; ${shares.map(([name, share]) => `${percent(share)} ${name}`).join(", ")}`,
        label: `${part.title}, head ${head + 1}: ${label}`,
        pressed: part === chosenPart(record) && head === Math.min(view.head, labels.length - 1),
        key: `dot-${part.name}-${head}`,
      }),
    ),
  );
}

// Whether the chosen position passes a part on its way to the chosen part.
function isPassed({ parts }, part, shown) {
  const isSameStack = (part.stack === "encoder") === (shown.stack === "encoder");
  return isSameStack && parts.indexOf(part) < parts.indexOf(shown);
}

function mapBox(record, part) {
  const shown = chosenPart(record);
  const isShown = part === shown;
  const way = isShown ? " shown" : isPassed(record, part, shown) ? " passed" : "";
  return el(
    "div",
    { className: `box ${part.kind}${way}`, "data-part": part.name },
    button(nameOf(part), () => set({ part: part.name, map: part.name, open: "" }), {
      className: "name",
      title: part.title,
      label: part.title,
      pressed: isShown,
      key: `map-box-${part.name}`,
    }),
    dots(record, part),
  );
}

// The parts of a stack in groups: those of a layer share a frame, and a sub-layer its residual connection.
function stackBox(record, parts) {
  const stack = el("div.stack");
  let layer = null;
  let frame = stack;
  let group = null;
  for (const part of parts) {
    if (part.layer !== layer) {
      ({ layer } = part);
      frame = layer === null ? stack : el("div.layer");
      if (layer !== null)
        stack.append(el("div.layer-box", el("span.number", { title: `layer ${layer + 1}` }, layer + 1), frame));
      group = null;
    }
    const inLayer = layer !== null;
    if (inLayer && !group) frame.append((group = el("div.group")));
    (group ?? frame).append(mapBox(record, part));
    if (part.kind === "residual") {
      group.classList.add("residual");
      group = null;
    }
  }
  const side = queriesOf(chosenPart(record));
  const tokens = parts.includes(chosenPart(record)) && record.sides[side]?.tokens;
  const here = tokens ? el("b.here", ` “${tokens[chosen(side, tokens.length)]}”`) : null;
  stack.append(el("span.stack-name", parts[0].stack, here));
  return stack;
}

export function drawModelMap(record, box) {
  const stacks = ["encoder", "decoder"]
    .map((name) => record.parts.filter((part) => (part.stack === "encoder") === (name === "encoder")))
    .filter((parts) => parts.length);
  const layers = Math.max(...record.parts.map((part) => (part.layer ?? 0) + 1));
  const figure = el(
    "div",
    { className: `figure${layers >= COMPACT ? " compact" : ""}`, role: "group", "aria-label": "map of the model" },
    ...stacks.map((parts) => stackBox(record, parts)),
  );
  const used = [...new Set(record.attention.flatMap((one) => one.labels.map(({ label }) => label)))];
  const legend = used.map((label) =>
    el("li", { title: record.rules[label] }, el("i", { className: `dot ${labelClass(label)}` }), label),
  );
  box.replaceChildren(
    el("div.title", el("h2", "The model"), button("Close", () => {}, { className: "map-switch" })),
    figure,
    used.length ? el("p.soft", "Heads by what they do on this sentence:") : "",
    el("ul.legend-heads", ...legend),
  );
  rove(figure, "button");
  if (stacks.length === 2) new ResizeObserver(() => drawMemoryLines(figure)).observe(figure); // also draws them first
}

function drawMemoryLines(figure) {
  figure.querySelector(".memory-lines")?.remove();
  figure.prepend(memoryLines(figure));
}

// Lines from the end of the encoder to each cross-attention.
function memoryLines(figure) {
  const [encoder] = figure.querySelectorAll(".stack");
  const frame = figure.getBoundingClientRect();
  const start = encoder.lastElementChild.previousElementSibling.getBoundingClientRect();
  const ends = [...figure.querySelectorAll(".cross_attention, .box.attention")].map((one) =>
    one.getBoundingClientRect(),
  );
  const lines = svg("svg", { class: "memory-lines", width: frame.width, height: frame.height, "aria-hidden": "true" });
  if (!ends.length || !frame.width) return lines;
  const [x, top] = [encoder.getBoundingClientRect().right - frame.left + 3, start.top - frame.top];
  lines.append(svg("path", { d: `M${start.left + start.width / 2 - frame.left} ${top}v-6H${x}` }));
  for (const end of ends) {
    const y = end.top + end.height / 2 - frame.top;
    lines.append(svg("path", { d: `M${x} ${top - 6}V${y}H${end.left - frame.left - 1}m-4 -3l4 3l-4 3` }));
  }
  return lines;
}

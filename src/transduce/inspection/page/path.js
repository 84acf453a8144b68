// The path of a token through the model.
import { at, choiceOf, chosen, chosenPart, meanOverHeads, page, set, shapeText } from "./record.js";
import { facts, rove, svg, tokenRow } from "./draw.js";

const LABELS = {
  embedding: "embedding",
  self_attention: "self-attention",
  cross_attention: "cross-attention",
  relay_attention: "relay attention",
  feed_forward: "feed-forward",
  residual: "residual, norm",
  norm: "norm",
  logits: "logits, softmax",
};
const GAP = 6;
const FRAME = 24; // room for the title of a layer
const GUTTER = 30; // between the columns
const NARROW = 220; // a column in which the shape needs its own line

export const pathSection = {
  id: "path",
  title: "The path",
  uses: ["part", "src", "tgt"],
  text:
    "The parts of the model in the order of computation, from top to bottom. The orange line follows the selected token. " +
    "The blue lines are its attention weights, averaged over the heads. Click a part to open its matrices.",
  render(record, panel) {
    const residual = record.parts.find((part) => part.kind === "residual");
    const last = record.parts.at(-1);
    if (residual) panel.append(facts("x ← x + Sublayer(x)", [["x", residual.shape]], residual.source));
    else panel.append(facts(last.equation, [[last.title, last.shape]], last.source));
    panel.append(...tokenRows(record), picture(record, page.width));
  },
};

// The tokens of each side, to choose from.
export function tokenRows(record, only) {
  const titles = { src: "source", tgt_in: "input", tgt_out: "predicted" };
  const sides = Object.entries(record.sides).filter(([name]) => titles[name] && (!only || only === name));
  const shown = sides.filter(([name]) => name !== "tgt_in" || !record.sides.src || only);
  return (shown.length ? shown : sides).map(([name, side]) =>
    tokenRow(titles[name], `token-${name}`, side.tokens, chosen(name, side.tokens.length), (i) =>
      set({ [choiceOf(name)]: i }),
    ),
  );
}

const sideOf = (part) =>
  part.values.findLast((value) => value.rows)?.rows || (part.stack === "encoder" ? "src" : "tgt_out");

function picture(record, width) {
  const stacks = [
    record.parts.filter((part) => part.stack === "encoder"),
    record.parts.filter((part) => part.stack !== "encoder"),
  ].filter((parts) => parts.length);
  const column = Math.min((width - GUTTER * (stacks.length - 1)) / stacks.length, 420);
  const back = svg("g");
  const front = svg("g");
  const ends = stacks.map((parts, i) => drawStack(record, parts, i * (column + GUTTER), column, back, front));
  if (stacks.length === 2) drawMemory(record, ends, column, back);
  const height = Math.max(...ends.map((end) => end.y)) + 4;
  const total = stacks.length * column + (stacks.length - 1) * GUTTER;
  const drawing = svg(
    "svg",
    {
      width: total,
      height,
      viewBox: `0 0 ${total} ${height}`,
      class: "path",
      role: "group",
      "aria-label": "the parts of the model in the order in which they run",
    },
    back,
    front,
  );
  rove(drawing, "g.box");
  return drawing;
}

function drawStack(record, parts, left, width, back, front) {
  const side = sideOf(parts[0]);
  const n = record.sides[side]?.tokens.length || 1;
  const place = chosen(side, n);
  const inner = width - 32;
  const xOf = (i, size = n) => left + 10 + ((i + 0.5) / size) * inner;
  front.append(svg("text", { x: left, y: 12, class: "stack" }, parts[0].stack));
  let y = 22;
  let frame = null;
  let from = null; // where the stream last left the straight way
  const crossings = [];
  parts.forEach((part, i) => {
    const isNew = part.layer !== null && part.layer !== undefined && part.layer !== parts[i - 1]?.layer;
    if (isNew) {
      frame = svg("rect", { x: left + 0.5, y: y + 4, width: width - 1, height: 10, rx: 8, class: "frame" });
      back.append(frame);
      front.append(svg("text", { x: left + width - 24, y: y + 18, "text-anchor": "end" }, `layer ${part.layer + 1}`));
      y += FRAME;
    }
    const isSmall = ["residual", "norm", "logits"].includes(part.kind);
    const height = isSmall ? 20 : (/attention/.test(part.kind) ? 46 : 32) + (width < NARROW ? 12 : 0);
    front.append(box(record, part, { left, y, width, height, xOf, place, n, isSmall }));
    if (part.kind === "residual" && from !== null) {
      const edge = left + width - 5;
      back.append(
        svg("path", {
          class: "bypass",
          d: `M${left + width - 14} ${from}H${edge}V${y + height / 2}H${left + width - 16}`,
        }),
      );
    }
    if (part.kind === "residual" || part.kind === "embedding") from = y + height - 4;
    if (["cross_attention", "attention"].includes(part.kind)) crossings.push(y + 10);
    y += height;
    if (frame && part.layer !== null) frame.setAttribute("height", y + 5 - Number(frame.getAttribute("y")));
    if (parts[i + 1]) {
      const ends = parts[i + 1].layer !== part.layer ? GAP + 4 : GAP;
      back.append(
        svg("path", {
          class: "way",
          d: `M${xOf(place)} ${y}v${ends + (parts[i + 1].layer !== part.layer ? FRAME : 0)}`,
        }),
      );
      y += ends;
    }
  });
  return { y: y + 6, bottom: y - 10, crossings };
}

function box(record, part, { left, y, width, height, xOf, place, n, isSmall }) {
  const isOpen = part === chosenPart(record);
  const group = svg("g", {
    class: `box ${part.kind}`,
    role: "button",
    "aria-pressed": String(isOpen),
    "data-key": `box-${part.name}`,
    "aria-label": `${part.title}, shape ${shapeText(part.shape)}`,
    click: () => openPart(part.name),
  });
  group.append(svg("rect", { x: left + 6, y, width: width - 24, height, rx: 5 }));
  const pre = part.equation.startsWith("x + ");
  const name = part.kind === "residual" && pre ? "norm, residual" : LABELS[part.kind] || part.title;
  group.append(svg("text", { x: left + 12, y: y + 14, class: "name" }, name));
  if (isSmall && width < NARROW) return group; // there is no room for the shape
  const lower = width < NARROW && !isSmall ? 12 : 0;
  const end = { x: left + width - 24, y: y + 14 + lower, "text-anchor": "end" };
  group.append(svg("text", end, shapeText(part.shape)));
  if (isSmall) return group;
  const bottom = y + height - 8;
  const attention = record.attention?.find((one) => one.name === part.name);
  if (attention && attention.weights.shape.at(-2) === n) {
    const mean = meanOverHeads(attention.weights);
    for (let j = 0; j < mean.columns; j++) {
      const weight = at(mean, place, j);
      if (weight > 0.01) {
        group.append(
          svg("path", {
            class: "reads",
            "stroke-opacity": Math.min(1, weight * 1.3 + 0.08).toFixed(2),
            "stroke-width": (0.8 + 3 * weight).toFixed(1),
            d: `M${xOf(j, mean.columns)} ${y + 19 + lower}L${xOf(place)} ${bottom}`,
          }),
        );
      }
    }
  }
  const size = Math.max(2, Math.min(10, (width - 40) / n - 1));
  for (let i = 0; i < n; i++) {
    group.append(
      svg("rect", {
        class: i === place ? "tick on" : "tick",
        x: xOf(i) - size / 2,
        y: bottom - 1,
        width: size,
        height: 5,
      }),
    );
  }
  return group;
}

// Lines from the end of the encoder to each cross-attention.
function drawMemory(record, [encoder, decoder], column, back) {
  if (!decoder.crossings.length) return;
  const x = column + GUTTER / 2;
  const last = decoder.crossings.at(-1);
  back.append(
    svg("path", {
      class: "memory",
      d: `M${column - 18} ${encoder.bottom}H${x}V${decoder.crossings[0]}M${x} ${encoder.bottom}V${last}`,
    }),
  );
  for (const y of decoder.crossings) {
    back.append(svg("path", { class: "memory", d: `M${x} ${y}H${column + GUTTER + 5}m-5 -4l5 4l-5 4` }));
  }
}

function openPart(name) {
  set({ part: name });
  const smooth = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  document.getElementById("matrices").scrollIntoView({ behavior: smooth ? "smooth" : "auto" });
}

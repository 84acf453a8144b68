// The path through the model, and the matrices of one part.
import { at, choiceOf, chosen, chosenPart, decode, format, labelsOf } from "./record.js";
import { matrix, meanOverHeads, page, set, shapeText, view } from "./record.js";
import { el, facts, heatMap, mapWidth, note, rove, selectBox, shade, css, sourceLink, svg, tokenRow } from "./draw.js";

const LABELS = {
  embedding: "embedding",
  self_attention: "self-attention",
  cross_attention: "cross-attention",
  feed_forward: "feed-forward",
  residual: "add, norm",
  norm: "norm",
};
const GAP = 6;
const FRAME = 24; // room for the title of a layer
const GUTTER = 30; // between the columns
const NARROW = 220; // a column in which the shape needs its own line

// --- the path -----------------------------------------------------------------------------------------------------

export const pathSection = {
  id: "path",
  title: "The path",
  uses: ["part", "src", "tgt"],
  text:
    "The parts of the model in the order of computation, from top to bottom. The orange line follows the selected token. " +
    "The blue lines are its attention weights, averaged over the heads. Click a part to open its matrices.",
  render(record, panel) {
    const residual = record.parts.find((part) => part.kind === "residual");
    if (residual) panel.append(facts("x ← x + Sublayer(x)", [["x", residual.shape]], residual.source));
    panel.append(...tokenRows(record));
    if (record.parts.length) panel.append(picture(record, page.width));
    else panel.append(note("This record has no parts."));
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
  const side = sideOf(parts[parts.length - 1]);
  const n = record.sides[side]?.tokens.length || 1;
  const place = chosen(side, n);
  const inner = width - 32;
  const xOf = (i, size = n) => left + 10 + ((i + 0.5) / size) * inner;
  const title = svg("text", { x: left, y: 12, class: "stack" });
  title.textContent = parts[0].stack;
  front.append(title);
  let y = 22;
  let frame = null;
  let from = null; // where the stream last left the straight way
  const crossings = [];
  parts.forEach((part, i) => {
    const isNew = part.layer !== null && part.layer !== undefined && part.layer !== parts[i - 1]?.layer;
    if (isNew) {
      frame = svg("rect", { x: left + 0.5, y: y + 4, width: width - 1, height: 10, rx: 8, class: "frame" });
      const name = svg("text", { x: left + width - 24, y: y + 18, "text-anchor": "end" });
      name.textContent = `layer ${part.layer + 1}`;
      back.append(frame);
      front.append(name);
      y += FRAME;
    }
    const isSmall = part.kind === "residual" || part.kind === "norm";
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
    if (part.kind === "cross_attention") crossings.push(y + 10);
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
  const name = svg("text", { x: left + 12, y: y + 14, class: "name" });
  const pre = record.model.settings?.residual === "pre";
  name.textContent = part.kind === "residual" && pre ? "norm, add" : LABELS[part.kind] || part.title;
  const lower = width < NARROW && !isSmall ? 12 : 0;
  const shape = svg("text", { x: left + width - 24, y: y + 14 + lower, "text-anchor": "end" });
  shape.textContent = shapeText(part.shape);
  group.append(name, shape);
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

// --- the matrices -------------------------------------------------------------------------------------------------

export const matricesSection = {
  id: "matrices",
  title: "The matrices",
  uses: ["part", "head", "src", "tgt"],
  text:
    "All values of one part. Point at a cell, or move to it with the arrow keys, to read its value. Click it, or press " +
    "Enter, to see the dot product behind it.",
  render(record, panel) {
    const part = chosenPart(record);
    if (!part) return panel.append(note("This record has no parts."));
    const heads = Math.max(
      0,
      ...part.values.filter((value) => value.axes[0] === "head").map((value) => value.shape[0]),
    );
    const head = Math.min(view.head, heads - 1);
    const sides = ["src", "tgt_in", "tgt_out"].filter((name) => part.values.some((value) => value.rows === name));
    const shownSides = sides.filter((name) => name !== "tgt_out" || !sides.includes("tgt_in"));
    panel.append(
      el(
        "p",
        { className: "controls" },
        selectBox(
          "part",
          "part",
          record.parts.map((one) => [one.title, one.name]),
          part.name,
          (name) => set({ part: name }),
        ),
        heads
          ? selectBox(
              "head",
              "head",
              Array.from({ length: heads }, (_, i) => [i + 1, i]),
              head,
              (i) => set({ head: +i }),
            )
          : null,
        ...shownSides.map((name) =>
          selectBox(
            name === "src" ? "source token" : "target token",
            `cell-${name}`,
            record.sides[name].tokens.map((token, i) => [`${i + 1} ${token}`, i]),
            chosen(name, record.sides[name].tokens.length),
            (i) => set({ [choiceOf(name)]: +i }),
          ),
        ),
      ),
    );
    panel.append(facts(part.equation, [["output", part.shape]], null), el("p", { textContent: part.text }));
    if (part.source) panel.append(el("div", { className: "source" }, sourceLink(part.source)));
    const missing = part.values.filter((value) => !value.data);
    if (missing.length) {
      panel.append(
        note(
          page.live
            ? "The server is computing these values ..."
            : `This page does not contain these values: ${missing.map((value) => value.title).join("; ")}. ` +
                "The live page (`transduce inspect`) shows them.",
        ),
      );
    }
    const detail = el("div", { className: "detail", "aria-live": "polite" });
    const shown = part.values.filter((value) => value.data);
    panel.append(
      el("div", { className: "maps" }, ...shown.map((value) => valueMap(record, part, value, head, detail))),
      detail,
    );
  },
};

function valueMap(record, part, value, head, detail) {
  const index = value.shape
    .slice(0, -2)
    .map((size, axis) => (axis === 0 && value.axes[0] === "head" ? Math.min(head, size - 1) : 0));
  const m = matrix(value.data, index);
  const rows = labelsOf(record, value.rows, m.rows);
  const where = value.axes[0] === "head" && value.shape.length > 2 ? `, head ${index[0] + 1}` : "";
  return heatMap(m, {
    title: `${value.title}${where}`,
    shape: value.shape,
    width: mapWidth(m.columns <= 64),
    rows,
    columns: labelsOf(record, value.columns, m.columns),
    rowName: value.axes.at(-2),
    columnName: value.axes.at(-1),
    mark: rows ? chosen(value.rows, m.rows) : undefined,
    key: `value-${value.name}`,
    pick: (i, j) => showCell(record, part, value, value.shape.length > 1 ? [...index, i, j] : [j], detail),
  });
}

async function showCell(record, part, value, index, box) {
  const shown = format(decode(value.data).data[flatPlace(value.shape, index)]);
  const title = el("h3", { textContent: `${value.title}${shapeText(index)} = ${shown}` });
  box.replaceChildren(title);
  try {
    const product = page.live ? await page.cell(record, value.name, index) : recordedProduct(part, value, index);
    if (title.parentNode !== box) return; // another cell was chosen meanwhile
    if (product) box.append(...productNodes(product));
    else if (page.live) box.append(note("This value is not a dot product."));
    else
      box.append(
        note("This page does not contain the operands of this cell. The live page (`transduce inspect`) shows them."),
      );
    if (product && format(product.result) !== shown) {
      box.append(
        note("This page keeps 3 significant digits of each number, so the last digit of the result can differ."),
      );
    }
  } catch (error) {
    if (title.parentNode === box) box.append(note(error.message));
  }
  box.scrollIntoView({ block: "nearest" });
}

const flatPlace = (shape, index) => index.reduce((place, i, axis) => place * shape[axis] + i, 0);

// The dot product behind a cell, if both its operands are in the record.
function recordedProduct(part, value, index) {
  if (!value.product) return null;
  const [left, right] = ["left", "right"].map((side) => part.values.find((one) => one.name === value.product[side]));
  if (!left?.data || !right?.data) return null;
  const [i, j] = index.slice(-2);
  const [a, b] = [left, right].map((one) => matrix(one.data, index.slice(0, -2)));
  const terms = Array.from({ length: a.columns }, (_, k) => [
    at(a, i, k),
    value.product.transposed ? at(b, j, k) : at(b, k, j),
  ]);
  const sum = terms.reduce((all, [x, y]) => all + x * y, 0);
  const { scale } = value.product;
  return { terms, scale, bias: null, result: scale * sum, text: `${left.title} · ${right.title}` };
}

function productNodes({ terms, scale, bias, result, text }) {
  const products = terms.map(([a, b]) => a * b);
  const sum = products.reduce((all, x) => all + x, 0);
  const most = Math.max(...products.map(Math.abs));
  const nodes = terms.map(([a, b], k) => {
    const term = el(
      "span",
      { className: "term", title: `${format(a)} × ${format(b)} = ${format(products[k])}` },
      `${format(a)} × ${format(b)}`,
    );
    term.style.borderBottomColor = css(shade(products[k], most, true));
    return term;
  });
  const ends = [`sum of ${terms.length} products: ${format(sum)}`];
  if (scale !== 1) ends.push(`× scale ${format(scale)}`);
  if (bias !== null && bias !== undefined) ends.push(`+ bias ${format(bias)}`);
  return [
    el("p", {}, el("code", { textContent: text })),
    el("div", { className: "terms" }, ...nodes),
    el("p", {}, el("b", { textContent: `${ends.join(" ")} = ${format(result)}` })),
  ];
}

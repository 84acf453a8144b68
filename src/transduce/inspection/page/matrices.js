// The matrices of one part, and the dot product behind a cell.
import { at, choiceOf, chosen, chosenPart, decode, format, labelsOf, lacksValues, matrix, page, placeText, set, view } from "./record.js";
import { css, el, facts, note, selectBox, shade, sourceLink } from "./draw.js";
import { heatMap, mapWidth } from "./heatmap.js";

const NO_PRODUCT =
  "This value is not a plain dot product of two values shown here: a softmax, a norm or a rotation is part of it.";

export const matricesSection = {
  id: "matrices",
  title: "The matrices",
  uses: ["part", "head", "src", "tgt"],
  text:
    "All values of one part. Point at a cell, or move to it with the arrow keys, to read its value. Click it, or press " +
    "Enter, to see the dot product behind it. On this page layers, heads, positions and columns count from 1; names of " +
    "parts and arrays in Python count from 0.",
  render(record, panel) {
    const part = chosenPart(record);
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
          record.parts.map((one) => [one.title + (!page.live && lacksValues(one) ? " (no values)" : ""), one.name]),
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
    panel.append(el("h3", { className: "in-print", textContent: part.title }));
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
  const labels = [...value.shape.slice(0, -2).map(() => null), labelsOf(record, value.rows, value.shape.at(-2))];
  labels[value.shape.length - 1] = labelsOf(record, value.columns, value.shape.at(-1));
  const place = value.axes.map((axis, i) => placeText(axis, index[i], labels[i])).join(", ");
  const title = el("h3", { textContent: `${value.title}, ${place} = ${shown}` });
  box.replaceChildren(title);
  try {
    const product = page.live ? await page.cell(record, value.name, index) : recordedProduct(part, value, index);
    if (title.parentNode !== box) return; // another cell was chosen meanwhile
    if (product) box.append(...productNodes(product));
    else if (page.live || !value.is_product) box.append(note(NO_PRODUCT));
    else box.append(note("This page lacks the weights of this product. The live page (`transduce inspect`) has them."));
    if (product && format(product.result) !== shown) {
      box.append(note("This page keeps 3 significant digits of each number: sums of many products differ by rounding."));
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
  const { scale, transposed, weight } = value.product;
  const [left, right] = ["left", "right"].map((side) => part.values.find((one) => one.name === value.product[side]));
  const [i, j] = index.slice(-2);
  const [a, b] = [left.data, weight ?? right.data].map((array) => matrix(array, index.slice(0, -2)));
  const terms = Array.from({ length: a.columns }, (_, k) => [at(a, i, k), transposed ? at(b, j, k) : at(b, k, j)]);
  const sum = terms.reduce((all, [x, y]) => all + x * y, 0);
  const bias = value.product.bias ? at(matrix(value.product.bias), index.at(-3) ?? 0, j) : null;
  const text = `${left.title} · ${right?.title ?? "weights"}`;
  return { terms, scale, bias, result: scale * sum + (bias ?? 0), text };
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

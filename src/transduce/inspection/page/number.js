// "This number": the value of a cell, the formula behind it, and the line of code that computes it.
import { at, decode, format, labelsOf, matrix, page, partNamed, placeText, rowAt, stageParts, view } from "./record.js";
import { css, el, note, shade, sourceLink } from "./draw.js";

const NO_PRODUCT =
  "This value is not a plain dot product of two values shown here: a norm, a rotation or an activation is part of it.";
const MOST_TERMS = 8; // that the panel shows
const CONTEXT = 3; // lines of code before and after the marked one

const total = (numbers) => numbers.reduce((sum, x) => sum + x, 0);
const flatPlace = (shape, index) => index.reduce((place, i, axis) => place * shape[axis] + i, 0);
const cellValue = (value, index) => decode(value.data).data[flatPlace(value.shape, index)];

export function cellTitle(record, value, index) {
  return `${value.title}, ${cellPlace(record, value, index)} = ${format(cellValue(value, index))}`;
}

function cellPlace(record, value, index) {
  const labels = [...value.shape.slice(0, -2).map(() => null), labelsOf(record, value.rows, value.shape.at(-2))];
  labels[value.shape.length - 1] = labelsOf(record, value.columns, value.shape.at(-1));
  return value.axes.map((axis, i) => placeText(axis, index[i], labels[i])).join(", ");
}

// {text, terms: [{text, value, share, signed, on}], end, result} of a cell; null if it has no formula.
async function formulaOf(record, part, value, index) {
  if (value.softmax.length) return softmaxOf(record, part, value, index);
  const sums = { residual: residualSum, embedding: embeddingSum };
  const sum = sums[part.kind]?.(record, part, value, index);
  if (sum) return sum;
  if (!value.is_product) return null;
  const product = page.cell ? await page.cell(record, value.name, index) : recordedProduct(part, value, index);
  return product && productOf(product);
}

// The formula with all terms, or with the largest of them.
export async function formulaNodes(record, part, value, index, most = Infinity) {
  try {
    const formula = await formulaOf(record, part, value, index);
    if (!formula) {
      const lacks = !page.live && value.is_product;
      return [
        note(
          lacks
            ? "This page lacks the weights of this product. The live page (`transduce inspect`) has them."
            : NO_PRODUCT,
        ),
      ];
    }
    const shown = [...formula.terms];
    if (shown.length > most) shown.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    const rest = shown.splice(most);
    const nodes = shown.map((term) => {
      const node = el("span", { className: term.on ? "term on" : "term", title: term.title ?? "" }, term.text);
      node.style.borderColor = css(shade(term.share, 1, formula.signed));
      return node;
    });
    const more = `${rest.length} more = ${format(total(rest.map((term) => term.value)))}`;
    if (rest.length) nodes.push(el("span.term.rest", more));
    const box = [el("p", el("code", formula.text)), el("div.terms", ...nodes), el("p", el("b", formula.end))];
    if (format(formula.result) !== format(cellValue(value, index))) {
      box.push(note("This page keeps 3 significant digits of each number: sums of many numbers differ by rounding."));
    }
    return box;
  } catch (error) {
    return [note(error.message)];
  }
}

// The softmax behind a weight or a probability: the exponentials of its row, and their sum.
function softmaxOf(record, part, value, index) {
  const column = index.at(-1);
  const { scores, powers, sum, most, parts } = softmaxRow(part, value, index);
  const labels = labelsOf(record, value.columns, scores.length);
  const terms = scores.map((score, j) => ({
    text: `${labels ? `${labels[j]} ` : ""}exp(${format(score)})`,
    title: `${labels?.[j] ?? j + 1}: ${format(Math.exp(score))}`,
    value: Math.exp(score),
    share: powers[j] / sum,
    on: j === column,
  }));
  const result = powers[column] / sum;
  const score = parts.map((scoresOf) => format(scoresOf[column])).join(" + ");
  const [size, shown] = [part.kind === "logits" ? part.shape.at(-1) : scores.length, format(sum * Math.exp(most))];
  const end = `sum over all ${size}: ${shown}; exp(${score}) / ${shown} = ${format(result)}`;
  const titles = value.softmax.map((name) => part.values.find((one) => one.name === name).title);
  return { text: `softmax of: ${titles.join(" + ")}`, terms, end, result };
}

// The scores of a row of weights, their powers relative to the largest one, and the sum of the powers.
export function softmaxRow(part, value, index) {
  const row = index.at(-2);
  const rowOf = ({ data }) => [...rowAt(matrix(data, index.slice(0, -2)), row)];
  const parts = value.softmax.map((name) => rowOf(part.values.find((one) => one.name === name)));
  const scores = parts[0].map((_, j) => total(parts.map((scoresOf) => scoresOf[j])));
  const most = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - most));
  // The sum over all outputs, of which some are shown: their share of it is that of their probabilities.
  const sum = total(powers) / (part.kind === "logits" ? total(rowOf(value)) : 1);
  return { scores, powers, sum, most, parts };
}

// x + Sublayer(x).
function residualSum(record, part, value, index) {
  const name = part.name.replace(/_residual$/, "");
  const added = partNamed(record, name)?.values.at(-1);
  const before = part.values[0];
  const isSum = value.title.startsWith("x + ");
  if (!isSum || !added?.data || !before.data) return null;
  return sumOf(value.title, ["x", cellValue(before, index)], ["added", cellValue(added, index)]);
}

// The scaled vector of the token and that of its position, if x is their sum.
function embeddingSum(record, part, value, index) {
  const [before] = part.values;
  const scheme = schemeOf(record, part);
  if (!scheme?.table || value !== part.values.at(-1) || !before.data) return null;
  const scale = hasScale(part) ? Math.sqrt(part.shape.at(-1)) : 1;
  const a = scale * cellValue(before, index);
  const sum = sumOf(part.equation, ["scaled token", a], ["position", at(matrix(scheme.table), ...index)]);
  return Math.abs(sum.result - cellValue(value, index)) < 0.01 * (1 + Math.abs(a)) ? sum : null;
}

// The positional scheme that is added to an embedding, and whether the embedding is scaled before.
export const schemeOf = (record, part) =>
  record.positions?.find((one) => one.stack === part.stack && one.text.startsWith("added to the emb"));
export const hasScale = (part) => part.equation.includes("s E[token]");

function sumOf(text, ...named) {
  const most = Math.max(...named.map(([, x]) => Math.abs(x)));
  const terms = named.map(([name, x]) => ({ text: `${name} ${format(x)}`, value: x, share: x / most }));
  const result = total(named.map(([, x]) => x));
  const end = `${named.map(([, x]) => format(x)).join(" + ")} = ${format(result)}`;
  return { text, terms, end, result, signed: true };
}

// The dot product behind a cell, if both its operands are in the record.
function recordedProduct(part, value, index) {
  if (!value.product) return null;
  const { scale, transposed, weight } = value.product;
  const [left, right] = ["left", "right"].map((side) => part.values.find((one) => one.name === value.product[side]));
  const [i, j] = index.slice(-2);
  const [a, b] = [left.data, weight ?? right.data].map((array) => matrix(array, index.slice(0, -2)));
  const terms = Array.from({ length: a.columns }, (_, k) => [at(a, i, k), transposed ? at(b, j, k) : at(b, k, j)]);
  const sum = total(terms.map(([x, y]) => x * y));
  const bias = value.product.bias ? at(matrix(value.product.bias), index.at(-3) ?? 0, j) : null;
  const text = `${left.title} · ${right?.title ?? "weights"}`;
  return { terms, scale, bias, result: scale * sum + (bias ?? 0), text };
}

function productOf({ terms: factors, scale, bias, result, text }) {
  const products = factors.map(([a, b]) => a * b);
  const most = Math.max(...products.map(Math.abs));
  const terms = factors.map(([a, b], k) => ({
    text: `${format(a)} × ${format(b)}`,
    title: `${k + 1}: ${format(a)} × ${format(b)} = ${format(products[k])}`,
    value: products[k],
    share: products[k] / most,
  }));
  const ends = [`sum of ${terms.length} products: ${format(total(products))}`];
  if (scale !== 1) ends.push(`× scale ${format(scale)}`);
  if (bias !== null && bias !== undefined) ends.push(`+ bias ${format(bias)}`);
  return { text, terms, end: `${ends.join(" ")} = ${format(result)}`, result, signed: true };
}

// --- the panel ----------------------------------------------------------------------------------------------------

export async function fillNumber(record, part, value, index, box) {
  const title = el("h2", "This number");
  const readout =
    value?.data && `${format(cellValue(value, index))}: ${value.title}, ${cellPlace(record, value, index)} ▾`;
  document.getElementById("readout").textContent = readout ?? "";
  if (!value?.data) {
    box.replaceChildren(title, note("Click a cell on the stage to see its formula and its line of code."));
    return;
  }
  const number = el("output.big", format(cellValue(value, index)));
  const place = el("p.place", el("b", value.title), ` ${cellPlace(record, value, index)}`);
  const said = value.text ? [el("p", value.text)] : [];
  const formula = el("div.formula");
  box.replaceChildren(title, place, number, ...said, formula, ...codeNodes(record, part, value));
  formula.append(...(await formulaNodes(record, part, value, index, MOST_TERMS)));
}

// The line that computes the value, between its neighbours; the whole function below.
function codeNodes(record, part, value) {
  const source = value.line ? record.sources[value.line[0]] : part.source;
  if (!source) return [];
  const lines = source.code.split("\n");
  const marked = value.line?.[1] ?? -1;
  let first = Math.max(0, marked - CONTEXT);
  const near = marked < 0 ? [] : lines.slice(first, marked + CONTEXT + 1);
  const isBefore = (line, i) => first + i < marked && (line.includes('"""') || line.trim() === "");
  const dropped = near.findLastIndex(isBefore) + 1;
  near.splice(0, dropped);
  first += dropped;
  const indent = Math.min(...near.filter((line) => line.trim()).map((line) => line.search(/\S/)));
  const shown = near.map((line, i) =>
    el(first + i === marked ? "mark" : "span", { textContent: `${line.slice(indent)}\n` }),
  );
  return [
    el("h3", `In the code: ${source.file}, line ${source.line + Math.max(0, marked)}`),
    marked < 0 ? null : el("pre.near", ...shown),
    sourceLink({ ...source, line: source.line + Math.max(0, marked) }),
  ].filter(Boolean);
}

// The chosen cell; if none is chosen on this stage, the fallback.
export function chosenCell(record, fallback, others = []) {
  const values = [...stageParts(record).flatMap((part) => part.values), ...others];
  const value = values.find((one) => one.name === view.cell && one.data);
  const fits =
    value && view.index.length === value.shape.length && view.index.every((i, axis) => i < value.shape[axis]);
  return fits ? { value, index: view.index } : fallback;
}

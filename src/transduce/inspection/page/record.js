// Records: their arrays, sides and parts, and the choices that all sections share.

// width: of a panel, in pixels. ask: answers requests in a page without a server. cell: a request of a page with one.
// Records of both have their request: `asked`.
export const page = {
  live: false,
  records: [],
  width: 340,
  render: () => {},
  inspectSentence: () => {},
  ask: null,
  cell: null,
};

export const [UNK, BOS, EOS] = [1, 2, 3]; // special ids of every vocabulary

export const MODES = { explore: "Explore", tour: "Tour", lab: "Lab", all: "All values" };
export const LANGUAGES = ["en", "de"]; // of the tour

// Choices of the reader. A record without the chosen part, head or token shows its nearest one.
export const view = {
  part: "",
  head: 0,
  src: 0,
  tgt: 0,
  map: "",
  order: "layer",
  unit: "subwords",
  drawing: "lines",
  bias: 0,
  step: 0,
  mode: "explore", // a key of MODES
  model: 0, // number of the record on the stage
  key: -1, // the one with the largest weight
  cell: "", // name of the value with the chosen cell, and its index
  index: [],
  open: "", // name of the value whose whole matrix is open
  tree: false,
  stop: 0,
  language: "en",
};

// Another part, query, head or key has another number to explain, unless it is chosen with them.
const MOVES = ["part", "head", "src", "tgt", "key", "model"];

export function set(changes) {
  if (!("cell" in changes) && MOVES.some((name) => name in changes)) changes = { ...changes, cell: "", index: [] };
  Object.assign(view, changes);
  page.render(Object.keys(changes));
}

const changes = new Map();

// What the reader changed in the run of a record: names of parts that are off, and ids of forced tokens.
export function changesOf(run) {
  if (!changes.has(run)) changes.set(run, { off: [], prefix: [] });
  return changes.get(run);
}

export const forgetPrefixes = () => changes.forEach((one) => (one.prefix = []));

// --- arrays -------------------------------------------------------------------------------------------------------

const decoded = new WeakMap(); // from an array of a record to its decoded form

// The bytes of a base64 text.
export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// {shape, data: numbers in C order} of an array of a record; an array that was computed here has its numbers.
export function decode(array) {
  if (typeof array.data !== "string") return array;
  if (decoded.has(array)) return decoded.get(array);
  const bytes = bytesOf(array.data);
  let data = bytes;
  if (array.dtype === "float32") data = new Float32Array(bytes.buffer);
  if (array.dtype === "float16") data = new Float32Array(new Float16Array(bytes.buffer));
  const found = { shape: array.shape, data };
  decoded.set(array, found);
  return found;
}

// The matrix of the last two axes at `index` of the earlier axes: {rows, columns, data}.
export function matrix(array, index = []) {
  const { shape, data } = decode(array);
  const rows = shape.length > 1 ? shape.at(-2) : 1;
  const columns = shape.at(-1) ?? 1;
  let place = 0;
  shape.slice(0, -2).forEach((size, axis) => {
    place = place * size + Math.min(index[axis] ?? 0, size - 1);
  });
  return { rows, columns, data: data.subarray(place * rows * columns, (place + 1) * rows * columns) };
}

export const at = (m, row, column) => m.data[row * m.columns + column];

export const rowAt = (m, row) => m.data.subarray(row * m.columns, (row + 1) * m.columns);

// The nearest index of `size` elements.
export const within = (i, size) => Math.min(Math.max(i, 0), size - 1);

export function largest(data) {
  let most = 0;
  for (const x of data) if (Number.isFinite(x) && Math.abs(x) > most) most = Math.abs(x);
  return most;
}

export const isSigned = (data) => data.some((x) => x < 0 && Number.isFinite(x));

// Weights between words: summed over the columns of a word, averaged over its rows.
export function mergeWords(m, rowPlaces, columnPlaces) {
  const merged = { rows: Math.max(...rowPlaces) + 1, columns: Math.max(...columnPlaces) + 1 };
  merged.data = new Float32Array(merged.rows * merged.columns);
  const sizes = rowPlaces.reduce((all, row) => {
    all[row] = (all[row] || 0) + 1;
    return all;
  }, []);
  for (let i = 0; i < m.rows; i++) {
    for (let j = 0; j < m.columns; j++) {
      merged.data[rowPlaces[i] * merged.columns + columnPlaces[j]] += at(m, i, j) / sizes[rowPlaces[i]];
    }
  }
  return merged;
}

// The place of each token's word, and the texts of the words; where a side does not fit, each token is a word.
export function wordsOf(record, name, tokens) {
  const side = record.sides[name];
  if (side?.words.length !== tokens.length) return { places: tokens.map((_, i) => i), texts: tokens };
  const numbers = [...new Set(side.words)];
  return { places: side.words.map((word) => numbers.indexOf(word)), texts: side.word_texts };
}

// --- numbers ------------------------------------------------------------------------------------------------------

// A number with 3 significant digits.
export function format(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "not a number";
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const size = Math.abs(x);
  const text = size >= 1000 && size < 1e6 ? String(Math.round(size)) : size.toPrecision(3);
  return (
    (x < 0 ? "−" : "") + (text.includes("e") ? size.toExponential(2).replace("e-", "e−").replace("e+", "e") : text)
  );
}

export const percent = (p) =>
  p >= 0.9995 || p === 0 ? `${(100 * p).toFixed(0)} %` : p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;

// A place on an axis, counted from 1, with its token if it has one.
export const placeText = (axis, i, labels) => `${axis ?? "row"} ${i + 1}${labels ? ` “${labels[i]}”` : ""}`;

export const shapeText = (shape) => `[${shape.join(", ")}]`;

// --- sides and parts ----------------------------------------------------------------------------------------------

// The choice that holds the chosen token of a side: tokens of tgt_in and tgt_out are chosen together.
export const choiceOf = (side) => (side === "src" ? "src" : "tgt");

// The side of the queries, or of the positions, of a part.
export const queriesOf = (part) =>
  (
    part.values.findLast((value) => value.rows && value.axes.at(-1) !== "width") ??
    part.values.findLast((value) => value.rows)
  )?.rows ?? "src";

export const chosen = (side, size) => Math.min(view[choiceOf(side)], size - 1);

// Tokens of an axis; null where its length is not that of its side, as behind a convolution.
export function labelsOf(record, side, size) {
  const tokens = side && record.sides[side]?.tokens;
  return tokens && tokens.length === size ? tokens : null;
}

export const predictedSide = (record) =>
  ["tgt_out", "label"].find((side) => record.sides[side]) || Object.keys(record.sides)[0];

export function chosenPart(record) {
  const { parts } = record;
  return (
    partNamed(record, view.part) ||
    parts.findLast((part) => part.kind === "cross_attention") ||
    parts.find((part) => part.kind === "attention") ||
    parts.find((part) => /self_attention$/.test(part.kind)) ||
    parts[0]
  );
}

// Whether the record lacks matrices of a part.
export const lacksValues = (part) => part?.values.some((value) => !value.data);

export const shownRecord = () => page.records[Math.min(view.model, page.records.length - 1)];

// The parts whose matrices the stage shows: the chosen one, and the residual connection around it.
export const stageParts = (record) =>
  [chosenPart(record), partNamed(record, `${chosenPart(record).name}_residual`)].filter(Boolean);

export const partNamed = (record, name) => record.parts?.find((part) => part.name === name);

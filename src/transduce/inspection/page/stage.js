// The stage: one position through one part of the model, from left to right.
import { at, choiceOf, chosen, chosenPart, format, labelsOf, lacksValues, largest, matrix } from "./record.js";
import { page, partNamed, percent, queriesOf, rowAt, set, shapeText, stageParts, view } from "./record.js";
import { button, el, note, paint, svg, tokenRow } from "./draw.js";
import { chosenCell, fillNumber, hasScale, schemeOf, softmaxRow } from "./number.js";
import { labelClass } from "./map.js";
import { markCell, strip, weightPicture } from "./strips.js";
import { valueMap } from "./heatmap.js";

const ROW = 19; // height of a key, in pixels
const SIDES = { src: "source", tgt_in: "input", tgt_out: "output" };

// What a lesson changes on the stage: {key, score} or {key, only: true}. The record stays as it is.
export const trial = { change: null };

// --- parts of every stage -----------------------------------------------------------------------------------------

// The queries, rows or positions of a part, of which one is on the stage.
function positionOf(record, part) {
  const side = queriesOf(part);
  const value = part.values.findLast((one) => one.rows === side);
  const n = value?.shape.at(-2) ?? 1;
  return { side, n, row: chosen(side, n), tokens: labelsOf(record, side, n) };
}

function opener(value, text, kind = "") {
  return button(text, () => set({ open: view.open === value.name ? "" : value.name }), {
    className: `opener ${kind}`,
    title: `${value.title} ${shapeText(value.shape)}: open the whole matrix`,
    key: `open-${value.name}`,
  });
}

// A strip with its name, which opens the whole matrix.
function named(record, value, lead, text, { kind = "", ...options } = {}) {
  return el("div.named", opener(value, text, kind), strip(record, value, lead, { kind, label: text, ...options }));
}

const cell = (name, ...nodes) => el("span", { className: `cell ${name}`, role: "cell" }, ...nodes);
const tableRow = (className, ...cells) => el("div", { className: `row ${className}`, role: "row" }, ...cells);
const column = (value, text, kind) =>
  el("span.column", { role: "columnheader" }, value ? opener(value, text, kind) : text);

const sign = (text) => el("span.sign", { "aria-hidden": "true" }, text);

// The weights of a product with a row, between the row and the result; nothing if the record lacks them.
function weightOf(value, head, label, row) {
  const { product } = value;
  if (!product?.weight || (product.head !== undefined && product.head !== head)) return [];
  const choose = (j) => set({ cell: value.name, index: value.shape.length > 2 ? [head, row, j] : [row, j] });
  const title = el("span.opener", label);
  const picture = weightPicture(value, head, choose, label);
  return [sign("×"), el("div.named.of-weight", title, picture), sign("=")];
}

function section(id, title, ...nodes) {
  const heading = el("h3", ...title.split(/(“.*?”)/).map((text, i) => (i % 2 ? el("b.here", text) : text)));
  return el("section.band", { id: `band-${id}`, "aria-label": title }, heading, ...nodes);
}

const band = (id, title, ...nodes) => section(id, title, el("div.flow", ...nodes));

// x + Sublayer(x), and the norm after it.
function residualNodes(record, part, row, out) {
  const residual = partNamed(record, `${part.name}_residual`);
  if (!residual || lacksValues(residual)) return [];
  const [before, sum, normed] = residual.values;
  const nodes = [named(record, before, [row], "x"), sign("+"), named(record, out, [row], "this part"), sign("=")];
  nodes.push(named(record, sum, [row], normed ? "sum" : "new x"));
  if (normed) nodes.push(sign("→"), named(record, normed, [row], "norm"));
  return [band("residual", "Added to the residual stream", ...nodes)];
}

// --- attention ----------------------------------------------------------------------------------------------------

function attentionStage(record, part, box) {
  const get = (name) => part.values.find((one) => one.name === `${part.name}.${name}`);
  const [input, weights, merged] = ["input", "weights", "output.input"].map(get);
  const query = get("query") ?? get("hidden");
  const out = part.values.find((one) => one.name === part.name);
  const [nHeads, nRows, nKeys] = weights.shape;
  const head = Math.min(view.head, nHeads - 1);
  const layer = record.attention.find((one) => one.name === part.name);
  const row = chosen(weights.rows, nRows);
  const shares = trialShares(part, weights, [head, row]);
  const key = view.key < 0 ? shares.indexOf(Math.max(...shares)) : Math.min(view.key, nKeys - 1);
  box.append(headCard(record, part, layer, weights, head, row, shares));
  if (query && leadOf(query, head, row)) {
    const asks = input && leadOf(input, head, row) ? [named(record, input, [row], "x")] : [];
    if (asks.length) asks.push(...weightOf(query, head, "W_Q", row));
    asks.push(named(record, query, leadOf(query, head, row), `q, row ${row + 1} of ${query.title}`, { kind: "q" }));
    const predicts =
      weights.rows === "tgt_in" && record.tokens[row] ? `, to predict “${record.tokens[row].token}”` : "";
    box.append(band("query", `“${layer.row_tokens[row]}” asks${predicts}`, ...asks));
  }
  box.append(keyTable(record, part, { head, row, key, shares, tokens: layer.column_tokens, get, out }));
  if (merged && out) {
    const nodes = [named(record, merged, [row], "concat", { segments: nHeads, segment: head })];
    nodes.push(...weightOf(out, 0, "W_O", row), named(record, out, [row], "output"));
    box.append(band("output", "All heads side by side, mixed by W_O", ...nodes));
    box.append(...residualNodes(record, part, row, out));
  }
  return { value: weights, index: [head, row, key] };
}

// The index of a row, of a value with or without heads; null if there is no such row.
const leadOf = (value, head, row) =>
  value && row < value.shape.at(-2) ? (value.axes[0] === "head" ? [head, row] : [row]) : null;

// The weights of a query; in a lesson, those after a change of one score or weight.
function trialShares(part, weights, [head, row]) {
  const shares = [...rowAt(matrix(weights.data, [head]), row)];
  if (!trial.change) return shares;
  const { key, score, only } = trial.change;
  if (only) return shares.map((_, j) => (j === key ? 1 : 0));
  const { scores, most } = softmaxRow(part, weights, [head, row, 0]);
  const powers = scores.map((x, j) => Math.exp(x + (j === key ? score : 0) - most));
  const sum = powers.reduce((all, x) => all + x, 0);
  return powers.map((x) => x / sum);
}

// What a head does on this sentence: its label, the rule, its largest shares, and all its weights as a small picture.
function headCard(record, part, layer, weights, head, row, shares) {
  const { label, score, shares: largestShares } = layer.labels[head];
  const buttons = layer.labels.map((one, i) =>
    button([el("i", { className: `dot ${labelClass(one.label)}` }), String(i + 1)], () => set({ head: i }), {
      className: "head-button",
      pressed: i === head,
      label: `head ${i + 1}: ${one.label}`,
      key: `head-${i}`,
    }),
  );
  const most = largestShares.map(([of, share]) => `${percent(share)} ${of}`).join(", ");
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
  const reads = order.filter((j) => shares[j] > 0.01).map((j) => `“${layer.column_tokens[j]}” ${percent(shares[j])}`);
  const picture = paint(matrix(weights.data, [head]), 1, false);
  picture.style.aspectRatio = `${picture.width} / ${picture.height}`;
  const open = { className: "thumbnail", label: "all queries and keys of this head", key: "thumbnail" };
  const heads = el("span.heads-row", { role: "group", "aria-label": "head" }, ...buttons);
  const says = [
    el("i", { className: `dot ${labelClass(label)}` }),
    el("b", ` ${score === null ? most : `${label} (${format(score)})`}`),
    `: ${record.rules[label]}. Here, `,
    el("b", `“${layer.row_tokens[row]}” reads ${reads.join(", ")}`),
  ];
  return el(
    "div.card",
    el("div.title", el("h2", `${part.title}, head\u00a0${head + 1}`), heads),
    button(picture, () => set({ open: weights.name }), open),
    el("p.does", ...says, "."),
  );
}

const powerText = (x) => (x > 0 && x < 0.001 ? "≈ 0" : format(x));

// A row for each key: K, the score, the mask, e^s, the share, V; then the ribbons that add the values.
function keyTable(record, part, { head, row, key: chosenKey, shares, tokens, get, out }) {
  const [scores, bias, weights, heads] = ["scores", "bias", "weights", "heads"].map(get);
  const [keys, values] = [get("key") ?? get("memory"), get("value") ?? get("memory")];
  const numbersOf = (value) => value && shares.map((_, j) => at(matrix(value.data, [head]), row, j));
  const [score, added] = [scores, bias].map(numbersOf);
  const most = score && largest(score);
  const power = scores && weights.softmax.length && !trial.change ? softmaxRow(part, weights, [head, row, 0]) : null;
  const pick = (value, j) => () => set({ key: j, cell: value.name, index: [head, row, j] });
  const vector = (value, kind, j) => {
    const lead = leadOf(value, head, j);
    return cell(kind, lead ? strip(record, value, lead, { kind, label: `${kind} of ${tokens[j]}` }) : "");
  };
  const scoreNodes = (j) => {
    const nodes = [signedBar(score[j], most, pick(scores, j))];
    if (added?.[j] === -Infinity) nodes.push(el("i.shutter", { title: "hidden by the mask" }));
    else if (added?.[j]) nodes.push(el("small", { click: pick(bias, j) }, `+ ${format(added[j])}`));
    return nodes;
  };
  const rows = shares.map((share, j) => {
    const name = { className: "key-token", title: tokens[j], key: `key-${j}`, pressed: j === chosenKey };
    const isShut = added?.[j] === -Infinity;
    return tableRow(
      `${isShut ? "shut" : ""}${j === chosenKey ? " on" : ""}`,
      cell("token-cell", button(tokens[j], pick(weights, j), name)),
      vector(keys, "k", j),
      cell("score", ...(score ? scoreNodes(j) : [])),
      cell("power", power ? powerText(isShut ? 0 : Math.exp(power.scores[j])) : ""),
      cell("share", shareBar(share, pick(weights, j))),
      vector(values, "v", j),
    );
  });
  const [scale, total] = [keys?.axes[0] === "head" ? "q·k / √d" : "score", shares.reduce((sum, x) => sum + x, 0)];
  const heading = [column(null, "key"), column(keys, "K", "k"), column(scores, scale), column(null, "e^s")];
  heading.push(column(weights, "softmax"), column(values, "V", "v"));
  const sums = [cell("sum-name", "sum"), cell("power", power ? format(power.sum * Math.exp(power.most)) : "")];
  const grid = el(
    "div.keys",
    { role: "table", "aria-label": "keys of this query" },
    tableRow("heading", ...heading),
    ...rows,
    tableRow("sum", ...sums, cell("share", percent(total))),
  );
  const numbers = trial.change && values && valueSum(matrix(values.data, [head]), shares);
  const result = heads ?? out;
  const output = result ? named(record, result, leadOf(result, head, row), "output z", { kind: "v", numbers }) : "";
  const parts = [grid, ribbons(shares), el("div.sink", output)];
  const read = part.kind === "cross_attention" ? "memory" : "x";
  const made = (value, name) => (value?.is_product ? ` (${read} ${name})` : "");
  const title = `is compared with every key${made(keys, "W_K")}, and reads the values${made(values, "W_V")}`;
  return section("keys", title, el("div.keys-and-output", ...parts));
}

// The values of all keys, each times its weight.
function valueSum(values, shares) {
  const sum = new Float32Array(values.columns);
  shares.forEach((share, j) => sum.forEach((_, i) => (sum[i] += share * at(values, j, i))));
  return sum;
}

function signedBar(x, most, click) {
  const inside = el("i", { className: x < 0 ? "below" : "above" });
  const width = 50 * Math.min(1, Math.abs(x) / (most || 1));
  Object.assign(inside.style, { width: `${width}%`, [x < 0 ? "right" : "left"]: "50%" });
  return barButton(inside, format(x), click, "signed-bar");
}

function shareBar(share, click) {
  const inside = el("i");
  inside.style.width = `${100 * share}%`;
  return barButton(inside, percent(share), click, "share-bar");
}

const barButton = (inside, text, click, className) =>
  button([el("span.rail", inside), el("b", text)], click, { className });

// Ribbons from the values to the head's output, as wide as their weights; together they fill its height.
function ribbons(shares) {
  const tall = shares.length * ROW;
  const sink = Math.min(56, tall * 0.7);
  const size = { viewBox: `0 0 100 ${tall}`, preserveAspectRatio: "none", height: tall };
  const drawing = svg("svg", { class: "ribbons", ...size, "aria-hidden": "true" });
  let end = (tall - sink) / 2;
  shares.forEach((share, j) => {
    const width = share * sink;
    const start = (j + 0.5) * ROW - width / 2;
    const there = `M0 ${start}C60 ${start} 40 ${end} 100 ${end}`;
    const back = `v${width}C40 ${end + width} 60 ${start + width} 0 ${start + width}z`;
    if (share > 0.004)
      drawing.append(svg("path", { d: there + back, "fill-opacity": (0.35 + 0.6 * share).toFixed(2) }));
    end += width;
  });
  return drawing;
}

// --- other parts --------------------------------------------------------------------------------------------------

function feedForwardStage(record, part, box) {
  const { row } = positionOf(record, part);
  const [input, expanded, hidden, out] = part.values;
  if (!out) return genericStage(record, part, box);
  const m = matrix(hidden.data);
  const active = [...rowAt(m, row)];
  const n = active.filter((x) => x > 0).length;
  const show = (value, text) => named(record, value, [row], text);
  const first = [show(input, "x"), ...weightOf(expanded, 0, "W₁", row), show(expanded, expanded.title)];
  const last = [show(hidden, "after"), ...weightOf(out, 0, "W₂", row), show(out, "output")];
  box.append(
    band("expand", `Each of ${m.columns} detectors looks at x`, ...first),
    band("activate", `${n} of ${m.columns} are positive`, show(expanded, "before"), sign("→"), show(hidden, "after")),
    band("contract", "Each active detector writes a vector", ...last),
    ...residualNodes(record, part, row, out),
  );
  return { value: hidden, index: [row, active.indexOf(Math.max(...active))] };
}

function embeddingStage(record, part, box) {
  const { row, tokens } = positionOf(record, part);
  const out = part.values.at(-1);
  const scheme = schemeOf(record, part);
  const nodes = part.values.slice(0, -1).map((value) => named(record, value, [row], value.title));
  const others = scheme?.table ? [positionValue(scheme)] : [];
  const plus = hasScale(part) ? "× √d +" : "+";
  for (const position of others) nodes.push(sign(plus), named(record, position, [row], `position ${row + 1}`));
  const elsewhere = record.absent.positions ?? "Here, the positions enter the scores of attention.";
  box.append(
    band(
      "embedding",
      `“${tokens?.[row] ?? row + 1}” becomes a vector`,
      ...nodes,
      sign("="),
      named(record, out, [row], "x"),
    ),
    note(scheme?.table ? part.equation : elsewhere),
  );
  return { value: out, index: [row, 0], others };
}

// The table of the positions, which is no value of the part, as a value.
const positionValue = ({ table: data, side: rows }) => ({
  name: "position",
  title: "position",
  data,
  shape: data.shape,
  axes: ["position", "width"],
  rows,
  softmax: [],
});

function logitsStage(record, part, box) {
  const { row, tokens } = positionOf(record, part);
  const [hidden, logits, probabilities] = part.values;
  const [m, scores] = [probabilities, logits].map((value) => matrix(value.data));
  const labels = labelsOf(record, probabilities.columns, m.columns) ?? [];
  const best = Array.from({ length: m.columns }, (_, j) => j).sort((a, b) => at(m, row, b) - at(m, row, a));
  const pick = (value, j) => () => set({ cell: value.name, index: [row, j] });
  const { powers, most: top } = softmaxRow(part, probabilities, [row, 0]);
  const rows = best
    .slice(0, 10)
    .map((j) =>
      tableRow(
        labels[j] === tokens?.[row] ? "on" : "",
        cell("token-cell", labels[j] ?? j + 1),
        cell("score", signedBar(at(scores, row, j), largest(scores.data), pick(logits, j))),
        cell("power", powerText(powers[j] * Math.exp(top))),
        cell("share", shareBar(at(m, row, j), pick(probabilities, j))),
      ),
    );
  const heading = [column(null, ""), column(logits, "logit"), column(null, "e^s"), column(probabilities, "softmax")];
  const table = { className: "keys candidates", role: "table", "aria-label": "outputs" };
  box.append(
    band("hidden", `What is known before “${tokens?.[row] ?? row + 1}”`, named(record, hidden, [row], "h")),
    section("candidates", "is compared with every output", el("div", table, tableRow("heading", ...heading), ...rows)),
  );
  return { value: probabilities, index: [row, best[0]] };
}

function genericStage(record, part, box) {
  const { row } = positionOf(record, part);
  const strips = part.values.map((value) => {
    const lead = [...value.shape.slice(0, -2).map(() => 0), Math.min(row, (value.shape.at(-2) ?? 1) - 1)];
    return el("div.flow", named(record, value, lead, value.title));
  });
  box.append(section("values", part.equation, ...strips));
  const last = part.values.at(-1);
  return { value: last, index: [...last.shape.slice(0, -2).map(() => 0), row, 0] };
}

function stageOf(record, part) {
  const has = (name) => part.values.some((one) => one.name === `${part.name}.${name}`);
  if (has("weights") && record.attention.some((one) => one.name === part.name)) return attentionStage;
  const kinds = { feed_forward: feedForwardStage, embedding: embeddingStage, logits: logitsStage };
  return kinds[part.kind] ?? genericStage;
}

// --- the whole stage ----------------------------------------------------------------------------------------------

export function drawStage(record, box, number) {
  const part = chosenPart(record);
  const draw = stageOf(record, part);
  const { side, n, row, tokens } = positionOf(record, part);
  box.replaceChildren();
  const isScrubbed = side.startsWith("tgt") && record.tokens.length === n; // by the output
  if (tokens && n > 1 && !isScrubbed) {
    box.append(tokenRow(SIDES[side] ?? side, "stage-token", tokens, row, (i) => set({ [choiceOf(side)]: i })));
  }
  if (draw !== attentionStage) {
    const at = tokens ? [" at ", el("b.here", `“${tokens[row]}”`)] : [];
    box.append(el("div.card", el("h2", part.title, ...at), el("p.does", part.text)));
  }
  if (lacksValues(part)) {
    const kept =
      "This page has no room for the matrices of this part; the live page (`transduce inspect`) has them. Its " +
      "attention weights, if it has any, are among “all values”.";
    box.append(note(page.live ? "These values are being computed ..." : kept));
    return fillNumber(record, part, null, [], number);
  }
  const { others = [], ...first } = draw(record, part, box);
  const shown = chosenCell(record, first, others);
  const opened = [...stageParts(record).flatMap((one) => one.values), ...others].find((one) => one.name === view.open);
  if (opened) {
    const close = button("Close", () => set({ open: "" }), { className: "close", key: "close-whole" });
    const size = opened.shape.at(-2);
    const whole = valueMap(record, opened, view.head, {
      width: box.clientWidth - 60,
      mark: labelsOf(record, opened.rows, size) ? chosen(opened.rows, size) : undefined,
      key: `whole-${opened.name}`,
      pick: (index) => set({ cell: opened.name, index }),
    });
    const dialog = el("div.whole", { role: "dialog", "aria-label": opened.title }, close, whole);
    Object.assign(dialog.style, { top: `${box.scrollTop + 8}px`, height: `${box.clientHeight - 16}px` });
    box.append(dialog);
  }
  markCell(box, shown);
  const owner = record.parts.find((one) => one.values.includes(shown.value)) ?? part;
  return fillNumber(record, owner, shown.value, shown.index, number);
}

// The attention weights of each head.
import { at, choiceOf, chosen, format, matrix, mergeWords } from "./record.js";
import { partNamed, percent, set, view, wordsOf } from "./record.js";
import { button, buttonRow, controls, el, facts, note, paint, rove, svg } from "./draw.js";
import { heatMap, mapWidth } from "./heatmap.js";

const KINDS = {
  encoder: "encoder self-attention",
  decoder: "decoder self-attention",
  cross: "cross-attention",
  relay: "relay node",
};

// --- heads --------------------------------------------------------------------------------------------------------

export const headsSection = {
  id: "heads",
  title: "Heads",
  uses: ["map", "head", "order", "unit", "drawing", "src", "tgt"],
  text:
    "Each small map is one head. Rows are queries, columns are keys; darker cells have larger weights. The label says " +
    "what the weights of this sentence do, by the rules below; it does not say what the head is for.",
  render(record, panel) {
    const layer = chosenLayer(record);
    const head = Math.min(view.head, layer.labels.length - 1);
    const part = partNamed(record, layer.name);
    const equation = part?.equation.split(" V")[0] || "softmax(Q Kᵀ / √d_k + mask)";
    panel.append(facts(equation, { weights: layer.weights.shape }, part?.source));
    const choice = (label, key, ...options) =>
      buttonRow(label, key, options, view[key], (chosenOption) => set({ [key]: chosenOption }));
    panel.append(
      controls(
        choice("order", "order", ["by layer", "layer"], ["by label", "label"]),
        choice("units", "unit", ["subwords", "subwords"], ["words", "words"]),
        choice("large head", "drawing", ["lines", "lines"], ["map", "map"]),
      ),
    );
    const large = largeHead(record, layer, head);
    const { label, shares } = layer.labels[head];
    large.append(note(`“${label}”: ${record.rules[label]}. Largest shares of the weight: ${sharesText(shares)}.`));
    panel.append(el("div.split", smallMaps(record, layer, head), large));
    panel.append(rulesList(record));
  },
};

function chosenLayer(record) {
  const all = record.attention;
  return all.find((one) => one.name === view.map) || all.find((one) => one.kind === "cross") || all[0];
}

function smallMaps(record, layer, head) {
  const all = record.attention.flatMap((one) => one.labels.map((label, i) => ({ layer: one, head: i, ...label })));
  const groups = new Map();
  for (const one of all) {
    const key = view.order === "layer" ? one.layer.kind : one.label;
    groups.set(key, [...(groups.get(key) || []), one]);
  }
  const byScore = view.order === "label";
  const box = el("div.small-maps");
  for (const [key, members] of groups) {
    if (byScore) members.sort((a, b) => b.score - a.score);
    const grid = el("div", { className: byScore ? "grid by-label" : "grid" });
    const across = Math.max(...members.map((one) => one.layer.labels.length));
    if (!byScore) grid.style.gridTemplateColumns = `max-content repeat(${across}, minmax(0, 5.5rem))`;
    let last = null;
    for (const one of members) {
      if (!byScore && one.layer !== last) {
        grid.append(el("span.soft.row-name", { title: `layer ${one.layer.layer + 1}` }, `${one.layer.layer + 1}`));
        last = one.layer;
      }
      grid.append(smallMap(one, one.layer === layer && one.head === head));
      if (!byScore && one.head === one.layer.labels.length - 1) {
        for (let i = one.head + 1; i < across; i++) grid.append(el("span"));
      }
    }
    box.append(el("h3", byScore ? `${key} (${members.length})` : KINDS[key] || key), grid);
  }
  rove(box, "button");
  return box;
}

const paintedMaps = new WeakMap(); // canvases that are drawn once, for a layer of a record

export const forgetMaps = (records) =>
  records.forEach((record) => record.attention?.forEach((one) => paintedMaps.delete(one)));

const shareText = ([name, share]) => `${Math.round(100 * share)} % ${name}`;
const sharesText = (shares) => shares.map(shareText).join(", ");

function headName(layer, head) {
  const { label, score, shares } = layer.labels[head];
  const place = `${KINDS[layer.kind] || layer.kind}, layer ${layer.layer + 1}, head ${head + 1}`;
  return `${place}: ${score === null ? sharesText(shares) : `${label}, ${format(score)}`}`;
}

function smallMap({ layer, head, label, score, shares }, isChosen) {
  if (!paintedMaps.has(layer)) paintedMaps.set(layer, []);
  const canvases = paintedMaps.get(layer);
  canvases[head] ??= paint(matrix(layer.weights, [head]), 1, false);
  const name = headName(layer, head);
  return button(
    [canvases[head], el("span", score === null ? shareText(shares[0]) : label)],
    () => set({ map: layer.name, head, part: layer.name }),
    { className: "small-map", title: name, label: name, pressed: isChosen, key: `map-${layer.name}-${head}` },
  );
}

// Weights and labels of a head, of subwords or words.
function inUnits(record, layer, head) {
  const m = matrix(layer.weights, [head]);
  const { row_tokens: rows, column_tokens: columns } = layer;
  if (view.unit === "subwords") return { m, rows, columns, row: chosen(layer.rows, rows.length), rowOf: (i) => i };
  const ofRows = wordsOf(record, layer.rows, rows);
  const ofColumns = wordsOf(record, layer.columns, columns);
  return {
    m: mergeWords(m, ofRows.places, ofColumns.places),
    rows: ofRows.texts,
    columns: ofColumns.texts,
    row: ofRows.places[chosen(layer.rows, rows.length)],
    rowOf: (i) => ofRows.places.indexOf(i),
  };
}

function largeHead(record, layer, head) {
  const { m, rows, columns, row, rowOf } = inUnits(record, layer, head);
  const title = headName(layer, head);
  const pick = (i) => set({ [choiceOf(layer.rows)]: rowOf(i) });
  const room = mapWidth();
  if (view.drawing === "map") {
    return heatMap(m, {
      title,
      width: room,
      rows,
      columns,
      mark: row,
      most: 1,
      signed: false,
      key: "large-map",
      rowName: "query",
      columnName: "key",
      pick,
    });
  }
  return el(
    "figure",
    el("figcaption", el("b", title)),
    lines(m, rows, columns, row, pick, Math.min(room, 460)),
    readText(m, rows, columns, row),
  );
}

// Lines from the queries, on the left, to the keys.
function lines(m, rows, columns, row, pick, width) {
  const step = 20;
  const height = Math.max(rows.length, columns.length) * step + 24;
  const [left, right] = [width * 0.34, width * 0.66];
  const y = (i) => 24 + (i + 0.5) * step;
  const drawing = svg("svg", {
    class: "lines",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "group",
    "aria-label": "lines from the queries to the keys",
  });
  const head = (x, anchor, text) => svg("text", { x, y: 11, "text-anchor": anchor }, text);
  drawing.append(head(left - 6, "end", "query"), head(right + 6, "start", "key"));
  const groups = rows.map((_, i) => {
    const group = svg("g", { class: i === row ? "from on" : "from" });
    for (let j = 0; j < m.columns; j++) {
      const weight = at(m, i, j);
      if (weight > 0.03) {
        group.append(
          svg("path", {
            d: `M${left} ${y(i)}L${right} ${y(j)}`,
            "stroke-opacity": weight.toFixed(2),
            "stroke-width": (0.6 + 3 * weight).toFixed(1),
          }),
        );
      }
    }
    return group;
  });
  drawing.append(...groups);
  const light = (i) => groups.forEach((group, place) => group.classList.toggle("on", place === i));
  rows.forEach((label, i) => {
    const attributes = {
      x: left - 6,
      y: y(i) + 4,
      "text-anchor": "end",
      class: i === row ? "token on" : "token",
      role: "button",
      "aria-pressed": String(i === row),
      "data-key": i === row ? "line-row" : null,
      click: () => pick(i),
      pointerenter: () => light(i),
      pointerleave: () => light(row),
      focus: () => light(i),
      blur: () => light(row),
    };
    drawing.append(svg("text", attributes, label));
  });
  drawing.append(...columns.map((label, j) => svg("text", { x: right + 6, y: y(j) + 4, class: "token" }, label)));
  rove(drawing, "text[role=button]");
  return drawing;
}

// The largest weights of a row as text.
function readText(m, rows, columns, row) {
  const best = columns
    .map((label, j) => [label, at(m, row, j)])
    .sort((a, b) => b[1] - a[1])
    .slice(0, 3);
  return el(
    "output.readout",
    `“${rows[row]}” attends to ${best.map(([label, p]) => `“${label}” ${percent(p)}`).join(", ")}`,
  );
}

function rulesList(record) {
  const list = el("dl.rules");
  for (const [label, rule] of Object.entries(record.rules || {})) {
    list.append(el("dt", label), el("dd", rule));
  }
  return el("details", el("summary", "Rules of the labels"), list);
}

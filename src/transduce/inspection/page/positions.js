// Positional schemes and masks.
import { chosen, labelsOf, largest, matrix, set, view } from "./record.js";
import { el, facts, note, selectBox } from "./draw.js";
import { heatMap, mapWidth } from "./heatmap.js";

export const positionsSection = {
  id: "positions",
  title: "Positions and masks",
  uses: ["bias", "src", "tgt"],
  text:
    "Attention by itself does not depend on the order of the tokens. The positional scheme adds the order; the mask " +
    "decides which keys a query may attend to.",
  render(record, panel) {
    const half = mapWidth();
    for (const one of record.positions || []) panel.append(...positionNodes(record, one, half));
    if (!record.positions?.length && record.absent.positions) panel.append(note(record.absent.positions));
    if (record.off.includes("decoder.mask")) {
      panel.append(note("The causal mask is switched off: every position of the decoder sees all others."));
    }
    if (!record.masks?.length) return;
    panel.append(
      el("h3", { textContent: "Masks" }),
      facts(
        "scores + mask, −∞ where a key is hidden",
        record.masks.map((one) => [one.title, one.mask.shape]),
      ),
    );
    panel.append(
      el(
        "div",
        { className: "maps" },
        ...record.masks.map((one) => {
          const m = matrix(one.mask);
          const map = heatMap(m, {
            title: one.title,
            shape: one.mask.shape,
            width: Math.min(half, 360),
            largest: 24,
            most: 1,
            signed: false,
            rows: labelsOf(record, one.rows, m.rows),
            columns: labelsOf(record, one.columns, m.columns),
            rowName: "query",
            columnName: "key",
            mark: chosen(one.rows, m.rows),
            range: "hidden to visible",
            say: (x) => (x ? "visible" : "hidden"),
            key: `mask-${one.title}`,
          });
          map.append(
            note(`${one.text[0].toUpperCase()}${one.text.slice(1)}. Filled cells are visible, empty cells are hidden.`),
          );
          return map;
        }),
      ),
    );
  },
};

const SCHEMES = {
  sinusoidal: "sin(p / 10000^(2i/d)), cos(p / 10000^(2i/d)), p = 0 for the first token",
  learned: "x = E[token] + P[position]",
  rotary: "q′ = R(p) q, k′ = R(p) k, p = 0 for the first token",
  alibi: "score − slope · distance",
  shaw: "(q · (k + r[j − i])) / √d_k",
};

function positionNodes(record, one, width) {
  const nodes = [
    el("h3", { textContent: `${one.stack}: ${one.scheme}` }),
    el("p", { textContent: `${one.text[0].toUpperCase()}${one.text.slice(1)}.` }),
  ];
  const arrays = [
    ["table", one.table],
    ["dot products", one.dots],
    ["bias", one.bias],
  ].filter(([, array]) => array);
  nodes.push(
    facts(
      SCHEMES[one.scheme],
      arrays.map(([name, array]) => [name, array.shape]),
      one.source,
    ),
  );
  const labels = (array, axis) => labelsOf(record, one.side, array.shape.at(axis));
  const maps = [];
  if (one.table) {
    maps.push(
      heatMap(matrix(one.table), {
        title: one.scheme === "rotary" ? "after the rotation" : "encoding",
        shape: one.table.shape,
        width,
        rows: labels(one.table, -2),
        rowName: "position",
        columnName: "width",
        signed: true,
        key: `table-${one.stack}`,
      }),
    );
  }
  if (one.dots) {
    maps.push(
      heatMap(matrix(one.dots), {
        title: "dot products of the positions",
        shape: one.dots.shape,
        width,
        largest: 30,
        rows: labels(one.dots, -2),
        columns: labels(one.dots, -1),
        rowName: "position",
        columnName: "position",
        key: `dots-${one.stack}`,
      }),
    );
  }
  if (one.bias) {
    const heads = one.bias.shape.length > 2 ? one.bias.shape[0] : 1;
    const head = Math.min(view.bias, heads - 1);
    nodes.push(
      el(
        "p",
        { className: "controls" },
        selectBox(
          "head",
          `bias-${one.stack}`,
          Array.from({ length: heads }, (_, i) => [i + 1, i]),
          head,
          (i) => set({ bias: +i }),
        ),
      ),
    );
    const m = matrix(one.bias, [head]);
    maps.push(
      heatMap(m, {
        title: `bias of head ${head + 1}`,
        shape: one.bias.shape,
        width,
        largest: 30,
        most: largest(m.data),
        signed: true,
        rows: labels(one.bias, -2),
        columns: labels(one.bias, -1),
        rowName: "query",
        columnName: "key",
        key: `bias-map-${one.stack}`,
      }),
    );
  }
  return [...nodes, el("div", { className: "maps" }, ...maps)];
}

// Positional schemes and masks.
import { chosen, set, view } from "./record.js";
import { controls, el, facts, headBox, note } from "./draw.js";
import { arrayMap, mapWidth } from "./heatmap.js";

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
    const shapes = Object.fromEntries(record.masks.map((one) => [one.title, one.mask.shape]));
    panel.append(el("h3", "Masks"), facts("scores + mask, −∞ where a key is hidden", shapes));
    panel.append(el("div.maps", ...record.masks.map((one) => maskMap(record, one, Math.min(half, 360)))));
  },
};

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function maskMap(record, { title, text, mask, rows, columns }, width) {
  const map = arrayMap(record, mask, {
    title,
    width,
    largest: 24,
    most: 1,
    signed: false,
    rows,
    columns,
    rowName: "query",
    columnName: "key",
    mark: chosen(rows, mask.shape.at(-2)),
    range: "hidden to visible",
    say: (x) => (x ? "visible" : "hidden"),
    key: `mask-${title}`,
  });
  map.append(note(`${sentence(text)} Filled cells are visible, empty cells are hidden.`));
  return map;
}

const SCHEMES = {
  sinusoidal: "sin(p / 10000^(2i/d)), cos(p / 10000^(2i/d)), p = 0 for the first token",
  learned: "x = E[token] + P[position]",
  rotary: "q′ = R(p) q, k′ = R(p) k, p = 0 for the first token",
  alibi: "score − slope · distance",
  shaw: "(q · (k + r[j − i])) / √d_k",
};

function positionNodes(record, { stack, scheme, text, table, dots, bias, side, source }, width) {
  const shapes = { table: table?.shape, "dot products": dots?.shape, bias: bias?.shape };
  const nodes = [el("h3", `${stack}: ${scheme}`), el("p", sentence(text)), facts(SCHEMES[scheme], shapes, source)];
  const maps = [];
  const addMap = (key, array, options) =>
    maps.push(arrayMap(record, array, { width, rows: side, key: `${key}-${stack}`, ...options }));
  if (table) {
    const title = scheme === "rotary" ? "after the rotation" : "encoding";
    addMap("table", table, { title, rowName: "position", columnName: "width", signed: true });
  }
  if (dots) {
    const title = "dot products of the positions";
    addMap("dots", dots, { title, largest: 30, columns: side, rowName: "position", columnName: "position" });
  }
  if (bias) {
    const n = bias.shape.length > 2 ? bias.shape[0] : 1;
    const head = Math.min(view.bias, n - 1);
    nodes.push(controls(headBox(`bias-${stack}`, n, head, (i) => set({ bias: i }))));
    const title = `bias of head ${head + 1}`;
    addMap("bias-map", bias, {
      title,
      head,
      largest: 30,
      signed: true,
      columns: side,
      rowName: "query",
      columnName: "key",
    });
  }
  return [...nodes, el("div.maps", ...maps)];
}

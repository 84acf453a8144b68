// The tree of hypotheses.
import { format } from "./record.js";
import { el, svg } from "./draw.js";

const NODE = { width: 92, height: 34, gap: 8, between: 26 };

export function pathOf(node, nodes) {
  const path = [];
  for (let one = node; one; one = nodes.get(one.parent)) path.unshift(one);
  return path;
}

export const textOf = (node, nodes) =>
  pathOf(node, nodes)
    .map((one) => one.token)
    .join("")
    .replaceAll("▁", " ")
    .trim();

export function tree(record, nodes, step, go) {
  const { steps, results } = record.steps;
  const pathTo = (id) => new Set(pathOf(nodes.get(id), nodes).map((one) => one.id));
  const winner = pathTo(results[0]?.id);
  const selected = pathTo(record.selected);
  const rows = Math.max(...steps.map((one) => one.live.length));
  const across = NODE.width + NODE.between;
  const width = steps.length * across;
  const height = rows * (NODE.height + NODE.gap) + 22;
  const drawing = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    class: "tree",
  });
  drawing.append(svg("rect", { class: "now", x: step * across, y: 0, width: NODE.width, height, rx: 6 }));
  const spots = new Map();
  steps.forEach((one, i) =>
    one.live.forEach((node, j) => spots.set(node.id, [i * across, 20 + j * (NODE.height + NODE.gap)])),
  );
  const texts = [];
  steps.forEach((one, i) => {
    texts.push(svg("text", { x: i * across + 4, y: 13 }, `step ${i + 1}`));
    for (const node of one.live) {
      const [x, y] = spots.get(node.id);
      const from = spots.get(node.parent);
      const wins = winner.has(node.id) ? " wins" : "";
      if (from) {
        const middle = y + NODE.height / 2;
        const start = from[1] + NODE.height / 2;
        drawing.append(
          svg("path", {
            class: `edge ${node.fate}${wins}`,
            d: `M${from[0] + NODE.width} ${start}C${x - 8} ${start} ${x - 18} ${middle} ${x} ${middle}`,
          }),
        );
      }
      const select = () => {
        record.selected = node.id;
        go(i);
      };
      const group = svg("g", {
        class: `node ${node.fate}${wins}${selected.has(node.id) ? " selected" : ""}`,
        "data-key": `node-${node.id}`,
        click: select,
        keydown: (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          select();
        },
        role: "button",
        "aria-pressed": node.id === record.selected,
        tabindex: i === step ? 0 : -1,
      });
      const name = node.token.length > 11 ? `${node.token.slice(0, 10)}…` : node.token;
      group.append(
        svg("title", {}, `${textOf(node, nodes)}: ${node.fate}, log p = ${format(node.log_prob)}`),
        svg("rect", { x, y, width: NODE.width, height: NODE.height, rx: 5 }),
        svg("text", { x: x + 6, y: y + 14, class: "name" }, (node.fate === "finished" ? "■ " : "") + name),
        svg("text", { x: x + 6, y: y + 28 }, format(node.log_prob)),
      );
      texts.push(group);
    }
  });
  drawing.append(...texts);
  const box = el(
    "div",
    {
      className: "scroll tree-box",
      tabIndex: 0,
      role: "group",
      "aria-label": "the tree of hypotheses; the path of the best one is thick",
      "data-key": "tree",
    },
    drawing,
  );
  box.dataset.center = step * across + NODE.width / 2;
  return box;
}

export function legendOfFates() {
  const item = (fate, text) => el("li", { className: fate, textContent: text });
  return el(
    "ul",
    { className: "fates" },
    item("wins", "path of the best hypothesis"),
    item("kept", "kept"),
    item("finished", "■ finished"),
    item("pruned", "pruned"),
  );
}

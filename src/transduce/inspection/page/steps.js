// The beam: the candidates of each hypothesis, the tree, the results, and why one lost.
import { changesOf, format, page, percent, set, view } from "./record.js";
import { bar, button, el, note, svg, table } from "./draw.js";

// The drawer above the output: the search at the chosen step.
export function beamDrawer(record) {
  const { steps, beam, length_penalty: penalty } = record.steps;
  const nodes = nodesOf(record.steps);
  const step = Math.min(view.step, steps.length - 1);
  const message = el("p.message", { "aria-live": "polite" });
  const boxes = continued(record.steps, step).map((one) => beamBox(record, one, nodes, step, message));
  const text =
    `Beam search extends every kept hypothesis, keeps the best ${beam} and prunes the rest; score = log p / ` +
    `length^${penalty}. Click a hypothesis to see why it lost, a candidate to force it.`;
  const drawing = el("div", tree(record, nodes, step), legendOfFates());
  return el(
    "div.drawer",
    note(text),
    el("div.drawer-parts", el("div", ...resultNodes(record, nodes)), drawing),
    el("h3", `Candidates of step ${step + 1}`),
    message,
    el("div.beams", ...boxes),
  );
}

// The hypotheses of a search by number.
const nodesOf = ({ steps }) =>
  new Map(steps.flatMap((one, i) => one.live.map((node) => [node.id, { ...node, step: i }])));

export function force(record, prefix) {
  changesOf(record.asked.run).prefix = prefix;
  set({ step: prefix.length ? prefix.length - 1 : 0 });
  page.inspectSentence();
}

// The hypotheses that a step continues, with their candidates.
function continued({ steps, top }, step) {
  if (step > 0) return steps[step - 1].live.filter((one) => one.top.length);
  return [{ id: steps[0].live[0].parent, top, log_prob: 0 }];
}

function beamBox(record, one, nodes, step, message) {
  const path = pathOf(nodes.get(one.id), nodes);
  const { live } = record.steps.steps[step];
  const fates = new Map(live.filter((node) => node.parent === one.id).map((node) => [node.token_id, node.fate]));
  const choose = (id) => {
    if (page.live) return force(record, [...path.map((node) => node.token_id), id]);
    message.textContent = "Open the live page with `transduce inspect` to force a token.";
    return undefined;
  };
  const items = one.top.map(([token, id, p]) =>
    el(
      "li",
      button([el("span.piece", token), bar(p, percent(p)), el("span.fate", fates.get(id) || "")], () => choose(id), {
        className: `candidate ${fates.get(id) || ""}`,
        key: `candidate-${one.id}-${id}`,
        title: `force “${token}” here`,
      }),
    ),
  );
  const text = path.length ? textOf(path.at(-1), nodes) : "";
  const tail = text.length > 40 ? `… ${text.slice(-40)}` : text;
  return el(
    "div.beam",
    el("h3", { title: text }, tail || "start"),
    el("p.soft", `log p = ${format(one.log_prob)}`),
    el("ol", ...items),
  );
}

// Why a hypothesis lost to the best one; where none is selected, why the second of the results did.
function explain({ steps: search, selected }, nodes) {
  const { steps, beam, length_penalty: penalty, results } = search;
  if (!results.length) return "The search found no hypothesis of finite probability.";
  const isWinner = selected === undefined || selected === results[0].id;
  const node = nodes.get(isWinner ? results[1]?.id : selected);
  if (!node) return "No other hypothesis ended.";
  const path = pathOf(node, nodes);
  const winner = pathOf(nodes.get(results[0].id), nodes);
  const place = results.findIndex((one) => one.id === node.id) + 1;
  const said = [`“${textOf(node, nodes)}”`];
  if (place || node.fate === "finished") {
    const score = ({ log_prob: p, step }) =>
      `${format(p)} / ${step + 1}^${penalty} = ${format(p / (step + 1) ** penalty)}`;
    said.push(place ? `is number ${place} of ${results.length}:` : "ended, but is not among the best:");
    said.push(`its score is ${score(node)}, that of the winner ${score(winner.at(-1))}.`);
    said.push(
      node.fate !== winner.at(-1).fate
        ? "It was cut off, and such hypotheses come after those that ended."
        : node.log_prob > winner.at(-1).log_prob
          ? "By log p alone it would have won: the length penalty favours the longer one."
          : "By log p alone it would have lost too.",
    );
  } else if (node.fate === "pruned") {
    const rank = steps[node.step].live.findIndex((one) => one.id === node.id) + 1;
    said.push(
      `was pruned at step ${node.step + 1}: its log p = ${format(node.log_prob)} is number ${rank} there, and the`,
    );
    said.push(`beam is ${beam}. All have the same length there, so the length penalty plays no part.`);
  } else {
    const others = [...nodes.values()].filter((one) => one.fate !== "pruned" && pathOf(one, nodes).includes(node));
    const places = results.flatMap((one, i) => (others.includes(nodes.get(one.id)) ? [i + 1] : []));
    const last = Math.max(...others.map((one) => one.step)) + 1;
    if (places.length) said.push(`was kept, and led to the results ${places.join(", ")}.`);
    else if (last < steps.length) said.push(`was kept, but all that continued it were pruned by step ${last + 1}.`);
    else said.push("was kept, and had not ended when the search stopped.");
  }
  const left = path.findIndex((one, i) => one !== winner[i]);
  const choice = (one) =>
    `“${one.token}” (${percent(Math.exp(one.log_prob - (nodes.get(one.parent)?.log_prob ?? 0)))})`;
  if (left < 0) said.push("It is on the path of the winner.");
  else if (winner[left])
    said.push(`It left the winner at step ${left + 1}, by ${choice(path[left])} instead of ${choice(winner[left])}.`);
  return said.join(" ");
}

function resultNodes(record, nodes) {
  const { results } = record.steps;
  const winner = pathOf(nodes.get(results[0].id), nodes);
  const rows = results.map(({ id, text, log_prob: p, length, score }, i) => {
    const select = () => {
      record.selected = id;
      const left = pathOf(nodes.get(id), nodes).findIndex((one, at) => one !== winner[at]);
      set({ step: Math.max(0, left) }); // where it left the winner
    };
    const state = { className: "hypothesis", pressed: id === record.selected, key: `result-${id}` };
    const numbers = [format(p), length, format(score)].map((number) => el("td.n", number));
    return el("tr", el("td", i + 1), el("td", button(text || "(empty)", select, state)), ...numbers);
  });
  const heads = ["", "hypothesis", ["log p", "n"], ["length", "n"], ["score", "n"]];
  return [
    el("h3", "Finished hypotheses"),
    el("p.why", { "aria-live": "polite" }, explain(record, nodes)),
    el("div.scroll", table("table", heads, rows)),
  ];
}

// --- the tree of hypotheses -----------------------------------------------------------------------------------------

const NODE = { width: 92, height: 34, gap: 8, between: 26 };

function pathOf(node, nodes) {
  const path = [];
  for (let one = node; one; one = nodes.get(one.parent)) path.unshift(one);
  return path;
}

// The text of a hypothesis, without the sign for its end.
const textOf = (node, nodes) =>
  pathOf(node, nodes)
    .filter((one) => one.fate !== "finished")
    .map((one) => one.token)
    .join("")
    .replaceAll("▁", " ")
    .trim();

function tree(record, nodes, step) {
  const { steps, results } = record.steps;
  const pathTo = (id) => new Set(pathOf(nodes.get(id), nodes).map((one) => one.id));
  const winner = pathTo(results[0]?.id);
  const selected = pathTo(record.selected);
  const rows = Math.max(...steps.map((one) => one.live.length));
  const across = NODE.width + NODE.between;
  const width = steps.length * across;
  const height = rows * (NODE.height + NODE.gap) + 22;
  const drawing = svg("svg", { width, height, viewBox: `-2 0 ${width} ${height}`, class: "tree" });
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
        set({ step: i });
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
  const label = "the tree of hypotheses; the path of the best one is thick";
  const center = step * across + NODE.width / 2;
  const names = { "aria-label": label, "data-key": "tree", "data-center": center };
  return el("div.scroll", { tabIndex: 0, role: "group", ...names }, drawing);
}

function legendOfFates() {
  const item = (fate, text) => el("li", { className: fate }, text);
  return el(
    "ul.fates",
    item("wins", "path of the best hypothesis"),
    item("kept", "kept"),
    item("finished", "■ finished"),
    item("pruned", "pruned"),
  );
}

// Decoding, step by step: the candidates of each beam, the tree of hypotheses and the results.
import { changesOf, format, meanOverHeads, page, percent, set, view } from "./record.js";
import { bar, css, el, facts, note, shade } from "./draw.js";
import { legendOfFates, pathOf, textOf, tree } from "./tree.js";

export const stepsSection = {
  id: "steps",
  title: "Step by step",
  uses: ["step"],
  text:
    "Beam search builds the translation token by token. Each step extends every kept hypothesis, keeps the best ones " +
    "and prunes the rest. Click a candidate to force it, a hypothesis to see why it lost. The left and right arrow keys " +
    "change the step.",
  render(record, panel) {
    const { steps, beam, length_penalty: penalty } = record.steps;
    const last = steps.length - 1;
    const step = Math.min(view.step, last);
    const nodes = new Map(steps.flatMap((one, i) => one.live.map((node) => [node.id, { ...node, step: i }])));
    panel.append(
      facts(`score = log p / length^${penalty}`, [["beam, steps", [beam, steps.length]]]),
    );
    const go = (i) => set({ step: Math.min(Math.max(i, 0), last) });
    panel.append(
      el(
        "p",
        { className: "controls" },
        el("button", {
          type: "button",
          textContent: "Previous",
          "data-key": "previous",
          click: () => go(step - 1),
          disabled: step === 0,
        }),
        el("output", { textContent: `step ${step + 1} of ${steps.length}`, "aria-live": "polite" }),
        el("button", {
          type: "button",
          textContent: "Next",
          "data-key": "next",
          click: () => go(step + 1),
          disabled: step === last,
        }),
      ),
    );
    const forced = page.live ? record.asked.prefix.length : 0;
    if (forced) {
      panel.append(
        el(
          "p",
          {},
          `Forced tokens at the start: ${forced}. `,
          el("button", {
            type: "button",
            textContent: "Remove forced tokens",
            "data-key": "unforce",
            click: () => force(record, []),
          }),
        ),
      );
    }
    const message = el("p", { className: "message", "aria-live": "polite" });
    panel.append(
      el(
        "div",
        { className: "beams" },
        ...continued(record.steps, step).map((one) => beamBox(record, one, nodes, step, message)),
      ),
      message,
      tree(record, nodes, step, go),
      legendOfFates(),
      ...resultNodes(record, nodes),
      ...lookedAt(record, step),
    );
  },
};

function force(record, prefix) {
  changesOf(record.asked.run).prefix = prefix;
  set({ step: prefix.length ? prefix.length - 1 : 0 });
  page.look();
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
    message.textContent =
      "Open the live page with `transduce inspect` to force a token.";
    return undefined;
  };
  const items = one.top.map(([token, id, p]) =>
    el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          className: `candidate ${fates.get(id) || ""}`,
          "data-key": `candidate-${one.id}-${id}`,
          click: () => choose(id),
          title: `force “${token}” here`,
        },
        el("span", { className: "piece", textContent: token }),
        bar(p, percent(p)),
        el("span", { className: "fate", textContent: fates.get(id) || "" }),
      ),
    ),
  );
  const text = path.length ? textOf(path.at(-1), nodes) : "";
  const tail = text.length > 40 ? `… ${text.slice(-40)}` : text;
  return el(
    "div",
    { className: "beam" },
    el("h3", { textContent: tail || "start", title: text }),
    el("p", { className: "soft", textContent: `log p = ${format(one.log_prob)}` }),
    el("ol", {}, ...items),
  );
}

// --- results ------------------------------------------------------------------------------------------------------

function lookedAt(record, step) {
  const cross = record.attention?.filter((one) => one.kind === "cross").at(-1);
  const source = cross && record.sides[cross.columns];
  if (!cross || step >= cross.weights.shape.at(-2) || source.tokens.length !== cross.weights.shape.at(-1)) return [];
  const mean = meanOverHeads(cross.weights);
  const row = mean.data.subarray(step * mean.columns, (step + 1) * mean.columns);
  const tokens = source.tokens.map((token, j) => {
    const colour = shade(row[j], 1, false);
    const node = el(
      "span",
      { className: "read", title: percent(row[j]) },
      el("span", { textContent: token }),
      el("small", { textContent: percent(row[j]) }),
    );
    node.style.borderBottomColor = css(colour);
    return node;
  });
  const token = record.sides.tgt_out.tokens[step];
  return [
    el("h3", { textContent: `Cross-attention for “${token}”` }),
    note(
      `Weights of layer ${cross.layer + 1}, averaged over its heads, for the translation that the other sections show.`,
    ),
    el("div", { className: "reads" }, ...tokens),
  ];
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
    said.push(`was pruned at step ${node.step + 1}: its log p = ${format(node.log_prob)} is number ${rank} there, and the`);
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
  const choice = (one) => `“${one.token}” (${percent(Math.exp(one.log_prob - (nodes.get(one.parent)?.log_prob ?? 0)))})`;
  if (left < 0) said.push("It is on the path of the winner.");
  else if (winner[left])
    said.push(`It left the winner at step ${left + 1}, by ${choice(path[left])} instead of ${choice(winner[left])}.`);
  return said.join(" ");
}

function resultNodes(record, nodes) {
  const { results } = record.steps;
  const select = (id) => {
    record.selected = id;
    page.render(["step"]);
  };
  const rows = results.map((one, i) =>
    el(
      "tr",
      {},
      el("td", { textContent: i + 1 }),
      el(
        "td",
        {},
        el("button", {
          type: "button",
          className: "hypothesis",
          textContent: one.text || "(empty)",
          "aria-pressed": String(one.id === record.selected),
          "data-key": `result-${one.id}`,
          click: () => select(one.id),
        }),
      ),
      ...[format(one.log_prob), one.length, format(one.score)].map((text) =>
        el("td", { className: "n", textContent: text }),
      ),
    ),
  );
  const heads = [
    ["", ""],
    ["hypothesis", ""],
    ["log p", "n"],
    ["length", "n"],
    ["score", "n"],
  ];
  return [
    el("h3", { textContent: "Finished hypotheses" }),
    el("p", { className: "why", "aria-live": "polite", textContent: explain(record, nodes) }),
    el(
      "div",
      { className: "scroll" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el("tr", {}, ...heads.map(([text, kind]) => el("th", { scope: "col", className: kind, textContent: text }))),
        ),
        el("tbody", {}, ...rows),
      ),
    ),
  ];
}

// Arrow keys go through the steps while the section is in view and no control needs them.
export function stepWithKeys(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (
    !step ||
    event.altKey ||
    event.ctrlKey ||
    event.metaKey ||
    event.target.closest?.("input, textarea, select, [role=group]:not(.tree-box)")
  )
    return;
  const section = document.getElementById("steps");
  const place = section?.getBoundingClientRect();
  if (!place || !(section.contains(event.target) || (place.top < innerHeight / 2 && place.bottom > innerHeight / 2)))
    return;
  const most = Math.max(0, ...page.records.map((record) => (record.steps?.steps.length || 1) - 1));
  event.preventDefault();
  set({ step: Math.min(Math.max(Math.min(view.step, most) + step, 0), most) });
}

// The output as a scrubber: each token with its three best; another one clicked forces it. The tree opens upward.
import { choiceOf, chosen, page, percent, predictedSide, set, view } from "./record.js";
import { button, el } from "./draw.js";
import { beamDrawer, force } from "./steps.js";

const firsts = new Map(); // by run: the sentence and the tokens of the output before a token was forced

// The tokens to compare with: those of the same sentence without forced tokens.
function unforced(record) {
  if (!page.live) return null;
  const { run, text, prefix, off } = record.asked;
  const key = JSON.stringify([text, off]);
  if (!prefix.length) firsts.set(run, { key, tokens: record.tokens });
  const first = firsts.get(run);
  return prefix.length && first?.key === key ? first.tokens : null;
}

function choices(record, i) {
  const { tokens } = record;
  return (tokens[i].top ?? []).map(([token, id, p]) => {
    const isChosen = id === tokens[i].id;
    const canForce = page.live && record.steps && !isChosen;
    const share = p < 0.005 ? "< 1%" : `${Math.round(100 * p)}%`;
    const prefix = [...tokens.slice(0, i).map((one) => one.id), id];
    return button([el("span", token), el("small", share)], () => force(record, prefix), {
      className: "choice",
      title: `${percent(p)}${canForce ? `: force “${token}” here` : ""}`,
      label: `${token} ${percent(p)}`,
      pressed: isChosen,
      disabled: !canForce,
      key: `choice-${i}-${id}`,
    });
  });
}

function columnOf(record, i, place, side, before) {
  const token = record.tokens[i];
  const isOther = before && before[i]?.id !== token.id;
  const forced = page.live && i < record.asked.prefix.length;
  return el(
    "div",
    { className: `column${i === place ? " on" : ""}${isOther ? " other" : ""}`, role: "listitem" },
    before ? el("span.before", { title: "without forced tokens" }, before[i]?.token ?? "") : null,
    button(token.token + (forced ? " ◂" : ""), () => set({ [choiceOf(side)]: i, step: i }), {
      className: "token",
      pressed: i === place,
      key: `output-${i}`,
    }),
    ...choices(record, i),
  );
}

export function drawOutput(record, box) {
  const side = predictedSide(record);
  const place = chosen(side, record.tokens.length);
  const before = unforced(record);
  const columns = record.tokens.map((_, i) => columnOf(record, i, place, side, before));
  const bar = el("div.output-bar", el("h2", "Output, token by token"));
  const hint = page.live && record.steps ? "Click another token to force it." : "The best three of each position.";
  bar.append(el("span.soft", hint));
  if (before) bar.append(button("Remove forced tokens", () => force(record, []), { key: "unforce-stage" }));
  if (record.steps) {
    const text = view.tree ? "Close the beam ▾" : `Beam of ${record.steps.beam}: who lost, and why ▴`;
    bar.append(
      button(text, () => set({ tree: !view.tree }), { className: "to-tree", pressed: view.tree, key: "tree-switch" }),
    );
  }
  const drawer = view.tree && record.steps ? [beamDrawer(record)] : [];
  box.replaceChildren(...drawer, bar, el("div.columns.scroll", { role: "list" }, ...columns));
}

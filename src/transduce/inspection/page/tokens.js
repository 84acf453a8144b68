// Predicted tokens, layer by layer, and parts that are switched off.
import { changesOf, choiceOf, chosen, decode, format, page, percent, predictedSide, set } from "./record.js";
import { bar, button, el, facts, note, table, tokenRow } from "./draw.js";
import { arrayMap, mapWidth } from "./heatmap.js";

const outputPart = (record) => record.parts.find((part) => part.kind === "logits");

// --- tokens -------------------------------------------------------------------------------------------------------

export const tokensSection = {
  id: "tokens",
  title: "Predicted tokens",
  uses: ["tgt", "src"],
  needs: ["saliency"],
  text:
    "The probability of each predicted token or label, and its rank among all of them. A decoder predicts each token " +
    "from the tokens before it.",
  render(record, panel) {
    const part = outputPart(record);
    panel.append(facts(`p = ${part.equation}`, { h: part.values[0].shape, p: part.shape }, part.source));
    if (record.tokens?.length) panel.append(tokenTable(record, predictedSide(record)));
    panel.append(el("h3", "Attribution to the input"));
    if (!record.saliency) return panel.append(note("The attributions are being computed ..."));
    panel.append(el("div.maps", ...record.saliency.map((one) => saliencyMap(record, one, mapWidth()))));
    if (record.saliency.length === 1) {
      panel.append(note("Leaving words out is shown where the model reads another text than it predicts."));
    }
  },
};

function saliencyMap(record, { title, text, values, rows, columns }, width) {
  const map = arrayMap(record, values, {
    title,
    width,
    largest: 30,
    signed: true,
    rows,
    columns,
    rowName: "predicted",
    columnName: "token",
    mark: chosen(rows, values.shape.at(-2)),
    key: `saliency-${title}`,
    pick: (i) => set({ [choiceOf(rows)]: i }),
  });
  map.append(note(text));
  return map;
}

function tokenTable(record, side) {
  const place = chosen(side, record.tokens.length);
  const rows = record.tokens.map(({ token, probability, rank }, i) => {
    const choose = () => set({ [choiceOf(side)]: i });
    const shown = button(token, choose, { className: "token", pressed: i === place, key: `predicted-${i}` });
    return el(
      i === place ? "tr.on" : "tr",
      el("td.n.soft", i + 1),
      el("td", shown),
      el("td", bar(probability, percent(probability))),
      el("td.n", rank),
    );
  });
  return el("div.token-table", table("table", ["", "token", "probability", "rank"], rows));
}

// --- layers -------------------------------------------------------------------------------------------------------

export const layersSection = {
  id: "layers",
  title: "Layer by layer",
  uses: ["tgt", "src"],
  text:
    "Each sub-layer adds to the residual stream x. The table has the predictions from x after each layer, read as if the " +
    "layer were the last.",
  render(record, panel) {
    const { layers, changes, hidden, rows: side } = record.lens;
    const { tokens } = record.sides[side];
    const place = chosen(side, layers[0].top.length);
    const part = outputPart(record);
    const shapes = { x: part.values[0].shape, layers: [layers.length] };
    panel.append(
      facts(part.equation.replace("h ", `${hidden} `), shapes, part.source),
      tokenRow("predicted", `token-${side}`, tokens, place, (i) => set({ [choiceOf(side)]: i })),
    );
    const rows = layers.map(({ title, top, probability }) => {
      const known = decode(probability).data[place];
      const guesses = top[place].map(([piece, p]) =>
        el(piece === tokens[place] ? "td.guess.on" : "td.guess", el("span", piece), el("small", percent(p))),
      );
      return el("tr", el("th", { scope: "row" }, title), el("td", bar(known, percent(known))), ...guesses);
    });
    const heads = ["", `p(${tokens[place]})`, ...layers[0].top[place].map((_, i) => `${i + 1}.`)];
    panel.append(el("div.scroll", table("table.lens", heads, rows)), changeBars(changes, place));
  },
};

function changeBars(changes, place) {
  const values = changes.map((one) => decode(one.values).data[place]);
  const most = Math.max(...values, 1e-9);
  const rows = changes.map(({ title }, i) =>
    el("tr", el("th", { scope: "row" }, title), el("td", bar(values[i] / most, format(values[i])))),
  );
  return el(
    "figure",
    el("figcaption", el("b", "change of the stream")),
    note("Norm of what each sub-layer adds, divided by the norm of the stream before it."),
    el("table.changes", el("tbody", ...rows)),
  );
}

// --- change -------------------------------------------------------------------------------------------------------

const GROUPS = {
  heads: ["Heads", "The output of a head that is off is zero."],
  feed_forward: ["Feed-forward networks", "The output of a network that is off is zero."],
  positions: ["Positions", "Without them, the model does not know the order of the tokens."],
  mask: ["Masks", "Without the causal mask, the decoder sees later tokens."],
};

export const changeSection = {
  id: "change",
  title: "Switch off",
  uses: ["off"],
  text: "Switch parts of the model off and compare its output.",
  render(record, panel) {
    const side = record.sides[predictedSide(record)];
    const off = new Set(record.off);
    const { original } = record;
    const outputs = [
      ...(original ? [["original", original.text, original.log_prob]] : []),
      [original ? "changed" : "now", side?.text || "", logProb(record)],
    ];
    const rows = outputs.flatMap(([name, text, p]) => [
      el("dt", name),
      el("dd", text, el("span.soft", ` log p = ${format(p)}`)),
    ]);
    panel.append(el("dl.texts", ...rows));
    const titles = record.can_switch.filter((one) => off.has(one.name)).map((one) => one.title);
    panel.append(el("p", off.size ? `Switched off: ${titles.join("; ")}.` : "Nothing is switched off."));
    if (isSame(record)) panel.append(note("The output is the same."));
    if (!record.can_switch.length) return panel.append(note("This model has no part that can be switched off."));
    if (!page.live) return panel.append(note("Open the live page with `transduce inspect` to switch parts off."));
    panel.append(button("Switch everything on", () => switchOff(record, []), { key: "all-on", disabled: !off.size }));
    for (const [group, [title, text]] of Object.entries(GROUPS)) {
      const members = record.can_switch.filter((one) => one.group === group);
      if (members.length) panel.append(el("fieldset", el("legend", title), note(text), ...switchRows(record, members)));
    }
  },
};

// Whether the model writes the same without the parts that are off; a translation that was given is the same anyway.
function isSame({ original, sides, steps }) {
  const text = original && sides[predictedSide({ sides })]?.text;
  return original?.text === text && (steps ? steps.results[0]?.text === text : !sides.tgt_in);
}

export const logProb = (record) => record.tokens.reduce((sum, one) => sum + Math.log(one.probability), 0);

export function switchOff(record, names) {
  changesOf(record.asked.run).off = names;
  page.render(["off"]);
  page.inspectSentence();
}

// Heads are in rows of one layer, with a button for the row.
function switchRows(record, members) {
  const { off } = changesOf(record.asked.run);
  const rows = new Map();
  for (const one of members) {
    const [, before, short] = /^(.*), (head \d+)$/.exec(one.title) || [null, "", one.title];
    rows.set(before, [...(rows.get(before) || []), { ...one, short: short.replace("head ", "") }]);
  }
  return [...rows].map(([title, row]) => {
    const names = row.map((one) => one.name);
    const isOff = names.every((name) => off.includes(name));
    const others = off.filter((name) => !names.includes(name));
    const boxes = row.map((one) =>
      el(
        "label.switch",
        { title: one.title },
        el("input", {
          type: "checkbox",
          checked: !off.includes(one.name),
          "aria-label": one.title,
          "data-key": `switch-${one.name}`,
          change: (event) =>
            switchOff(record, event.target.checked ? off.filter((name) => name !== one.name) : [...off, one.name]),
        }),
        ` ${one.short}`,
      ),
    );
    const all =
      title &&
      button(isOff ? "all on" : "all off", () => switchOff(record, isOff ? others : [...others, ...names]), {
        key: `all-${title}`,
        label: `${title}: ${isOff ? "all on" : "all off"}`,
      });
    return el("div.switches", title ? el("span.soft", title) : null, ...boxes, all || null);
  });
}

// Predicted tokens, layer by layer, and parts that are switched off.
import { changesOf, choiceOf, chosen, decode, format, labelsOf, matrix, page } from "./record.js";
import { percent, predictedSide, set } from "./record.js";
import { bar, el, facts, note, svg } from "./draw.js";
import { heatMap, mapWidth } from "./heatmap.js";
import { tokenRows } from "./path.js";

const tableHead = (...names) =>
  el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col", textContent: name }))));

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
    const [hidden] = part.values;
    panel.append(facts(`p = ${part.equation}`, [["h", hidden.shape], ["p", part.shape]], part.source));
    const side = predictedSide(record);
    if (record.tokens?.length) panel.append(tokenTable(record, side));
    const half = mapWidth();
    panel.append(el("h3", { textContent: "Attribution to the input" }));
    if (!record.saliency) return panel.append(note("The server is computing the attributions ..."));
    panel.append(
      el(
        "div",
        { className: "maps" },
        ...record.saliency.map((one) => {
          const m = matrix(one.values);
          const map = heatMap(m, {
            title: one.title,
            shape: one.values.shape,
            width: half,
            largest: 30,
            signed: true,
            rows: labelsOf(record, one.rows, m.rows),
            columns: labelsOf(record, one.columns, m.columns),
            rowName: "predicted",
            columnName: "token",
            mark: chosen(one.rows, m.rows),
            key: `saliency-${one.title}`,
            pick: (i) => set({ [choiceOf(one.rows)]: i }),
          });
          map.append(note(one.text));
          return map;
        }),
      ),
    );
    if (record.saliency.length === 1) {
      panel.append(note("Leaving words out is shown where the model reads another text than it predicts."));
    }
  },
};

function tokenTable(record, side) {
  const place = chosen(side, record.tokens.length);
  const rows = record.tokens.map((one, i) =>
    el(
      "tr",
      { className: i === place ? "on" : "" },
      el("td", { className: "n soft", textContent: i + 1 }),
      el(
        "td",
        {},
        el("button", {
          type: "button",
          className: "token",
          textContent: one.token,
          "aria-pressed": String(i === place),
          "data-key": `predicted-${i}`,
          click: () => set({ [choiceOf(side)]: i }),
        }),
      ),
      el("td", {}, bar(one.probability, percent(one.probability))),
      el("td", { className: "n", textContent: one.rank }),
    ),
  );
  return el(
    "div",
    { className: "token-table" },
    el("table", {}, tableHead("", "token", "probability", "rank"), el("tbody", {}, ...rows)),
  );
}

// --- layers -------------------------------------------------------------------------------------------------------

export const layersSection = {
  id: "layers",
  title: "Layer by layer",
  uses: ["tgt", "src"],
  text: "Each sub-layer adds to the residual stream. The table has the predictions after each layer.",
  render(record, panel) {
    const { lens } = record;
    const n = lens.layers[0].top.length;
    const place = chosen(lens.rows, n);
    const token = record.sides[lens.rows]?.tokens[place] ?? "";
    const part = outputPart(record);
    panel.append(el("p", { textContent: lens.text }));
    panel.append(
      facts(
        "softmax(norm(x after the layer) Eᵀ + b)",
        [
          ["x", part.values[0].shape],
          ["layers", [lens.layers.length]],
        ],
        part.source,
      ),
    );
    panel.append(...tokenRows(record, lens.rows));
    const known = lens.layers.map((one) => decode(one.probability).data[place]);
    const rows = lens.layers.map((one, i) =>
      el(
        "tr",
        {},
        el("th", { scope: "row", textContent: one.title }),
        el("td", { className: "n", textContent: percent(known[i]) }),
        ...one.top[place].map(([piece, p]) =>
          el(
            "td",
            { className: piece === token ? "guess on" : "guess" },
            el("span", { textContent: piece }),
            el("small", { textContent: percent(p) }),
          ),
        ),
      ),
    );
    panel.append(
      el(
        "div",
        { className: "scroll" },
        el(
          "table",
          { className: "lens" },
          tableHead("", `p(${token})`, ...lens.layers[0].top[place].map((_, i) => `${i + 1}.`)),
          el("tbody", {}, ...rows),
        ),
      ),
    );
    panel.append(
      el(
        "div",
        { className: "maps" },
        el(
          "figure",
          {},
          el("figcaption", {}, el("b", { textContent: `probability of “${token}” by layer` })),
          curve(
            known,
            lens.layers.map((one) => one.title),
            Math.min(mapWidth(), 420),
          ),
        ),
        changeBars(lens.changes, place),
      ),
    );
  },
};

function curve(values, titles, width) {
  const [left, bottom, height] = [38, 118, 140];
  const step = (width - left - 16) / Math.max(1, values.length - 1);
  const y = (p) => bottom - p * 104;
  const text = (x, place, words, anchor) => svg("text", { x, y: place, "text-anchor": anchor }, words);
  const drawing = svg("svg", {
    class: "curve",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": values.map((p, i) => `${titles[i]}: ${percent(p)}`).join("; "),
  });
  for (const p of [0, 0.5, 1]) {
    drawing.append(
      svg("path", { class: "grid", d: `M${left} ${y(p)}H${width - 8}` }),
      text(left - 4, y(p) + 4, `${100 * p} %`, "end"),
    );
  }
  const points = values.map((p, i) => [left + 8 + i * step, y(p)]);
  drawing.append(svg("path", { class: "line", d: `M${points.map((point) => point.join(" ")).join("L")}` }));
  points.forEach(([x, place], i) => {
    const title = svg("title", {}, `${titles[i]}: ${percent(values[i])}`);
    drawing.append(svg("circle", { cx: x, cy: place, r: 4 }, title), text(x, bottom + 16, i, "middle"));
  });
  return drawing;
}

function changeBars(changes, place) {
  const values = changes.map((one) => decode(one.values).data[place]);
  const most = Math.max(...values, 1e-9);
  const rows = changes.map((one, i) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", textContent: one.title }),
      el("td", {}, bar(values[i] / most, format(values[i]))),
    ),
  );
  return el(
    "figure",
    {},
    el("figcaption", {}, el("b", { textContent: "change of the stream" })),
    note("Norm of what each sub-layer adds, divided by the norm of the stream before it."),
    el("table", { className: "changes" }, el("tbody", {}, ...rows)),
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
      el("dt", { textContent: name }),
      el("dd", {}, text, el("span", { className: "soft", textContent: ` log p = ${format(p)}` })),
    ]);
    panel.append(el("dl", { className: "texts" }, ...rows));
    const titles = record.can_switch.filter((one) => off.has(one.name)).map((one) => one.title);
    panel.append(
      el("p", { textContent: off.size ? `Switched off: ${titles.join("; ")}.` : "Nothing is switched off." }),
    );
    if (isSame(record)) panel.append(note("The output is the same."));
    if (!record.can_switch.length) return panel.append(note("This model has no part that can be switched off."));
    if (!page.live)
      return panel.append(
        note("Open the live page with `transduce inspect` to switch parts off."),
      );
    panel.append(
      el("button", {
        type: "button",
        textContent: "Switch everything on",
        "data-key": "all-on",
        disabled: !off.size,
        click: () => switchOff(record, []),
      }),
    );
    for (const [group, [title, text]] of Object.entries(GROUPS)) {
      const members = record.can_switch.filter((one) => one.group === group);
      if (members.length)
        panel.append(el("fieldset", {}, el("legend", { textContent: title }), note(text), ...switchRows(record, members)));
    }
  },
};

// Whether the model writes the same without the parts that are off; a translation that was given is the same anyway.
function isSame({ original, sides, steps }) {
  const text = original && sides[predictedSide({ sides })]?.text;
  return original?.text === text && (steps ? steps.results[0]?.text === text : !sides.tgt_in);
}

const logProb = (record) => record.tokens.reduce((sum, one) => sum + Math.log(one.probability), 0);

function switchOff(record, names) {
  changesOf(record.asked.run).off = names;
  page.render(["off"]);
  page.look();
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
        "label",
        { className: "switch", title: one.title },
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
      el("button", {
        type: "button",
        textContent: isOff ? "all on" : "all off",
        "data-key": `all-${title}`,
        "aria-label": `${title}: ${isOff ? "all on" : "all off"}`,
        click: () => switchOff(record, isOff ? others : [...others, ...names]),
      });
    return el(
      "div",
      { className: "switches" },
      title ? el("span", { className: "soft", textContent: title }) : null,
      ...boxes,
      all || null,
    );
  });
}

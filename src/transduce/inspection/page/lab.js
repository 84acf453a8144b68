// Lab: the width of the beam, the length penalty, and parts that are switched off.
import { changesOf, format, page, predictedSide } from "./record.js";
import { button, el, note } from "./draw.js";
import { changeSection, logProb, switchOff } from "./tokens.js";

const SLIDERS = [
  ["beam", "Beam", { min: 1, max: 8, step: 1 }],
  ["length_penalty", "Length penalty", { min: 0, max: 2, step: 0.1 }],
];

function slider(record, [name, title, range]) {
  const changes = changesOf(record.asked.run);
  const value = changes[name] ?? record.steps[name];
  const shown = el("output", value);
  const changed = ({ target }) => {
    shown.textContent = target.value;
    changes[name] = Number(target.value);
    changes.prefix = [];
    page.inspectSentence();
  };
  const input = el("input", { type: "range", ...range, value, "data-key": `lab-${name}`, input: changed });
  return el("label.slider", title, input, shown);
}

// The output of the complete model.
function completeRow(record) {
  const { off, original } = record;
  const text = original?.text ?? record.sides[predictedSide(record)].text;
  return { title: "all parts", off: [], text, log_prob: off.length ? null : logProb(record) };
}

// The output without each group of parts. On the live page, a button switches the group off everywhere.
function withoutTable(record) {
  if (!record.without) return note("The outputs without each part are being computed ...");
  const rows = [completeRow(record), ...record.without].map(({ title, off, text, log_prob: p }) => {
    const isOff = page.live && record.off.length === off.length && off.every((name) => record.off.includes(name));
    const name = page.live
      ? button(title, () => switchOff(record, isOff ? [] : off), { pressed: isOff, key: `without-${title}` })
      : el("b", title);
    const small = el("small", p === null ? "" : `log p = ${format(p)}`);
    return el("li", name, small, el("span.text", { title: text }, text));
  });
  return el("ul.without", ...rows);
}

export function drawLab(record, box) {
  const panel = el("div", { id: "change-lab" });
  const canSearch = page.live && record.steps;
  box.replaceChildren(
    el("h2", "Lab"),
    ...(canSearch ? SLIDERS.map((one) => slider(record, one)) : []),
    note(
      page.live
        ? "A click on a token below forces it."
        : "The live page (`transduce inspect`) also forces tokens and switches single parts off.",
    ),
    el("h3", "The output with ..."),
    withoutTable(record),
    note(
      "log p is the log-probability of the output above under the model of the row: the lower it is, the more the " +
        "output depends on the part.",
    ),
    el("details", { open: record.off.length > 0 }, el("summary", "Single parts"), panel),
  );
  changeSection.render(record, panel);
}

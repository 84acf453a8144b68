// The matrices of one part, and the dot product behind a cell.
import { choiceOf, chosen, chosenPart, labelsOf, lacksValues, page, set, view } from "./record.js";
import { controls, el, facts, headBox, note, selectBox, sourceLink } from "./draw.js";
import { mapWidth, valueMap } from "./heatmap.js";
import { cellTitle, formulaNodes } from "./number.js";

export const matricesSection = {
  id: "matrices",
  title: "The matrices",
  uses: ["part", "head", "src", "tgt"],
  text:
    "All values of one part. Point at a cell, or move to it with the arrow keys, to read its value. Click it, or press " +
    "Enter, to see the dot product or the softmax behind it. On this page layers, heads, positions and columns count from 1; names of " +
    "parts and arrays in Python count from 0.",
  render(record, panel) {
    const part = chosenPart(record);
    const heads = Math.max(
      0,
      ...part.values.filter((value) => value.axes[0] === "head").map((value) => value.shape[0]),
    );
    const head = Math.min(view.head, heads - 1);
    const sides = ["src", "tgt_in", "tgt_out"].filter((name) => part.values.some((value) => value.rows === name));
    const shownSides = sides.filter((name) => name !== "tgt_out" || !sides.includes("tgt_in"));
    panel.append(
      controls(
        selectBox(
          "part",
          "part",
          record.parts.map((one) => [one.title + (!page.live && lacksValues(one) ? " (no values)" : ""), one.name]),
          part.name,
          (name) => set({ part: name }),
        ),
        heads ? headBox("head", heads, head, (i) => set({ head: i })) : null,
        ...shownSides.map((name) =>
          selectBox(
            name === "src" ? "source token" : "target token",
            `cell-${name}`,
            record.sides[name].tokens.map((token, i) => [`${i + 1} ${token}`, i]),
            chosen(name, record.sides[name].tokens.length),
            (i) => set({ [choiceOf(name)]: +i }),
          ),
        ),
      ),
    );
    panel.append(el("h3.in-print", part.title));
    panel.append(facts(part.equation, { output: part.shape }), el("p", part.text));
    if (part.source) panel.append(el("div.source", sourceLink(part.source)));
    const missing = part.values.filter((value) => !value.data);
    if (missing.length) {
      panel.append(
        note(
          page.live
            ? "These values are being computed ..."
            : `This page does not contain these values: ${missing.map((value) => value.title).join("; ")}. ` +
                "The live page (`transduce inspect`) shows them.",
        ),
      );
    }
    const detail = el("div.detail", { "aria-live": "polite" });
    const shown = part.values.filter((value) => value.data);
    panel.append(el("div.maps", ...shown.map((value) => partMap(record, part, value, head, detail))), detail);
  },
};

function partMap(record, part, value, head, detail) {
  const [rows, columns] = value.shape.slice(-2);
  return valueMap(record, value, head, {
    width: mapWidth(columns <= 64),
    mark: labelsOf(record, value.rows, rows) ? chosen(value.rows, rows) : undefined,
    key: `value-${value.name}`,
    pick: (index) => showCell(record, part, value, index, detail),
  });
}

async function showCell(record, part, value, index, box) {
  const title = el("h3", cellTitle(record, value, index));
  box.replaceChildren(title);
  const nodes = await formulaNodes(record, part, value, index);
  if (title.parentNode !== box) return; // another cell was chosen meanwhile
  box.append(...nodes);
  box.scrollIntoView({ block: "nearest" });
}

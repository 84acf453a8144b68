// The choices of the reader in the address: #part=dec.2.cross&head=3&q=7&k=6, so that a link can be an exercise.
import { choiceOf, chosenPart, LANGUAGES, MODES, page, queriesOf, shownRecord, view } from "./record.js";

const SHORT = [
  [/^encoder\.blocks\.(\d+)/, (_, n) => `enc.${+n + 1}`],
  [/^decoder\.blocks\.(\d+)/, (_, n) => `dec.${+n + 1}`],
  [/_attention/, () => ""],
  [/feed_forward/, () => "ff"],
];

const shortName = (name) => SHORT.reduce((text, [pattern, short]) => text.replace(pattern, short), name);

export function linkOf() {
  const part = chosenPart(shownRecord());
  const items = { part: shortName(part.name), head: view.head + 1, q: view[choiceOf(queriesOf(part))] + 1 };
  if (view.key >= 0) items.k = view.key + 1;
  if (view.mode !== "explore") items.mode = view.mode;
  if (view.mode === "tour") Object.assign(items, { stop: view.stop + 1, lang: view.language });
  if (view.model) items.model = view.model + 1;
  if (view.tree) items.step = view.step + 1;
  if (view.cell) items.cell = [view.cell, ...view.index.map((i) => i + 1)].join(":");
  if (page.live) items.s = shownRecord().asked.text;
  return new URLSearchParams(items).toString().replaceAll("%3A", ":");
}

// Write the choices; in a frame without an address, nothing is written.
export function writeLink() {
  try {
    history.replaceState(null, "", `#${linkOf()}`);
  } catch {
    // The frame of a notebook has no address of its own.
  }
}

// Read the choices from the address. Numbers count from 1 there; what is not readable is left as it was.
export function readLink() {
  const items = new URLSearchParams(location.hash.slice(1));
  const number = (text) => Math.max(0, (Number.parseInt(text, 10) || 1) - 1);
  if (items.has("all")) view.mode = "all";
  if (Object.hasOwn(MODES, items.get("mode"))) view.mode = items.get("mode");
  const choices = { head: "head", k: "key", step: "step", stop: "stop", model: "model" };
  for (const [name, choice] of Object.entries(choices)) {
    if (items.has(name)) view[choice] = number(items.get(name));
  }
  if (items.has("step")) view.tree = true;
  if (LANGUAGES.includes(items.get("lang"))) view.language = items.get("lang");
  if (items.has("cell")) {
    const [cell, ...index] = items.get("cell").split(":");
    Object.assign(view, { cell, index: index.map(number) });
  }
  const record = shownRecord();
  const part = record?.parts.find(({ name }) => [name, shortName(name)].includes(items.get("part")));
  if (part) view.part = view.map = part.name;
  if (items.has("q") && record) view[choiceOf(queriesOf(part ?? chosenPart(record)))] = number(items.get("q"));
  return items.get("s");
}

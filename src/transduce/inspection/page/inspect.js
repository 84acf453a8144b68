// modules: record.js draw.js heatmap.js number.js matrices.js heads.js positions.js steps.js tokens.js sections.js link.js strips.js map.js stage.js output.js lab.js tour.js inspect.js
// The page that shows what a model computes: from records inside this file, or live from the server's /inspect/look.
import { changesOf, choiceOf, chosen, chosenPart, forgetPrefixes, LANGUAGES, lacksValues, MODES } from "./record.js";
import { page, queriesOf, set, shownRecord, stageParts, view, within } from "./record.js";
import { button, el, selectBox, swipeWith, watchAppearance } from "./draw.js";
import { forgetMaps } from "./heads.js";
import { buildSections, drawAllSections, drawSections, isInView, keepPlace, SECTIONS } from "./sections.js";
import { linkOf, readLink, writeLink } from "./link.js";
import { drawModelMap } from "./map.js";
import { drawStage } from "./stage.js";
import { drawOutput } from "./output.js";
import { drawLab } from "./lab.js";
import { drawTour, enterStop, leaveTour, stopNeeds } from "./tour.js";
// What the modules above import is asked for at the same time as they are.
import "./heatmap.js";
import "./matrices.js";
import "./positions.js";
import "./tokens.js";
import "./steps.js";
import "./strips.js";
import "./number.js";

const byId = (id) => document.getElementById(id);
if (navigator.language.startsWith("de")) view.language = "de";

// --- rendering ----------------------------------------------------------------------------------------------------

const DRAWN = {
  lesson: drawLesson,
  output: drawOutput, // its height decides those of the others
  centre: (record, box) => drawStage(record, box, byId("number")),
  map: drawModelMap,
};
const CELL_ONLY = ["cell", "index"];

const LESSONS = { tour: drawTour, lab: drawLab };

// Slow views that the shown lesson needs.
const lessonNeeds = (record) => (view.mode === "lab" ? ["without"] : view.mode === "tour" ? stopNeeds(record) : []);

function drawLesson(record, box) {
  box.hidden = !LESSONS[view.mode];
  if (!box.hidden) LESSONS[view.mode](record, box);
}

// The stage, or a part of it if only a cell was chosen.
function drawWholeStage(keys) {
  const record = shownRecord();
  if (view.mode === "tour") enterStop(record);
  else leaveTour();
  const wanted = keys?.every((key) => CELL_ONLY.includes(key)) ? ["centre"] : Object.keys(DRAWN);
  const restore = wanted.map((id) => keepPlace(byId(id)));
  for (const id of wanted) DRAWN[id](record, byId(id));
  for (const one of restore) one();
}

page.render = (keys) => {
  if (view.mode === "all") {
    if (keys?.includes("mode")) drawRecords();
    else drawSections(SECTIONS.filter((section) => !keys || section.uses.some((key) => keys.includes(key))));
  } else drawWholeStage(keys);
  if (!keys || keys.includes("mode") || keys.includes("model")) showModes();
  writeLink();
  addMissing();
};

function showModes() {
  const isAll = view.mode === "all";
  byId("all").hidden = !isAll;
  byId("stage").hidden = isAll;
  const tabs = Object.entries(MODES).map(([mode, text]) =>
    button(text, () => set({ mode }), { pressed: view.mode === mode, key: `mode-${mode}` }),
  );
  const restore = keepPlace(byId("modes"));
  const models = page.records.map((record, i) => [record.model.name, i]);
  byId("modes").replaceChildren(
    models.length > 1 && !isAll ? selectBox("model", "shown-model", models, view.model, (i) => set({ model: +i })) : "",
    el("span.tabs", { role: "group", "aria-label": "mode" }, ...tabs),
    isAll ? "" : button("Map", openMap, { className: "map-switch", key: "map-switch" }),
    button("◐", switchTheme, { title: "light or dark", label: "light or dark", key: "theme" }),
    button("Share", share, { title: "copy a link to what is shown", key: "share" }),
  );
  restore();
}

function openMap() {
  if (byId("stage").classList.toggle("map-open")) drawModelMap(shownRecord(), byId("map"));
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  page.recolour();
}

async function share() {
  const address = `${location.href.split("#")[0]}#${linkOf()}`;
  try {
    await navigator.clipboard.writeText(address);
    showStatus("The link is copied.");
  } catch {
    showStatus(address);
  }
}

const IDLE = 1000; // ms after which the server may compute for sections that are not in view
let idle = 0;

function drawRecords() {
  showModes();
  if (view.mode === "all") drawAllSections(() => addMissing());
  else {
    drawWholeStage();
    addMissing();
  }
  clearTimeout(idle);
  if (view.mode === "all") idle = setTimeout(() => addMissing(SECTIONS), IDLE);
}

function showRecords(records) {
  const isFirst = !page.records.length;
  page.records = records;
  if (isFirst) readLink();
  byId("models").replaceChildren(...records.map(summaryOf));
  drawRecords();
  writeLink();
}

function summaryOf({ model, off, can_switch: known, sides }) {
  const facts = [model.kind, model.task, `${model.n_parameters.toLocaleString("en")} parameters`]
    .filter(Boolean)
    .join(", ");
  const texts = Object.values(sides)
    .map((side) => side.text)
    .filter((text, i, all) => text && all.indexOf(text) === i);
  const offNames = off.map((name) => known.find((one) => one.name === name).title).join("; ");
  const [first, ...others] = texts;
  return el(
    "div.summary",
    el("p.sentence", el("span.of-source", others.length ? `${first} → ` : first), others.join(" → ")),
    el("p.facts-line", el("b", model.name), ` ${facts}`, settingsOf(model)),
    off.length ? el("p.soft", `Switched off: ${offNames}.`) : null,
  );
}

function settingsOf(model) {
  const rows = Object.entries(model.settings || {}).map(([name, value]) =>
    el("span", `${name} `, el("code", String(value))),
  );
  return el("details", el("summary", "Settings"), el("p.facts", ...rows));
}

// The next or the last position of the shown part.
function moveQuery(step) {
  const record = shownRecord();
  const side = queriesOf(chosenPart(record));
  const n = record.sides[side]?.tokens.length ?? 1;
  set({ [choiceOf(side)]: within(chosen(side, n) + step, n) });
}

// On the stage, the arrow keys choose the position, and digits the head, while no control needs them.
function moveWithKeys(event) {
  if (!page.records.length || view.mode === "all" || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.target.closest("input, textarea, select, [role=group], [role=slider], .scroll")) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) moveQuery(step);
  if (/^[1-9]$/.test(event.key)) set({ head: Number(event.key) - 1 });
}

function redraw() {
  forgetMaps(page.records);
  if (page.records.length) drawRecords();
}

// --- the live page ------------------------------------------------------------------------------------------------

let running = null; // AbortController of the requests that are under way
let asking = ""; // these requests

function showStatus(message, isError = false) {
  byId("status").textContent = message;
  byId("status").classList.toggle("error", isError);
}

const ask = (...request) => (page.ask ?? askServer)(...request);

async function askServer(path, body, signal) {
  const request = body
    ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal }
    : { signal };
  const response = await fetch(path, request).catch((error) => {
    if (signal?.aborted) throw error;
    throw new Error("The server cannot be reached. Start it again with `transduce inspect`.");
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok)
    throw new Error(answer?.error?.message || answer?.error || `The server answered with status ${response.status}.`);
  return answer;
}

const chosenModels = () =>
  [byId("model")?.value, byId("other")?.value].filter((name, i, all) => name && all.indexOf(name) === i);

function requestFor(run) {
  const target = byId("target").value.trim() ? byId("target").value : null;
  return { run, text: byId("text").value, target, ...changesOf(run) };
}

// The parts of a run whose matrices the page shows.
function valuesFor(run) {
  const shown = page.records.find((record) => record.asked.run === run);
  return shown ? stageParts(shown).map((part) => part.name) : [];
}

const isFor = (body) => (record) => JSON.stringify(record.asked) === JSON.stringify(body);

// Ask for what the page should show and does not show yet; what was asked for before is given up.
async function inspectSentence() {
  const wanted = byId("text").value.trim() ? chosenModels().map(requestFor) : [];
  const key = JSON.stringify(wanted);
  if (key === asking) return undefined;
  running?.abort();
  asking = key;
  if (!wanted.length) return showStatus("Type a sentence.");
  const own = (running = new AbortController());
  const slow = setTimeout(() => showStatus("Computing ..."), 400);
  const began = performance.now();
  const answers = await Promise.allSettled(
    wanted.map(
      (body) =>
        page.records.find(isFor(body)) ??
        ask("/inspect/look", { ...body, values: valuesFor(body.run), head: view.head }, own.signal),
    ),
  );
  clearTimeout(slow);
  if (own.signal.aborted) return undefined;
  asking = "";
  const taken = performance.now() - began;
  answers.forEach(({ value }, i) => value && (value.asked = wanted[i]));
  const records = answers.map((one) => one.value).filter(Boolean);
  if (records.length) showRecords(records);
  const errors = answers.map((one, i) => one.reason && `${wanted[i].run}: ${one.reason.message}`).filter(Boolean);
  return showStatus(errors.join(" ") || `${Math.round(taken)} ms`, errors.length > 0);
}

// Ask for what sections show and their records lack: slow views, and the matrices of the chosen part.
function addMissing(sections = view.mode === "all" ? SECTIONS.filter(isInView) : []) {
  if (!page.live || !page.records.length) return;
  for (const record of view.mode === "all" ? page.records : [shownRecord()]) addMissingTo(record, sections);
}

async function addMissingTo(record, sections) {
  const needs = view.mode === "all" ? sections.flatMap((section) => section.needs ?? []) : lessonNeeds(record);
  const slow = needs.filter((name) => !(name in record));
  const shown = stageParts(record);
  const values = shown.some((part) => lacksValues(part) || lacksWeights(part)) ? shown.map((part) => part.name) : [];
  const views = values.length ? [...slow, "parts"] : slow;
  const key = JSON.stringify([views, values, view.head]);
  if (!views.length || record.awaited === key) return;
  record.awaited = key;
  try {
    Object.assign(
      record,
      await ask("/inspect/look", { ...record.asked, values, views, head: view.head }, running.signal),
    );
    const changed = ({ needs, uses }) =>
      needs?.some((name) => slow.includes(name)) || (values.length && uses.includes("part"));
    if (page.records.includes(record)) {
      if (view.mode === "all") drawSections(SECTIONS.filter(changed));
      else drawWholeStage();
    }
    if (record.awaited === key) record.awaited = null;
    addMissing();
  } catch (error) {
    record.awaited = null;
    if (error.name !== "AbortError") showStatus(error.message, true);
  }
}

// Whether the weights of the chosen head are not in the record.
function lacksWeights(part) {
  const heads = part.values
    .filter((value) => value.product?.head !== undefined)
    .map((value) => [value.product.head, value.shape[0] - 1]);
  return view.mode !== "all" && heads.some(([head, last]) => head !== Math.min(view.head, last));
}

page.inspectSentence = inspectSentence;
const askCell = (record, value, index) => ask("/inspect/cell", { ...record.asked, value, index });

function showExamples(texts) {
  const choose = (text) => {
    byId("text").value = text;
    byId("text").dispatchEvent(new Event("input"));
  };
  byId("examples").replaceChildren("Try: ", ...texts.map((text) => button(text, () => choose(text), { title: text })));
  byId("examples").hidden = texts.length < 2;
}

async function startLive() {
  page.live = true;
  if (!page.ask) page.cell = askCell;
  document.body.classList.add("live");
  byId("form").hidden = false;
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    inspectSentence();
  });
  const changed = () => {
    forgetPrefixes();
    inspectSentence();
  };
  for (const id of ["text", "target"]) byId(id).addEventListener("input", changed);
  try {
    const missing = LANGUAGES.filter((name) => !page.texts[name]);
    const paths = ["/inspect/models", ...missing.map((name) => `tour.${name}.json`)];
    const [models, ...texts] = await Promise.all(paths.map((path) => ask(path)));
    missing.forEach((name, i) => (page.texts[name] = texts[i]));
    const options = models.map((one) => [`${one.name} (${one.kind}, ${one.task})`, one.name]);
    const first = selectBox("model", "model", options, models[0]?.name, inspectSentence);
    first.lastChild.id = "model";
    const second = selectBox(
      "compare with",
      "other",
      [["none", ""], ...options],
      models[0]?.together ? models[1]?.name : "",
      inspectSentence,
    );
    second.lastChild.id = "other";
    byId("choices").append(first, second);
    byId("choices").hidden = models.length < 2;
    byId("has-target").hidden = models.every((one) => one.task !== "translation");
    const examples = models[0]?.examples ?? [];
    byId("text").value ||= readLink() ?? examples[Math.floor(examples.length / 2)] ?? "";
    showExamples(examples);
    inspectSentence();
    if (matchMedia("(hover: hover)").matches) byId("text").select(); // no keyboard of a phone
  } catch (error) {
    showStatus(error.message, true);
  }
}

buildSections(byId("sections"), document.querySelector("nav"), () => addMissing());
page.recolour = watchAppearance(redraw);
document.addEventListener("keydown", moveWithKeys);
byId("map").addEventListener(
  "click",
  (event) => event.target.closest("button") && byId("stage").classList.remove("map-open"),
);
swipeWith(byId("centre"), (step) => moveQuery(step));
byId("readout").addEventListener("click", () => byId("number").scrollIntoView());
addEventListener("hashchange", () => {
  readLink();
  if (page.records.length) drawRecords();
});
page.texts = byId("texts") ? JSON.parse(byId("texts").textContent) : {};
if (byId("records")) showRecords(JSON.parse(byId("records").textContent));
else startLive();

// modules: record.js draw.js heatmap.js path.js matrices.js heads.js positions.js tree.js steps.js tokens.js inspect.js
// The page that shows what a model computes: from records inside this file, or live from the server's /inspect/look.
import { changesOf, chosenPart, forgetPrefixes, lacksValues, page } from "./record.js";
import { el, note, selectBox, watchAppearance } from "./draw.js";
import { pathSection } from "./path.js";
import { matricesSection } from "./matrices.js";
import { forgetMaps, headsSection } from "./heads.js";
import { positionsSection } from "./positions.js";
import { stepWithKeys, stepsSection } from "./steps.js";
import { changeSection, layersSection, tokensSection } from "./tokens.js";

const SECTIONS = [
  pathSection,
  matricesSection,
  headsSection,
  positionsSection,
  stepsSection,
  tokensSection,
  layersSection,
  changeSection,
];
const byId = (id) => document.getElementById(id);

// --- rendering ----------------------------------------------------------------------------------------------------

// A section is absent if the record says so, unless it has another half to show.
function reasonAgainst(record, id) {
  if (id === "positions" && record.masks?.length) return null;
  return record.absent[id] ?? null;
}

// The focus and the scrolled boxes of a panel, as a function that restores them after it was filled again.
function keepPlace(panel) {
  const focused = panel.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const scrolled = [...panel.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  return () => {
    panel.querySelectorAll(".scroll").forEach((box, i) => {
      const place = box.dataset.center ? Number(box.dataset.center) - page.width / 2 : scrolled[i];
      if (place > 0) box.scrollLeft = place;
    });
    if (focused) panel.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  };
}

function fillPanel(section, record, panel) {
  panel.replaceChildren();
  if (page.records.length > 1) panel.append(el("p", { className: "model-name", textContent: record.model.name }));
  const reason = reasonAgainst(record, section.id);
  try {
    if (reason) panel.append(note(reason));
    else section.render(record, panel);
  } catch (error) {
    console.error(error);
    panel.append(note(`This section cannot be drawn: ${error.message}`));
  }
}

// Sizes are read before anything changes, so that the browser computes the layout once.
function draw(wanted) {
  const boxes = wanted.map((section) => byId(section.id).querySelector(".panels"));
  for (const box of boxes) {
    while (box.children.length < page.records.length) box.append(el("div", { className: "panel" }));
    while (box.children.length > page.records.length) box.lastChild.remove();
    box.classList.toggle("two", page.records.length > 1);
  }
  page.width = boxes[0]?.firstChild?.clientWidth || 340;
  const restore = boxes.flatMap((box) => [...box.children].map(keepPlace));
  wanted.forEach((section, n) => page.records.forEach((record, i) => fillPanel(section, record, boxes[n].children[i])));
  wanted.forEach((section, n) => {
    boxes[n].previousElementSibling.hidden = page.records.every((record) => reasonAgainst(record, section.id));
  });
  for (const one of restore) one();
}

page.render = (keys) => {
  draw(SECTIONS.filter((section) => !keys || section.uses.some((key) => keys.includes(key))));
  addMissing();
};

const IDLE = 1000; // ms after which the server may compute for sections that are not in view
let later = 0;
let idle = 0;

function isInView({ id }) {
  const { top, bottom } = byId(id).getBoundingClientRect();
  return top < innerHeight && bottom > 0;
}

// Draw the sections in view first; the others follow when these have been painted.
function drawRecords() {
  const first = SECTIONS.filter(isInView);
  draw(first);
  const rest = SECTIONS.filter((section) => !first.includes(section));
  cancelAnimationFrame(later);
  later = requestAnimationFrame(() => {
    later = requestAnimationFrame(() =>
      setTimeout(() => {
        draw(rest);
        addMissing();
      }),
    );
  });
  clearTimeout(idle);
  idle = setTimeout(() => addMissing(SECTIONS), IDLE);
}

function showRecords(records) {
  page.records = records;
  byId("sections").hidden = false;
  document.querySelector("nav").hidden = false;
  const parts = ({ model, off, can_switch: known, sides }) => {
    const facts = [model.kind, model.task, `${model.n_parameters.toLocaleString("en")} parameters`]
      .filter(Boolean)
      .join(", ");
    const texts = Object.values(sides)
      .map((side) => side.text)
      .filter((text, i, all) => text && all.indexOf(text) === i);
    return el(
      "div",
      { className: "summary" },
      el("p", {}, el("b", { textContent: model.name }), ` ${facts}`),
      el("p", { className: "sentence", textContent: texts.join(" → ") }),
      off.length ? el("p", { className: "soft", textContent: `Switched off: ${off.map((name) => known.find((one) => one.name === name).title).join("; ")}.` }) : null,
      settingsOf(model),
    );
  };
  byId("models").replaceChildren(...records.map(parts));
  drawRecords();
}

function settingsOf(model) {
  const rows = Object.entries(model.settings || {}).map(([name, value]) =>
    el("span", {}, `${name} `, el("code", { textContent: String(value) })),
  );
  return el("details", {}, el("summary", { textContent: "Settings" }), el("p", { className: "facts" }, ...rows));
}

function buildSections() {
  const current = new IntersectionObserver(
    (entries) =>
      entries.forEach((entry) => {
        document
          .querySelector(`nav a[href="#${entry.target.id}"]`)
          .toggleAttribute("aria-current", entry.isIntersecting);
      }),
    { rootMargin: "-45% 0px -50% 0px" },
  );
  const appeared = new IntersectionObserver(() => addMissing());
  for (const [i, section] of SECTIONS.entries()) {
    const node = el(
      "section",
      { id: section.id },
      el("h2", { textContent: `${i + 1}. ${section.title}` }),
      el("p", { textContent: section.text }),
      el("div", { className: "panels" }),
    );
    byId("sections").append(node);
    // In the frame of a notebook, a link to a place does not scroll.
    const go = () => node.scrollIntoView();
    document.querySelector("nav").append(el("a", { href: `#${section.id}`, textContent: section.title, click: go }));
    current.observe(node);
    appeared.observe(node);
  }
}

function redraw() {
  forgetMaps(page.records);
  if (page.records.length) page.render(null);
}

// --- the live page ------------------------------------------------------------------------------------------------

let running = null; // AbortController of the requests that are under way
let asking = ""; // these requests

function showStatus(message, isError = false) {
  byId("status").textContent = message;
  byId("status").classList.toggle("error", isError);
}

async function ask(path, body, signal) {
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

// The part of a run whose matrices the page shows.
function valuesFor(run) {
  const shown = page.records.find((record) => record.asked.run === run);
  const part = shown && chosenPart(shown);
  return part ? [part.name] : [];
}

const isFor = (body) => (record) => JSON.stringify(record.asked) === JSON.stringify(body);

// Ask for what the page should show and does not show yet; what was asked for before is given up.
async function look() {
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
        page.records.find(isFor(body)) ?? ask("/inspect/look", { ...body, values: valuesFor(body.run) }, own.signal),
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
function addMissing(sections = SECTIONS.filter(isInView)) {
  if (page.live) page.records.forEach((record) => addMissingTo(record, sections));
}

async function addMissingTo(record, sections) {
  const slow = sections.flatMap((section) => section.needs ?? []).filter((name) => !(name in record));
  const values = lacksValues(chosenPart(record)) ? [chosenPart(record).name] : [];
  const views = values.length ? [...slow, "parts"] : slow;
  const key = JSON.stringify([views, values]);
  if (!views.length || record.awaited === key) return;
  record.awaited = key;
  try {
    Object.assign(record, await ask("/inspect/look", { ...record.asked, values, views }, running.signal));
    const changed = ({ needs, uses }) => needs?.some((name) => slow.includes(name)) || (values.length && uses.includes("part"));
    if (page.records.includes(record)) draw(SECTIONS.filter(changed));
    if (record.awaited === key) record.awaited = null;
    addMissing();
  } catch (error) {
    record.awaited = null;
    if (error.name !== "AbortError") showStatus(error.message, true);
  }
}

page.look = look;
page.cell = (record, value, index) => ask("/inspect/cell", { ...record.asked, value, index });

async function startLive() {
  page.live = true;
  byId("form").hidden = false;
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    look();
  });
  const changed = () => {
    forgetPrefixes();
    look();
  };
  for (const id of ["text", "target"]) byId(id).addEventListener("input", changed);
  try {
    const models = await ask("/inspect/models");
    const options = models.map((one) => [`${one.name} (${one.kind}, ${one.task})`, one.name]);
    const first = selectBox("model", "model", options, models[0]?.name, look);
    first.lastChild.id = "model";
    const second = selectBox(
      "compare with",
      "other",
      [["none", ""], ...options],
      models[0]?.together ? models[1]?.name : "",
      look,
    );
    second.lastChild.id = "other";
    byId("choices").append(first, second);
    byId("choices").hidden = models.length < 2;
    byId("has-target").hidden = models.every((one) => one.task !== "translation");
    look();
    byId("text").focus();
  } catch (error) {
    showStatus(error.message, true);
  }
}

buildSections();
watchAppearance(redraw);
document.addEventListener("keydown", stepWithKeys);
if (byId("records")) showRecords(JSON.parse(byId("records").textContent));
else startLive();

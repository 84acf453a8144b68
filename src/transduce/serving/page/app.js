// The page of `transduce serve`: it uses POST /v1/translate and GET /v1/directions, and nothing from elsewhere. Needs shared.js.
"use strict";

const WAIT = 250; // milliseconds without a keystroke before a translation is requested
const LINES_PER_REQUEST = 32;
const CHARACTERS_PER_REQUEST = 5000;
const TRIES = 2; // attempts for a line whose request exceeds its deadline
const MAY_END = [0, 429, 503, 504]; // statuses of temporary problems: not reached, busy, shutting down, too slow
const BEAM = 16; // number of beams in the search for alternatives
const MOST_SHOWN = 8; // maximum alternatives; alternatives with a different next word come first
const MAX_DOUBT = 3; // nats at which a word is shaded fully

let directions = [];
let inspected = []; // names of the runs that the inspection page shows
let running = null; // AbortController of the running translation
let looking = null; // AbortController of the search for alternatives
let aligning = null; // AbortController of the alignment
let timer = 0;
let known = new Map(); // line -> its translation: {sentences: [{source, text, words}], gaps: texts before, between and behind them}
let knownRoute = "";
let translated = []; // the sentences of all lines

// --- requests -----------------------------------------------------------------------------------------------------

// Translate lines in requests that the service accepts. Call take(translations, number of lines done) after each.
async function translateLines(lines, options, signal, take, report) {
  let most = LINES_PER_REQUEST;
  for (let start = 0, expired = 0; start < lines.length;) {
    const part = nextPart(lines, start, most);
    try {
      const answer = await ask("v1/translate", { text: part, ...options }, signal);
      start += part.length;
      take(answer.translations, start);
    } catch (error) {
      if (signal.aborted) throw error;
      if (error.status === 504 && part.length > 1) { most = Math.ceil(part.length / 2); continue; }
      if (error.status === 504) expired += 1;
      if (expired > TRIES || !MAY_END.includes(error.status)) throw error;
      report(`${error.message}. Trying again ...`);
      await pause(error.retryAfter, signal);
    }
  }
}

function nextPart(lines, start, most) {
  let end = start + 1;
  let size = lines[start].length;
  while (end < lines.length && end - start < most && (size += lines[end].length) <= CHARACTERS_PER_REQUEST) end += 1;
  return lines.slice(start, end);
}

const route = () => ({ source: byId("source").value, target: byId("target").value, model: byId("model").value || undefined });

// --- languages ----------------------------------------------------------------------------------------------------

const names = typeof Intl.DisplayNames === "function" ? new Intl.DisplayNames(["en"], { type: "language" }) : null;

function languageName(code) {
  try { return names && /^[a-z]{2,3}\b/i.test(code) ? names.of(code.replace("_", "-")) : code; } catch { return code; }
}

function fill(select, codes, label = (code) => code) {
  const before = select.value;
  select.replaceChildren(...codes.map((code) => new Option(label(code), code)));
  if (codes.includes(before)) select.value = before;
}

function updateDirections() {
  fill(byId("source"), [...new Set(directions.map((one) => one.source))], languageName);
  const from = directions.filter((one) => one.source === byId("source").value);
  fill(byId("target"), [...new Set(from.map((one) => one.target))], languageName);
  const models = from.filter((one) => one.target === byId("target").value).map((one) => one.model);
  fill(byId("model"), models);
  byId("models").hidden = models.length < 2;
  byId("swap").disabled = !directions.some((one) => one.source === byId("target").value && one.target === byId("source").value);
  byId("swap").textContent = byId("swap").disabled ? "→" : "⇄";
}

function swap() {
  const { source, target } = route();
  const text = outputText();
  byId("source").value = target;
  updateDirections();
  byId("target").value = source;
  updateDirections();
  if (text) byId("input").value = text;
  translateNow();
}

// --- translation --------------------------------------------------------------------------------------------------

function translateSoon() {
  clearTimeout(timer);
  timer = setTimeout(translateNow, WAIT);
  const n = byId("input").value.length;
  byId("count").textContent = n ? `${n.toLocaleString("en")} characters` : "";
}

async function translateNow() {
  clearTimeout(timer);
  running?.abort();
  aligning?.abort();
  closeAlternatives();
  if (!directions.length) return;
  const own = (running = new AbortController());
  const lines = byId("input").value.split("\n");
  if (knownRoute !== JSON.stringify(route())) known = new Map();
  knownRoute = JSON.stringify(route());
  known = new Map([...new Set(lines)].filter((line) => known.has(line)).map((line) => [line, known.get(line)]));
  const wanted = [...new Set(lines)].filter((line) => line.trim() && !known.has(line));
  const began = performance.now();
  const slow = setTimeout(() => show("Translating ..."), 1000);
  byId("output").setAttribute("aria-busy", String(wanted.length > 0));
  try {
    await translateLines(wanted, { ...route(), words: true }, own.signal, (answers, end) => {
      answers.forEach((one, i) => known.set(wanted[end - answers.length + i], partsOf(one)));
      if (end < wanted.length) { showTranslation(lines); show(`${end} of ${wanted.length} lines`); }
    }, (message) => show(message, true));
    showTranslation(lines);
    show(translated.map((one) => one.note).find(Boolean) || "");
    byId("time").textContent = wanted.length ? `${Math.round(performance.now() - began)} ms` : "";
  } catch (error) {
    if (!own.signal.aborted) { showTranslation(lines); show(error.message, true); }
  }
  clearTimeout(slow);
  if (running === own) byId("output").setAttribute("aria-busy", "false");
}

function partsOf(translation) {
  const gaps = [];
  let end = 0;
  for (const { text } of translation.sentences) {
    const place = translation.text.indexOf(text, end);
    gaps.push(translation.text.slice(end, place));
    end = place + text.length;
  }
  return { sentences: translation.sentences, gaps: [...gaps, translation.text.slice(end)] };
}

const outputText = () => byId("output").textContent;

function showTranslation(lines) {
  const nodes = [];
  translated = [];
  lines.forEach((line, i) => {
    const { sentences, gaps } = known.get(line) || { sentences: [], gaps: [line.trim() ? "..." : line] };
    sentences.forEach((sentence, j) => { nodes.push(gaps[j], sentenceNode(sentence, translated.length)); translated.push(sentence); });
    nodes.push(gaps.at(-1) + (i < lines.length - 1 ? "\n" : ""));
  });
  byId("output").replaceChildren(...nodes);
  byId("copy").disabled = !translated.length;
}

function sentenceNode(sentence, number) {
  const node = document.createElement("span");
  let end = 0;
  for (const [index, [word, logProb]] of (sentence.words || []).entries()) {
    const place = sentence.text.indexOf(word, end);
    if (place < 0) continue;
    if (place > end) node.append(sentence.text.slice(end, place));
    const span = document.createElement("span");
    span.textContent = word;
    span.className = logProb === null ? "word" : "word unsure";
    span.tabIndex = -1; // reached by arrow keys
    span.setAttribute("role", "button");
    span.style.setProperty("--doubt", Math.min(1, -logProb / MAX_DOUBT).toFixed(2));
    span.title = `${logProb === null ? "" : `probability ${(100 * Math.exp(logProb)).toFixed(0)} %; `}choose for alternatives`;
    span.dataset.sentence = number;
    span.dataset.word = index;
    span.dataset.start = place;
    node.append(span);
    end = place + word.length;
  }
  node.append(sentence.text.slice(end));
  return node;
}

// --- source words of a word of the translation --------------------------------------------------------------------

async function alignmentOf(number) {
  const sentence = translated[number];
  if (!sentence.alignment) {
    aligning?.abort();
    aligning = new AbortController();
    const body = { text: sentence.source, prefix: sentence.chosen ? sentence.text : "", split: false, alignment: true, ...route() };
    const found = ask("v1/translate", body, aligning.signal).then((answer) => answer.translations[0].sentences[0].alignment).catch(() => {
      if (sentence.alignment === found) sentence.alignment = null; // request it again the next time
      return [];
    });
    sentence.alignment = found;
  }
  return sentence.alignment;
}

async function markSource(span) {
  const number = Number(span.dataset.sentence);
  const start = Array.from(translated[number].text.slice(0, Number(span.dataset.start))).length; // in code points
  const end = start + Array.from(span.textContent).length;
  const links = await alignmentOf(number);
  if (!span.matches(":hover, :focus")) return;
  const source = Array.from(translated[number].source);
  const text = byId("input").value;
  let place = 0;
  for (let i = 0; i <= number; i++) place = text.indexOf(translated[i].source, place) + (i < number ? translated[i].source.length : 0);
  if (place < 0) return;
  const nodes = [text.slice(0, place)];
  let done = 0;
  for (const [from, to] of links.filter(([, , first, last]) => first < end && start < last).sort((one, two) => one[0] - two[0])) {
    nodes.push(source.slice(done, from).join(""), marked("mark", source.slice(Math.max(from, done), to).join("")));
    done = Math.max(to, done);
  }
  byId("marks").replaceChildren(...nodes, text.slice(place + source.slice(0, done).join("").length));
  const mark = byId("marks").querySelector("mark");
  const input = byId("input");
  if (mark && (mark.offsetTop < input.scrollTop || mark.offsetTop + mark.offsetHeight > input.scrollTop + input.clientHeight)) {
    input.scrollTop = mark.offsetTop - input.clientHeight / 2;
  }
  byId("marks").scrollTop = input.scrollTop;
}

// --- alternatives of a word ---------------------------------------------------------------------------------------

async function showAlternatives(span) {
  const number = Number(span.dataset.sentence);
  const sentence = translated[number];
  const before = sentence.text.slice(0, Number(span.dataset.start)).trimEnd();
  closeAlternatives();
  const own = (looking = new AbortController());
  openAlternatives(span, sentence.source);
  try {
    const body = { text: sentence.source, prefix: before, n_best: BEAM, beam: BEAM, split: false, ...route() };
    const answer = await ask("v1/translate", body, own.signal);
    const nextWord = (text) => text.slice(before.length).trimStart().split(/\s/, 1)[0];
    const others = answer.translations[0].sentences[0].candidates.map((one) => one.text);
    const fitting = others.filter((text) => text.startsWith(before) && text !== sentence.text);
    const best = new Map([[nextWord(sentence.text), null]]); // the best translation with each next word
    for (const text of fitting) if (!best.has(nextWord(text))) best.set(nextWord(text), text);
    const first = [...best.values()].filter(Boolean);
    const rest = fitting.filter((text) => !first.includes(text)); // texts that differ after the next word
    const shown = [...first, ...rest].slice(0, MOST_SHOWN).map((text) => choice(span, sentence.text, text));
    fillChoices(shown.length ? shown : ["No other translations found."]);
    byId("choices").querySelector("button")?.focus();
  } catch (error) {
    if (own.signal.aborted) return; // the list belongs to another word now, or is closed
    fillChoices([error.message]);
  }
  placeAlternatives(span);
}

const fillChoices = (items) => byId("choices").replaceChildren(...items.map((item) => marked("li", item)));

function openAlternatives(span, source) {
  const run = inspected.indexOf(byId("model").value);
  byId("inside").hidden = !inspected.length;
  byId("inside").href = `inspect/#${new URLSearchParams({ s: source, ...(run > 0 && { model: run + 1 }) })}`;
  fillChoices(["Looking for alternatives ..."]);
  span.classList.add("open");
  byId("alternatives").showPopover();
  placeAlternatives(span);
}

// Place the list below the word, or above it if there is more room.
function placeAlternatives(span) {
  const box = byId("alternatives");
  const word = span.getBoundingClientRect();
  const room = { above: word.top - 14, below: innerHeight - word.bottom - 14 };
  box.style.maxHeight = `${Math.max(room.above, room.below)}px`;
  const isAbove = box.offsetHeight > room.below && room.above > room.below;
  box.style.left = `${Math.max(8, Math.min(word.left, document.documentElement.clientWidth - box.offsetWidth - 8)) + scrollX}px`;
  box.style.top = `${scrollY + (isAbove ? word.top - box.offsetHeight - 6 : word.bottom + 6)}px`;
}

function closeAlternatives() {
  looking?.abort();
  byId("alternatives").hidePopover();
  byId("output").querySelector(".open")?.classList.remove("open");
}

function choice(span, before, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.dir = "auto";
  button.append(...withChanges(before.split(/\s+/), text));
  button.addEventListener("click", () => choose(span, text));
  return button;
}

// Convert a text to nodes, in which words that the other text lacks are bold.
function withChanges(others, text) {
  return text.split(/(\s+)/).map((word) => {
    const place = others.indexOf(word);
    if (place >= 0) others.splice(place, 1);
    return place >= 0 || !word.trim() ? word : marked("b", word);
  });
}

function choose({ dataset: { sentence, word } }, text) {
  const words = text.split(/\s+/).filter(Boolean).map((one) => [one, null]);
  Object.assign(translated[sentence], { text, words, chosen: true, alignment: null });
  closeAlternatives();
  showTranslation(byId("input").value.split("\n"));
  (byId("output").querySelector(`[data-sentence="${sentence}"][data-word="${word}"]`) || byId("output")).focus();
}

function moveInOutput(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const words = [...byId("output").querySelectorAll(".word")];
  const here = words.indexOf(event.target);
  if (step && words.length) {
    event.preventDefault();
    words[Math.min(Math.max(here + step, 0), words.length - 1)].focus();
  } else if (here >= 0 && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    showAlternatives(event.target);
  }
}

async function copyOutput() {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(outputText());
  } else { // the clipboard needs a secure origin
    getSelection().selectAllChildren(byId("output"));
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  show("copied");
}

// --- page ---------------------------------------------------------------------------------------------------------

function connect() {
  byId("direction").addEventListener("change", () => { updateDirections(); translateNow(); });
  byId("direction").addEventListener("submit", (event) => event.preventDefault());
  byId("swap").addEventListener("click", swap);
  byId("input").addEventListener("input", translateSoon);
  byId("clear").addEventListener("click", () => { byId("input").value = ""; translateSoon(); translateNow(); byId("input").focus(); });
  byId("copy").addEventListener("click", copyOutput);
  byId("confidence").addEventListener("change", (event) => byId("output").classList.toggle("shaded", event.target.checked));
  byId("output").addEventListener("click", (event) => { if (event.target.matches(".word")) showAlternatives(event.target); });
  for (const kind of ["mouseover", "focusin"]) {
    byId("output").addEventListener(kind, (event) => { if (event.target.matches(".word")) markSource(event.target); });
  }
  for (const kind of ["mouseout", "focusout"]) byId("output").addEventListener(kind, () => byId("marks").replaceChildren());
  byId("input").addEventListener("scroll", () => { byId("marks").scrollTop = byId("input").scrollTop; });
  byId("output").addEventListener("keydown", moveInOutput);
  byId("key").addEventListener("change", loadDirections);
  byId("alternatives").addEventListener("toggle", (event) => { if (event.newState === "closed") closeAlternatives(); });
}

async function loadDirections() {
  try {
    const answer = await ask("v1/directions", null);
    directions = answer.models;
    inspected = (await ask("inspect/models", null)).map((one) => one.name);
    byId("generate-link").hidden = !answer.language_models.length;
    byId("inside-link").hidden = !inspected.length;
    updateDirections();
    show(directions.length ? "" : "this service has no translation model");
    translateNow();
  } catch (error) {
    show(error.message, true);
    if (MAY_END.includes(error.status)) { await pause(error.retryAfter); loadDirections(); }
  }
}

connect();
loadDirections();

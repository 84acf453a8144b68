// The page of `transduce serve`: it uses POST /v1/translate and GET /v1/directions, and nothing from elsewhere.
"use strict";

const byId = (id) => document.getElementById(id);
const WAIT = 250; // milliseconds without a key before a translation is asked for
const LINES_PER_REQUEST = 32;
const CHARACTERS_PER_REQUEST = 10000;
const TRIES = 5; // of a part of a file whose deadline passes
const BEAM = 16; // for alternatives
const MAX_DOUBT = 3; // nats at which a word is shaded fully

let directions = [];
let running = null; // AbortController of the translation that is under way
let timer = 0;
let translated = []; // per text sentence: {source, text, words}

// --- requests -----------------------------------------------------------------------------------------------------

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const response = await fetch(path, body === null ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal });
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  const error = new Error(answer.error || `the service answered with status ${response.status}`);
  error.status = response.status;
  error.retryAfter = Number(response.headers.get("Retry-After")) || 1;
  throw error;
}

const pause = (seconds, signal) => new Promise((resolve, reject) => {
  const wait = setTimeout(resolve, 1000 * seconds);
  signal.addEventListener("abort", () => { clearTimeout(wait); reject(signal.reason); }, { once: true });
});

const route = () => ({ source: byId("source").value, target: byId("target").value, ...(byId("model").value ? { model: byId("model").value } : {}) });

function show(message, isError = false) {
  byId("status").textContent = message;
  byId("status").classList.toggle("error", isError);
}

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
  byId("count").textContent = byId("input").value.length ? `${byId("input").value.length} characters` : "";
}

async function translateNow() {
  clearTimeout(timer);
  if (running) running.abort();
  byId("alternatives").hidden = true;
  const text = byId("input").value;
  if (!text.trim()) { running = null; showTranslation(null); show(""); return; }
  const own = (running = new AbortController());
  byId("output").setAttribute("aria-busy", "true");
  const start = performance.now();
  try {
    const answer = await ask("v1/translate", { text, ...route(), words: true }, own.signal);
    showTranslation(answer.translations[0]);
    const notes = answer.translations[0].sentences.map((one) => one.note).filter(Boolean);
    show(notes.length ? notes[0] : `${Math.round(performance.now() - start)} ms`);
  } catch (error) {
    if (own.signal.aborted) return;
    if (error.status === 401) byId("key-box").open = true;
    show(error.message, true);
  }
  if (running === own) { running = null; byId("output").setAttribute("aria-busy", "false"); }
}

const outputText = () => byId("output").textContent;

function showTranslation(translation) {
  const output = byId("output");
  output.setAttribute("aria-busy", "false");
  byId("copy").disabled = !translation;
  translated = translation ? translation.sentences : [];
  if (!translation) { output.replaceChildren(); return; }
  const nodes = [];
  let end = 0;
  translated.forEach((sentence, number) => {
    const place = translation.text.indexOf(sentence.text, end);
    if (place > end) nodes.push(document.createTextNode(translation.text.slice(end, place)));
    nodes.push(sentenceNode(sentence, number));
    end = place + sentence.text.length;
  });
  nodes.push(document.createTextNode(translation.text.slice(end)));
  output.replaceChildren(...nodes);
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
    span.tabIndex = 0;
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

// --- words of the source that a word translates -------------------------------------------------------------------

async function alignmentOf(number) {
  const sentence = translated[number];
  if (!sentence.alignment) {
    const body = { text: sentence.source, prefix: sentence.chosen ? sentence.text : "", split: false, alignment: true, ...route() };
    sentence.alignment = ask("v1/translate", body).then((answer) => answer.translations[0].sentences[0].alignment, () => []);
  }
  return sentence.alignment;
}

async function markSource(span) {
  const number = Number(span.dataset.sentence);
  const start = toCodePoints(translated[number].text, Number(span.dataset.start));
  const end = start + Array.from(span.textContent).length;
  const links = await alignmentOf(number);
  if (!span.matches(":hover, :focus")) return;
  const source = Array.from(translated[number].source);
  const marked = links.filter(([, , from, to]) => from < end && start < to).map(([from, to]) => [from, to]);
  const text = byId("input").value;
  let place = 0;
  for (let i = 0; i <= number; i++) place = text.indexOf(translated[i].source, place) + (i < number ? translated[i].source.length : 0);
  if (place < 0) return;
  const nodes = [document.createTextNode(text.slice(0, place))];
  source.forEach((letter, i) => {
    const isMarked = marked.some(([from, to]) => from <= i && i < to);
    const node = isMarked ? document.createElement("mark") : document.createTextNode("");
    node.textContent = letter;
    nodes.push(node);
  });
  byId("marks").replaceChildren(...nodes);
  byId("marks").scrollTop = byId("input").scrollTop;
}

const toCodePoints = (text, units) => Array.from(text.slice(0, units)).length;

// --- alternatives of a word ---------------------------------------------------------------------------------------

async function showAlternatives(span) {
  const number = Number(span.dataset.sentence);
  const sentence = translated[number];
  const before = sentence.text.slice(0, Number(span.dataset.start)).trimEnd();
  show("Looking for alternatives ...");
  try {
    const body = { text: sentence.source, prefix: before, n_best: BEAM, beam: BEAM, split: false, ...route() };
    const answer = await ask("v1/translate", body, new AbortController().signal);
    const nextWord = (text) => text.slice(before.length).trimStart().split(/\s/, 1)[0];
    const best = new Map([[nextWord(sentence.text), null]]); // the best translation with each next word
    for (const { text } of answer.translations[0].sentences[0].candidates) {
      if (text.startsWith(before) && !best.has(nextWord(text))) best.set(nextWord(text), text);
    }
    const others = [...best.values()].filter(Boolean);
    byId("choices").replaceChildren(...others.map((text) => choice(number, text)));
    byId("alternatives").hidden = !others.length;
    show(others.length ? "" : "no alternatives");
    if (others.length) byId("choices").querySelector("button").focus();
  } catch (error) {
    show(error.message, true);
  }
}

function choice(number, text) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => choose(number, text));
  item.append(button);
  return item;
}

function choose(number, text) {
  const node = byId("output").querySelectorAll(":scope > span")[number];
  const words = text.split(/\s+/).filter(Boolean).map((word) => [word, null]);
  translated[number] = { source: translated[number].source, text, words, chosen: true };
  node.replaceWith(sentenceNode(translated[number], number));
  byId("alternatives").hidden = true;
  byId("output").focus();
}

// --- files --------------------------------------------------------------------------------------------------------

let job = null;

async function translateFile(file) {
  if (job) job.abort();
  const own = (job = new AbortController());
  const isTable = /\.tsv$/i.test(file.name);
  const lines = (await file.text()).replace(/\r\n?/g, "\n").replace(/\n$/, "").split("\n");
  const first = (line) => (isTable ? line.split("\t")[0] : line);
  const results = [];
  byId("download").hidden = true;
  byId("file-progress").hidden = byId("stop").hidden = false;
  const start = performance.now();
  try {
    while (results.length < lines.length) {
      const part = nextPart(lines, results.length, first);
      const answer = await askPatiently({ text: part.map(first), ...route() }, own.signal);
      results.push(...answer.translations.map((one, i) => (isTable ? `${part[i]}\t${one.text}` : one.text)));
      const fraction = results.length / lines.length;
      const left = (performance.now() - start) * (1 / fraction - 1);
      byId("progress").value = fraction;
      byId("file-state").textContent = `${results.length} of ${lines.length} lines, ${Math.ceil(left / 1000)} s left`;
    }
    offer(file.name, results);
    byId("file-state").textContent = `${lines.length} lines translated`;
  } catch (error) {
    byId("file-state").textContent = own.signal.aborted ? "stopped" : error.message;
  }
  byId("stop").hidden = true;
}

function nextPart(lines, start, textOf) {
  let end = start + 1;
  let size = textOf(lines[start]).length;
  while (end < lines.length && end - start < LINES_PER_REQUEST && (size += textOf(lines[end]).length) <= CHARACTERS_PER_REQUEST) end += 1;
  return lines.slice(start, end);
}

async function askPatiently(body, signal) {
  for (let expired = 0; ;) {
    try {
      return await ask("v1/translate", body, signal);
    } catch (error) {
      expired += error.status === 504;
      if (expired > TRIES || (error.status !== 429 && error.status !== 504)) throw error;
      await pause(error.retryAfter, signal);
    }
  }
}

function offer(name, lines) {
  const link = byId("download");
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/plain;charset=utf-8" }));
  link.download = name.replace(/(\.[^.]*)?$/, `.${byId("target").value}$1`);
  link.textContent = `Download ${link.download}`;
  link.hidden = false;
}

// --- page ---------------------------------------------------------------------------------------------------------

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
  byId("theme").textContent = dark ? "Light" : "Dark";
}

function connect() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  byId("direction").addEventListener("change", () => { updateDirections(); translateNow(); });
  byId("direction").addEventListener("submit", (event) => event.preventDefault());
  byId("swap").addEventListener("click", swap);
  byId("input").addEventListener("input", translateSoon);
  byId("clear").addEventListener("click", () => { byId("input").value = ""; translateSoon(); translateNow(); byId("input").focus(); });
  byId("copy").addEventListener("click", async () => { await navigator.clipboard.writeText(outputText()); show("copied"); });
  byId("confidence").addEventListener("change", (event) => byId("output").classList.toggle("shaded", event.target.checked));
  byId("output").addEventListener("click", (event) => { if (event.target.matches(".word")) showAlternatives(event.target); });
  for (const kind of ["mouseover", "focusin"]) {
    byId("output").addEventListener(kind, (event) => { if (event.target.matches(".word")) markSource(event.target); });
  }
  for (const kind of ["mouseout", "focusout"]) byId("output").addEventListener(kind, () => byId("marks").replaceChildren());
  byId("input").addEventListener("scroll", () => { byId("marks").scrollTop = byId("input").scrollTop; });
  byId("output").addEventListener("keydown", (event) => {
    if (event.target.matches(".word") && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); showAlternatives(event.target); }
  });
  byId("file").addEventListener("change", (event) => { if (event.target.files.length) translateFile(event.target.files[0]); });
  byId("stop").addEventListener("click", () => job.abort());
  byId("key").addEventListener("change", loadDirections);
}

async function loadDirections() {
  try {
    directions = (await ask("v1/directions", null)).models;
    updateDirections();
    show("");
    translateNow();
  } catch (error) {
    if (error.status === 401) byId("key-box").open = true;
    show(error.message, true);
  }
}

connect();
loadDirections();

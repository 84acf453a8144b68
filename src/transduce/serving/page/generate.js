// The page that continues a text: it uses POST /v1/completions and GET /v1/directions. Needs shared.js.
"use strict";

let running = null; // AbortController of the text that is being written
let before = []; // earlier states that Undo restores: {text, tokens}
let shownText = ""; // the text for which tokens are marked
let tokens = []; // the model's tokens, in order: {start, end, logProb}; logProb is null until the text is complete

// Yield the objects of a stream of server-sent events.
async function* events(response) {
  let text = "";
  for await (const part of parts(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
    const lines = (text + part).split("\n\n");
    text = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.slice("data: ".length));
  }
}

async function* parts(reader) { // not every browser can iterate over a stream
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

async function continueText() {
  const input = byId("input");
  const own = (running = new AbortController());
  const body = {
    model: byId("model").value, prompt: input.value, cut_prompt: true, stream: true, stream_options: { include_usage: true }, logprobs: 0,
    temperature: Number(byId("temperature").value), max_tokens: Number(byId("length").value),
    seed: byId("seed").value === "" ? null : Number(byId("seed").value),
  };
  before.push({ text: input.value, tokens });
  const begin = input.value.length;
  const known = tokens;
  setBusy(true);
  show("Writing ...");
  const start = performance.now();
  try {
    for await (const event of events(await send("v1/completions", body, own.signal))) {
      if (event.error) throw new Error(event.error.message);
      const [part] = event.choices;
      if (part) {
        input.value += part.text;
        tokens = [...known, ...(part.logprobs ? tokensOf(part.logprobs, begin) : [{ start: begin, end: input.value.length, logProb: null }])];
        drawMarks();
      } else show(`${event.usage.completion_tokens} tokens, ${Math.round(performance.now() - start)} ms`);
      input.scrollTop = input.scrollHeight;
    }
  } catch (error) {
    show(own.signal.aborted ? "Stopped." : error.message, !own.signal.aborted);
  }
  if (before.at(-1).text === input.value) before.pop();
  setBusy(false);
}

function tokensOf({ tokens: texts, token_logprobs: logProbs }, start) {
  return texts.map((text, i) => ({ start, end: (start += text.replace(/\r\n?/g, "\n").length), logProb: logProbs[i] }));
}

// Draw the layer behind the field, in which the model's tokens are marked.
function drawMarks() {
  const text = (shownText = byId("input").value);
  const nodes = tokens.flatMap(({ start, end }, i) => [text.slice(tokens[i - 1]?.end ?? 0, start), marked("mark", text.slice(start, end))]);
  byId("marks").replaceChildren(...nodes, text.slice(tokens.at(-1)?.end ?? 0));
  byId("marks").scrollTop = byId("input").scrollTop;
}

// Keep only the tokens before the first change of the text; later tokens no longer follow the model's context.
function keepTokens() {
  const text = byId("input").value;
  tokens = tokens.filter(({ end }) => text.slice(0, end) === shownText.slice(0, end));
  drawMarks();
}

function showToken(number) {
  byId("marks").querySelector(".on")?.classList.remove("on");
  if (number < 0 || tokens[number].logProb === null) return;
  const mark = byId("marks").querySelectorAll("mark")[number];
  mark.classList.add("on");
  const percent = 100 * Math.exp(tokens[number].logProb);
  byId("token").textContent = `${JSON.stringify(mark.textContent)}: probability ${percent < 10 ? percent.toPrecision(2) : Math.round(percent)} %`;
}

// Show the token under the pointer. The field covers the marks, so look for marks below it.
function showPointed({ clientX, clientY }) {
  const pointed = document.elementsFromPoint(clientX, clientY).find((one) => one.matches("#marks mark"));
  showToken([...byId("marks").querySelectorAll("mark")].indexOf(pointed));
}

function showAtCursor() {
  showToken(tokens.findIndex(({ start, end }) => start <= byId("input").selectionStart && byId("input").selectionStart < end));
}

function setBusy(isBusy) {
  byId("input").readOnly = isBusy;
  byId("input").setAttribute("aria-busy", String(isBusy));
  byId("continue").disabled = isBusy || !byId("model").value;
  byId("stop").disabled = !isBusy;
  byId("undo").disabled = isBusy || !before.length;
  if (!isBusy) byId("input").focus();
}

async function loadModels() {
  try {
    const { models, language_models } = await ask("v1/directions", null);
    byId("model").replaceChildren(...language_models.map((name) => new Option(name, name)));
    byId("models").hidden = language_models.length < 2;
    byId("translate-link").hidden = !models.length;
    show(language_models.length ? "" : "This service has no language models.");
  } catch (error) {
    show(error.message, true);
  }
  setBusy(false);
}

byId("card").addEventListener("submit", (event) => { event.preventDefault(); continueText(); });
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !byId("continue").disabled) byId("card").requestSubmit(byId("continue"));
});
byId("stop").addEventListener("click", () => running.abort());
byId("undo").addEventListener("click", () => {
  ({ text: byId("input").value, tokens } = before.pop());
  drawMarks();
  setBusy(false);
});
byId("input").addEventListener("input", keepTokens);
byId("input").addEventListener("scroll", () => { byId("marks").scrollTop = byId("input").scrollTop; });
byId("input").addEventListener("mousemove", showPointed);
document.addEventListener("selectionchange", showAtCursor);
byId("key").addEventListener("change", loadModels);
loadModels();

// The page that continues a text: it uses POST /v1/completions and GET /v1/directions. Needs shared.js.
"use strict";

let running = null; // AbortController of the text that is being written
let before = []; // texts that Undo brings back

// The objects of a stream of server-sent events.
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
    model: byId("model").value, prompt: input.value, cut_prompt: true, stream: true, stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value), max_tokens: Number(byId("length").value),
    seed: byId("seed").value === "" ? null : Number(byId("seed").value),
  };
  before.push(input.value);
  setBusy(true);
  show("Writing ...");
  const start = performance.now();
  try {
    for await (const event of events(await send("v1/completions", body, own.signal))) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices.length) input.value += event.choices[0].text;
      else show(`${event.usage.completion_tokens} tokens, ${Math.round(performance.now() - start)} ms`);
      input.scrollTop = input.scrollHeight;
    }
  } catch (error) {
    show(own.signal.aborted ? "Stopped." : error.message, !own.signal.aborted);
  }
  if (before.at(-1) === input.value) before.pop();
  setBusy(false);
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

byId("options").addEventListener("submit", (event) => { event.preventDefault(); continueText(); });
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !byId("continue").disabled) byId("options").requestSubmit(byId("continue"));
});
byId("stop").addEventListener("click", () => running.abort());
byId("undo").addEventListener("click", () => { byId("input").value = before.pop(); setBusy(false); });
byId("key").addEventListener("change", loadModels);
loadModels();

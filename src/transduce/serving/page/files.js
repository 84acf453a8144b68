// Translation of files: .txt, a sentence per line, and .tsv, whose first column is translated. Needs app.js.
"use strict";

let job = null;

async function translateFile(file) {
  job?.abort();
  const own = (job = new AbortController());
  const report = (message) => { if (job === own) byId("file-state").textContent = message; };
  const isTable = /\.tsv$/i.test(file.name);
  const results = [];
  byId("download").hidden = true;
  byId("files").hidden = byId("stop").hidden = false;
  byId("progress").value = 0;
  report("Reading ...");
  const began = performance.now();
  try {
    const lines = (await readText(file)).replace(/\r\n?/g, "\n").replace(/\n$/, "").split("\n");
    const texts = isTable ? lines.map((line) => line.split("\t", 1)[0]) : lines;
    await translateLines(texts, route(), own.signal, (answers, end) => {
      for (const { text } of answers) results.push(isTable ? `${lines[results.length]}\t${text}` : text);
      const left = (performance.now() - began) * (texts.length / end - 1);
      byId("progress").value = end / texts.length;
      report(`${end} of ${texts.length} lines, ${Math.ceil(left / 1000)} s left`);
    }, report);
    offer(file.name, results);
    report(`${results.length} of ${texts.length} lines translated`);
  } catch (error) {
    report(own.signal.aborted ? "Stopped." : error.message);
  }
  if (job === own) byId("stop").hidden = true;
}

async function readText(file) {
  const content = await file.arrayBuffer();
  if (!content.byteLength) throw new Error(`${file.name} is empty`);
  try { return new TextDecoder("utf-8", { fatal: true }).decode(content); } catch { throw new Error(`${file.name} is not UTF-8 text; save it as UTF-8`); }
}

function offer(name, lines) {
  const link = byId("download");
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/plain;charset=utf-8" }));
  link.download = name.replace(/(\.[^.]*)?$/, `.${byId("target").value}$1`);
  link.textContent = `Download ${link.download}`;
  link.hidden = false;
}

byId("file").addEventListener("click", ({ target }) => { target.value = ""; }); // the same file may be chosen again
byId("file").addEventListener("change", ({ target }) => { if (target.files.length) translateFile(target.files[0]); });
byId("stop").addEventListener("click", () => job.abort());

// A file that is dropped anywhere is translated; the field shows it while it is dragged.
for (const kind of ["dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("field").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") translateFile(event.dataTransfer.files[0]);
  });
}

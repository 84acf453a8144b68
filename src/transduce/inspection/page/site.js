// modules: record.js compute.js pieces.js search.js site.js
// The answers of a page without a server: records as `transduce inspect` makes them, computed here.
import { BOS, EOS, page, UNK } from "./record.js";
import { logits, logSoftmax, newRun, norm, openModel, readSource, readTarget } from "./compute.js";
import { openVocabulary, sideOf } from "./pieces.js";
import { beamSearch, largestOf, idsOf } from "./search.js";

const NEVER = [0, UNK, BOS];
const PLACEHOLDERS = [4, 5, 6, 7, 8, 9, 10, 11];
const GUESSES = 5; // predictions of each layer
const LEAST = { alignment: 0.6, broad: 0.8 }; // scores that labels of heads need; 0.4 for the others
const STEP = 1e-4; // of the embedded token, for its directional derivative

const isTranslator = ({ model }) => model.n_layers.encoder !== undefined;
const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
const array = (shape, data) => ({ shape, data });

// --- reading a sentence ---------------------------------------------------------------------------------------------

function checked(site, ids, name) {
  const most = site.longest;
  if (ids.length > most)
    throw new Error(`${name}: ${ids.length} tokens; at most ${most} can be shown; give a shorter text`);
  return ids;
}

// The text that the model reads: without spaces at its edges. A text without letters and digits is unchanged.
function readable(site, text) {
  return site.src.data.keeps_spaces || !/[\p{L}\p{N}]/u.test(text) ? text : text.trim();
}

// A sentence: inputs, the tokens to predict, its sides and the search, under a model without the parts of `off`.
function read(site, { text, target, prefix, off, beam, length_penalty: penalty }) {
  const { model, src, tgt } = site;
  if (!isTranslator(site)) {
    const ids = checked(site, tgt.encode(text).ids, "text");
    if (!ids.length) throw new Error("the text is empty; give at least one word");
    const sides = {
      tgt_in: sideOf(tgt, [BOS, ...ids.slice(0, -1)], tgt.decode(ids.slice(0, -1))),
      tgt_out: sideOf(tgt, ids, text),
    };
    return { inputs: [[BOS, ...ids.slice(0, -1)]], targets: ids, sides, search: null };
  }
  const source = readable(site, text);
  const ids = [...checked(site, src.encode(source).ids, "source"), EOS];
  const run = newRun(model, off);
  const options = {
    beam: beam ?? site.decoding.beam,
    length_penalty: penalty ?? site.decoding.length_penalty,
    no_repeat_ngram: site.decoding.no_repeat_ngram,
    limit: Math.max(Math.min(site.decoding.max_length, 2 * (ids.length - 1) + 16, site.longest), prefix.length + 1),
    prefix,
    banned: tgt.data.has_placeholders ? [...NEVER, ...PLACEHOLDERS] : NEVER,
  };
  const search = { ...beamSearch(run, readSource(run, ids), options), options };
  const given = target === null ? null : checked(site, tgt.encode(target).ids, "translation");
  const best = given ?? (search.results.length ? tokensOf(search.results[0]) : []);
  const written = target ?? tgt.decode(best);
  const [tgtIn, tgtOut] = [
    [BOS, ...best],
    [...best, EOS],
  ];
  const sides = {
    src: sideOf(src, ids, source),
    tgt_in: sideOf(tgt, tgtIn, written),
    tgt_out: sideOf(tgt, tgtOut, written),
  };
  return { inputs: [ids, tgtIn], targets: tgtOut, sides, search };
}

const tokensOf = ({ node, isEnded }) => (isEnded ? idsOf(node).slice(0, -1) : idsOf(node));

// The last hidden states of a sentence.
function hiddenOf(site, run, inputs) {
  const memory = isTranslator(site) ? readSource(run, inputs[0]) : null;
  return readTarget(run, inputs.at(-1), memory);
}

// Log-probabilities of a sentence's predictions.
function predictions({ model }, hidden, targets) {
  return logSoftmax(logits(model, hidden), targets.length).map((row, t) => row[targets[t]]);
}

const logProbOf = (site, off, { inputs, targets }) =>
  sum(predictions(site, hiddenOf(site, newRun(site.model, off), inputs), targets));

// --- views ----------------------------------------------------------------------------------------------------------

const topOf = ({ tgt }, pairs) => pairs.map(([id, p]) => [tgt.pieces[id], id, p]);

function stepsOf(site, search) {
  if (!search) return null;
  const { steps, top, results, options } = search;
  const nodeOf = ({ id, parentNode, token_id, log_prob, fate, top: best }) => {
    const token = site.tgt.pieces[token_id];
    return { id, parent: parentNode.id, token, token_id, log_prob, fate, top: topOf(site, best) };
  };
  return {
    beam: options.beam,
    length_penalty: options.length_penalty,
    top: topOf(site, top),
    steps: steps.map((step) => ({ live: step.map(nodeOf) })),
    results: results.map((one) => ({
      id: one.node.id,
      text: site.tgt.decode(tokensOf(one)),
      log_prob: one.node.log_prob,
      length: one.length,
      score: one.score,
    })),
  };
}

function tokensView(site, rows, ids) {
  return rows.map((row, t) => ({
    token: site.tgt.pieces[ids[t]],
    id: ids[t],
    probability: Math.exp(row[ids[t]]),
    rank: row.filter((p) => p > row[ids[t]]).length + 1,
    top: topOf(
      site,
      largestOf(row, 3).map((id) => [id, Math.exp(row[id])]),
    ),
  }));
}

// The predictions of each layer, computed when they are drawn, and how much each sub-layer changes the stream.
function lensView(site, run, template, targets) {
  const { model, tgt } = site;
  const titles = template.changes.map((one) => one.title);
  const numbers = Array.from({ length: model.n_layers.decoder }, (_, layer) => layer);
  const sublayers = numbers.flatMap((layer) =>
    ["self_attention", "cross_attention", "feed_forward"].map((name) => `decoder.blocks.${layer}.${name}`),
  );
  const changes = sublayers
    .filter((name) => run.values.has(name))
    .map((name, i) => {
      const before = norms(run.values.get(`${name}_residual.input`));
      const shares = norms(run.values.get(name)).map((x, t) => x / before[t]);
      return { title: titles[i], values: array([targets.length], shares) };
    });
  const layerOf = (name, i) => {
    const stream = run.values.get(name).data;
    const rows = logSoftmax(logits(model, norm(model, "decoder.norm", stream)), targets.length);
    const top = rows.map((row) => largestOf(row, GUESSES).map((id) => [tgt.pieces[id], Math.exp(row[id])]));
    const known = Float64Array.from(rows, (row, t) => Math.exp(row[targets[t]]));
    return { title: template.layers[i].title, top, probability: array([targets.length], known) };
  };
  const names = ["decoder.blocks.0.input", ...numbers.map((layer) => `decoder.blocks.${layer}`)];
  let layers = null;
  return {
    ...template,
    changes,
    get layers() {
      return (layers ??= names.map(layerOf));
    },
  };
}

const norms = ({ shape: [n, width], data }) =>
  Float64Array.from({ length: n }, (_, t) => Math.hypot(...data.subarray(t * width, (t + 1) * width)));

// The positional schemes that are not switched off, for the lengths of this sentence.
function positionsView({ model }, template, off, sides) {
  return template.flatMap((one) => {
    const embedding = model.embeddings[one.stack];
    if (off.includes(`${embedding}.positions`)) return [];
    const n = sides[one.side].tokens.length;
    const vectors = model.weights[`${embedding}.positions`];
    const table = vectors
      ? array([n, model.d_model], vectors.data.subarray(0, n * model.d_model))
      : rotations(model, n);
    return [{ ...one, table, dots: array([n, n], products(table)) }];
  });
}

// A vector of ones after the rotation of each position.
function rotations({ d_key: size }, n) {
  const data = Float64Array.from({ length: n * size }, (_, i) => {
    const [plane, isFirst] = [i % (size / 2), i % size < size / 2];
    const angle = Math.floor(i / size) * 10000 ** ((-2 * plane) / size);
    return Math.cos(angle) + (isFirst ? -1 : 1) * Math.sin(angle);
  });
  return array([n, size], data);
}

function products({ shape: [n, width], data }) {
  return Float64Array.from({ length: n * n }, (_, cell) => {
    const [i, j] = [Math.floor(cell / n) * width, (cell % n) * width];
    return sum(Array.from({ length: width }, (__, k) => data[i + k] * data[j + k]));
  });
}

// The masks of the attentions that have one.
function masksView(run, template, sides) {
  const isCausal = ({ title }) => title.startsWith("decoder self");
  const has = (one) => !isCausal(one) || run.values.has("decoder.blocks.0.self_attention.bias");
  return template.filter(has).map((one) => {
    const [rows, columns] = [sides[one.rows].tokens.length, sides[one.columns].tokens.length];
    const sees = (cell) => Number(!isCausal(one) || cell % columns <= Math.floor(cell / columns));
    return {
      ...one,
      mask: array(
        [rows, columns],
        Float64Array.from({ length: rows * columns }, (_, cell) => sees(cell)),
      ),
    };
  });
}

// --- heads ----------------------------------------------------------------------------------------------------------

// The label of a head by the rules of the page, as `label_head`.
function labelOf(weights, rows, tokens, isCross) {
  const columns = tokens.length;
  const at = (i, j) => weights[i * columns + j];
  const shares = {};
  const offsets = isCross ? {} : { "previous token": -1, "next token": 1, "same token": 0 };
  const lines = Array.from({ length: rows }, (_, i) => i);
  for (const [name, offset] of Object.entries(offsets)) {
    shares[name] = sum(lines.map((i) => (i + offset >= 0 && i + offset < columns ? at(i, i + offset) : 0))) / rows;
  }
  const received = tokens.map((_, j) => sum(lines.map((i) => at(i, j))) / rows);
  const separators = tokens.map((token) => token.startsWith("<") || !/[\p{L}\p{N}]/u.test(token));
  shares.separator = sum(received.filter((_, j) => separators[j]));
  const scores = { ...shares, broad: breadthOf(weights, rows, columns) };
  if (isCross) scores.alignment = sum(lines.map((i) => Math.max(...tokens.map((_, j) => at(i, j))))) / rows;
  const margin = (name) => scores[name] - (LEAST[name] ?? 0.4);
  const fitting = Object.keys(scores).filter((name) => margin(name) >= 0);
  const label = fitting.length ? fitting.reduce((a, b) => (margin(b) > margin(a) ? b : a)) : "mixed";
  const most = received.indexOf(Math.max(...received));
  if (!separators[most]) shares[`“${tokens[most]}”`] = received[most];
  const largest = Object.entries(shares).sort((a, b) => b[1] - a[1]);
  return { label, score: scores[label] ?? null, shares: largest.slice(0, 2) };
}

// The mean entropy of the rows relative to even weights. Rows with one key do not count.
function breadthOf(weights, rows, columns) {
  const shares = [];
  for (let i = 0; i < rows; i++) {
    const row = [...weights.subarray(i * columns, (i + 1) * columns)].filter((x) => x > 0);
    if (row.length > 1) shares.push(-sum(row.map((x) => x * Math.log(Math.max(x, 1e-12)))) / Math.log(row.length));
  }
  return shares.length ? sum(shares) / shares.length : 0;
}

function attentionView(run, template, sides) {
  return template.map((one) => {
    const weights = run.values.get(`${one.name}.weights`);
    const [heads, rows, columns] = weights.shape;
    const tokens = { row_tokens: sides[one.rows].tokens, column_tokens: sides[one.columns].tokens };
    const labels = Array.from({ length: heads }, (_, h) =>
      labelOf(
        weights.data.subarray(h * rows * columns, (h + 1) * rows * columns),
        rows,
        tokens.column_tokens,
        one.kind === "cross",
      ),
    );
    return { ...one, ...tokens, weights, labels };
  });
}

// --- parts ----------------------------------------------------------------------------------------------------------

// The outputs to show: the best of each position, and the expected ones.
const nBest = (rows) => Math.min(rows[0].length, Math.max(3, Math.floor(24 / rows.length)));

function candidatesOf(rows, targets) {
  const n = nBest(rows);
  return [...new Set(rows.flatMap((row, t) => [...largestOf(row, n), targets[t]]))];
}

function keepOutput(run, hidden, scores, rows, candidates) {
  const [n, width] = [rows.length, run.model.d_model];
  const chosen = (value) =>
    array([n, candidates.length], Float64Array.from(rows.flatMap((_, t) => candidates.map((id) => value(t, id)))));
  run.values.set("logits.input", array([n, width], hidden));
  run.values.set(
    "logits",
    chosen((t, id) => scores[t * rows[0].length + id]),
  );
  run.values.set(
    "logits.probabilities",
    chosen((t, id) => Math.exp(rows[t][id])),
  );
}

function partsOf(run, template, candidates, rows) {
  return template.map((part) => {
    const known = part.values.filter((value) => run.values.has(value.name));
    const recorded = known.map((value) => run.values.get(value.name));
    const shape = part.kind === "logits" ? [rows.length, rows[0].length] : recorded.at(-1).shape;
    const text = part.text.replace(/(?<=Shown are the )\d+/, nBest(rows));
    const values = known.map((value, i) => new RecordedValue(run, value, recorded[i], candidates));
    return { ...part, text, shape, values };
  });
}

// A value of a part. Its product is checked and made when it is first asked for.
class RecordedValue {
  #run;
  #how;
  #candidates;
  #product;

  constructor(run, { how, ...value }, data, candidates) {
    const softmax = value.softmax.filter((name) => run.values.has(name));
    Object.assign(this, value, { shape: data.shape, data, softmax });
    [this.#run, this.#how, this.#candidates] = [run, how, candidates];
  }

  get is_product() {
    return this.product !== null;
  }

  get product() {
    this.#product ??= this.#how ? [this.#formula()] : [null];
    return this.#product[0];
  }

  // {left, right, scale, transposed, weight, bias}; null if the value is not this product.
  #formula() {
    const how = this.#how;
    const left = this.#run.values.get(how.left);
    const product = {
      left: how.left,
      right: how.right,
      transposed: how.transposed,
      scale: how.scaled ? left.shape.at(-1) ** -0.5 : 1,
    };
    if (how.weight) Object.assign(product, this.#weightRows(how.weight));
    return this.#isEqual(left, product) ? product : null;
  }

  // Rows of a weight matrix and their bias, for each head if the value has heads.
  #weightRows({ name, first, count }) {
    const { columns, data } = this.#run.model.weights[name];
    const biases = this.#run.model.weights[name.replace(/weight$/, "bias")]?.data;
    if (this.name === "logits") {
      const rows = this.#candidates.flatMap((id) => [...data.subarray(id * columns, (id + 1) * columns)]);
      return {
        weight: array([this.#candidates.length, columns], Float64Array.from(rows)),
        bias: biases
          ? array(
              [this.#candidates.length],
              this.#candidates.map((id) => biases[id]),
            )
          : null,
      };
    }
    const weight = data.subarray(first * columns, (first + count) * columns);
    const bias = biases?.subarray(first, first + count);
    if (this.shape.length < 3)
      return { weight: array([count, columns], weight), bias: bias ? array([count], bias) : null };
    const [heads, , width] = this.shape;
    const repeated = (rows, size) =>
      Float64Array.from(
        { length: heads * size },
        (_, i) => rows[Math.floor((Math.floor(i / size) * (count / width)) / heads) * size + (i % size)],
      );
    return {
      weight: array([heads, width, columns], repeated(weight, width * columns)),
      bias: bias ? array([heads, width], repeated(bias, width)) : null,
    };
  }

  #isEqual(left, { right, transposed, scale, weight, bias }) {
    const other = weight ?? this.#run.values.get(right);
    const [rows, columns] = this.shape.slice(-2);
    const width = left.shape.at(-1);
    for (let i = 0; i < this.data.data.length; i++) {
      const [row, column] = [Math.floor(i / columns) % rows, i % columns];
      const head = Math.floor(i / (rows * columns));
      const a = ((left.shape.length > 2 ? head * rows : 0) + row) * width;
      const b = other.shape.length > 2 ? head * other.shape[1] * other.shape[2] : 0;
      let total = 0;
      for (let k = 0; k < width; k++) {
        total += left.data[a + k] * other.data[b + (transposed ? column * width + k : k * columns + column)];
      }
      const result = scale * total + (bias ? bias.data[(bias.shape.length > 1 ? head * columns : 0) + column] : 0);
      if (!(Math.abs(result - this.data.data[i]) <= 1e-4 + 1e-4 * Math.abs(this.data.data[i]))) return false;
    }
    return true;
  }
}

// --- the record -----------------------------------------------------------------------------------------------------

function recordOf(site, asked, sentence) {
  const { template, model } = site;
  const { off } = asked;
  const run = newRun(model, off, { isRecorded: true });
  const hidden = hiddenOf(site, run, sentence.inputs);
  const scores = logits(model, hidden);
  const rows = logSoftmax(scores, sentence.targets.length);
  const candidates = candidatesOf(rows, sentence.targets);
  keepOutput(run, hidden, scores, rows, candidates);
  const tokens = candidates.map((id) => site.tgt.pieces[id]);
  const sides = {
    ...sentence.sides,
    candidates: { text: "", tokens, words: tokens.map((_, i) => i), word_texts: tokens },
  };
  const positions = positionsView(site, template.positions, off, sides);
  const reason = positions.length ? {} : { positions: "This model adds no positions to its embeddings or scores." };
  return {
    ...template,
    off,
    original: off.length ? originalOf(site, asked) : null,
    sides,
    attention: attentionView(run, template.attention, sides),
    positions,
    masks: masksView(run, template.masks, sides),
    tokens: tokensView(site, rows, sentence.targets),
    lens: lensView(site, run, template.lens, sentence.targets),
    steps: stepsOf(site, sentence.search),
    absent: { ...template.absent, ...reason },
    parts: partsOf(run, template.parts, candidates, rows),
  };
}

function originalOf(site, asked) {
  const sentence = read(site, { ...asked, off: [] });
  return { text: sentence.sides.tgt_out.text, log_prob: logProbOf(site, [], sentence) };
}

// --- slow views -----------------------------------------------------------------------------------------------------

// The output without each group of parts.
function withoutView(site, asked, sentence) {
  const rows = [];
  for (const { group, title, off } of site.groups) {
    const output = isTranslator(site) ? read(site, { ...asked, target: null, off }) : sentence;
    rows.push({ group, title, off, text: output.sides.tgt_out.text, log_prob: logProbOf(site, off, sentence) });
  }
  return rows;
}

// For each prediction and input token: gradient x input, which is the derivative of the log-probability in the direction
// of the embedded token, by a central difference; and the loss of log-probability without the word.
function saliencyView(site, { off }, { inputs, targets, sides }) {
  const { model } = site;
  const [first, last] = site.saliency;
  const side = first.columns;
  const [n, nRows] = [sides[side].tokens.length, targets.length];
  const stack = side === "src" ? "encoder" : "decoder";
  const gradients = outputGradients(site, hiddenOf(site, newRun(model, off), inputs), targets);
  const changed = (token, factor) => {
    const scaled = (x, width) =>
      x.subarray(token * width, (token + 1) * width).forEach((v, i) => (x[token * width + i] = v * factor));
    return hiddenOf(site, newRun(model, off, { change: { [model.embeddings[stack]]: scaled } }), inputs);
  };
  const gradient = new Float64Array(nRows * n);
  for (let token = 0; token < n; token++) {
    const [more, less] = [changed(token, 1 + STEP), changed(token, 1 - STEP)];
    more.forEach(
      (x, i) => (gradient[Math.floor(i / model.d_model) * n + token] += (gradients[i] * (x - less[i])) / (2 * STEP)),
    );
  }
  const views = [{ ...first, values: array([nRows, n], gradient) }];
  if (!last) return views;
  const known = predictions(site, hiddenOf(site, newRun(model, off), inputs), targets);
  const lost = new Float64Array(nRows * n);
  const { words } = sides[side];
  for (const word of new Set(words)) {
    const kept = inputs[0].filter((_, i) => words[i] !== word);
    if (!kept.length) continue;
    const without = predictions(site, hiddenOf(site, newRun(model, off), [kept, inputs[1]]), targets);
    words.forEach((owner, i) => owner === word && known.forEach((p, t) => (lost[t * n + i] = p - without[t])));
  }
  return [...views, { ...last, values: array([nRows, n], lost) }];
}

// The gradient of each target's log-probability with respect to its hidden state.
function outputGradients({ model }, hidden, targets) {
  const { columns: width, data } = model.weights["output.weight"];
  const gradients = new Float64Array(hidden.length);
  logSoftmax(logits(model, hidden), targets.length).forEach((row, t) => {
    row.forEach((p, id) => {
      const factor = (id === targets[t]) - Math.exp(p);
      for (let k = 0; k < width; k++) gradients[t * width + k] += factor * data[id * width + k];
    });
  });
  return gradients;
}

// --- requests -------------------------------------------------------------------------------------------------------

const SLOW = { without: withoutView, saliency: saliencyView }; // a worker computes them

function openModelAndVocabularies({ model, tokenizers, ...rest }) {
  const [src, tgt] = tokenizers.map(openVocabulary);
  return { ...rest, model: openModel(model), src, tgt: tgt ?? src };
}

// The function that answers the requests of the page, from the data inside it.
function openSite(data) {
  const site = openModelAndVocabularies(data);
  let last = {}; // the sentence and the record of the last request, for its slow views
  return async (path, body, signal) => {
    await new Promise((resume) => setTimeout(resume));
    signal?.throwIfAborted();
    if (path === "/inspect/models") return site.models;
    const { views = [], values, head, ...asked } = body;
    const key = JSON.stringify(asked);
    if (last.key !== key) {
      const sentence = read(site, asked);
      last = { key, sentence, record: recordOf(site, asked, sentence) };
    }
    const { sentence, record } = last;
    if (!views.length) return { ...record };
    const request = { data, asked, sentence: { ...sentence, search: null }, views: views.filter((name) => SLOW[name]) };
    const slow = request.views.length ? await askWorker(request, signal) : {};
    return Object.fromEntries(views.map((name) => [name, slow[name] ?? record[name]]));
  };
}

// Slow views of a sentence, from a worker that runs this script and ends with its answer or when it is given up.
function askWorker(request, signal) {
  const script = document.getElementById("computing").textContent;
  const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const worker = new Worker(address);
  return new Promise((resolve, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason));
    worker.onerror = ({ message }) => reject(new Error(message || "The browser starts no worker."));
    worker.onmessage = ({ data }) => resolve(data);
    worker.postMessage(request);
  }).finally(() => {
    worker.terminate();
    URL.revokeObjectURL(address);
  });
}

function answerRequest({ data: { data, asked, sentence, views } }) {
  const site = openModelAndVocabularies(data);
  postMessage(Object.fromEntries(views.map((name) => [name, SLOW[name](site, asked, sentence)])));
}

if (globalThis.document) page.ask = openSite(JSON.parse(document.getElementById("site").textContent));
else globalThis.onmessage = answerRequest;

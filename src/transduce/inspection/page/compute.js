// The model of a page without a server: weights of 8 bits, and the forward pass of Transformers, with recorded values.
import { bytesOf } from "./record.js";

// --- weights ------------------------------------------------------------------------------------------------------

// A weight as {rows, columns, data}; the numbers of a row share a scale.
function unpackWeight({ shape, data, scales }) {
  const [rows, columns] = shape.length > 1 ? shape : [1, shape[0]];
  const numbers = bytesOf(data).buffer;
  if (!scales) return { rows, columns, data: new Float32Array(numbers) };
  const [levels, scale] = [new Int8Array(numbers), new Float32Array(bytesOf(scales).buffer)];
  const values = new Float32Array(levels.length);
  for (let row = 0, i = 0; row < rows; row++) for (let k = 0; k < columns; k++, i++) values[i] = levels[i] * scale[row];
  return { rows, columns, data: values };
}

export function openModel({ weights, aliases, ...settings }) {
  const unpacked = Object.fromEntries(Object.entries(weights).map(([name, one]) => [name, unpackWeight(one)]));
  for (const [alias, name] of Object.entries(aliases)) unpacked[alias] = unpacked[name];
  return { ...settings, weights: unpacked };
}

// --- layers, of n rows one after another in an array -----------------------------------------------------------------

// x Wᵀ + b, four rows and two columns at a time: each number that is read is used several times.
export function linear(model, name, x) {
  const { rows, columns, data } = model.weights[`${name}.weight`];
  const bias = model.weights[`${name}.bias`]?.data;
  const n = x.length / columns;
  const y = new Float64Array(n * rows);
  for (let first = 0; first < n; first += 4) {
    const at = [0, 1, 2, 3].map((i) => Math.min(first + i, n - 1));
    const [x0, x1, x2, x3] = at.map((t) => t * columns);
    const [y0, y1, y2, y3] = at.map((t) => t * rows);
    for (let o = 0; o < rows; o += 2) {
      const p = Math.min(o + 1, rows - 1);
      const v = o * columns;
      const w = p * columns;
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0, t0 = 0, t1 = 0, t2 = 0, t3 = 0;
      for (let k = 0; k < columns; k++) {
        const a = data[v + k];
        const b = data[w + k];
        s0 += a * x[x0 + k];
        s1 += a * x[x1 + k];
        s2 += a * x[x2 + k];
        s3 += a * x[x3 + k];
        t0 += b * x[x0 + k];
        t1 += b * x[x1 + k];
        t2 += b * x[x2 + k];
        t3 += b * x[x3 + k];
      }
      const b0 = bias ? bias[o] : 0;
      const b1 = bias ? bias[p] : 0;
      y[y0 + o] = s0 + b0;
      y[y1 + o] = s1 + b0;
      y[y2 + o] = s2 + b0;
      y[y3 + o] = s3 + b0;
      y[y0 + p] = t0 + b1;
      y[y1 + p] = t1 + b1;
      y[y2 + p] = t2 + b1;
      y[y3 + p] = t3 + b1;
    }
  }
  return y;
}

// Layer or RMS norm; a model may have none here.
export function norm(model, name, x) {
  const weight = model.weights[`${name}.weight`]?.data;
  if (!weight) return x;
  const bias = model.weights[`${name}.bias`]?.data;
  const width = weight.length;
  const y = new Float64Array(x.length);
  for (let start = 0; start < x.length; start += width) {
    const row = x.subarray(start, start + width);
    const mean = model.norm === "layer" ? row.reduce((sum, v) => sum + v, 0) / width : 0;
    const variance = row.reduce((sum, v) => sum + (v - mean) ** 2, 0) / width;
    const factor = 1 / Math.sqrt(variance + model.epsilon);
    row.forEach((v, i) => (y[start + i] = (v - mean) * factor * weight[i] + (bias ? bias[i] : 0)));
  }
  return y;
}

// The error function, by its series, or by the continued fraction of its complement.
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size < 3) {
    let [term, sum] = [x, x];
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += (term *= (-x * x) / n) / (2 * n + 1);
    return (2 / Math.sqrt(Math.PI)) * sum;
  }
  let fraction = size;
  for (let n = 40; n > 0; n--) fraction = size + n / 2 / fraction;
  return Math.sign(x) * (1 - Math.exp(-x * x) / (fraction * Math.sqrt(Math.PI)));
}

const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x / (1 + Math.exp(-x)),
};

const added = (x, y) => x.map((v, i) => v + y[i]);

// --- a run of the model -------------------------------------------------------------------------------------------

// off: names of parts that are switched off. values: Map of recorded values {shape, data} by name, or null.
// change: a function of the embedded tokens of a side, by name.
export const newRun = (model, off = [], { isRecorded = false, change = {} } = {}) => ({
  model,
  off: new Set(off),
  values: isRecorded ? new Map() : null,
  change,
});

function keep({ values }, name, data, width) {
  values?.set(name, { shape: [data.length / width, width], data });
}

// Embedded tokens at positions from `offset` on; `isEach`: all rows are at that position.
function embed(run, name, ids, offset = 0, isEach = false) {
  const { model } = run;
  const { columns: width, data } = model.weights[`${name}.table.weight`];
  const vectors = run.off.has(`${name}.positions`) ? null : model.weights[`${name}.positions`]?.data;
  const table = new Float64Array(ids.length * width);
  ids.forEach((id, t) => {
    const own = model.one_end && name !== "src_embedding" && id === 2 ? 3 : id;
    table.set(data.subarray(own * width, (own + 1) * width), t * width);
  });
  const place = (i) => (isEach ? offset * width + (i % width) : offset * width + i);
  const x = norm(
    model,
    `${name}.norm`,
    table.map((v, i) => v * model.scale + (vectors ? vectors[place(i)] : 0)),
  );
  keep(run, `${name}.table`, table, width);
  run.change[name]?.(x, width);
  keep(run, name, x, width);
  return x;
}

// Rotate queries or keys of n rows at their positions, in place (Su et al. 2021).
function rotate(run, stack, x, n, offset, isEach) {
  const { model } = run;
  if (model.positions !== "rotary" || run.off.has(`${model.embeddings[stack]}.positions`)) return;
  const [width, size] = [x.length / n, model.d_key];
  for (let i = 0; i < x.length; i++) {
    const plane = i % size;
    if (plane >= size / 2) continue;
    const position = offset + (isEach ? 0 : Math.floor(i / width));
    const angle = position * 10000 ** ((-2 * plane) / size);
    const [first, second] = [x[i], x[i + size / 2]];
    x[i] = first * Math.cos(angle) - second * Math.sin(angle);
    x[i + size / 2] = second * Math.cos(angle) + first * Math.sin(angle);
  }
}

// Columns of n rows.
function columnsOf(x, n, first, end) {
  const width = x.length / n;
  const part = new Float64Array(n * (end - first));
  for (let t = 0; t < n; t++) part.set(x.subarray(t * width + first, t * width + end), t * (end - first));
  return part;
}

const rowsOf = (x, n) => Array.from({ length: n }, (_, t) => x.subarray((t * x.length) / n, ((t + 1) * x.length) / n));

// By head: from rows of heads side by side to an array [head, row, width]; heads may share groups.
function byHead(rows, nHeads, width) {
  const groups = rows[0].length / width;
  const data = new Float64Array(nHeads * rows.length * width);
  for (let h = 0; h < nHeads; h++) {
    const group = Math.floor((h * groups) / nHeads);
    rows.forEach((row, t) => data.set(row.subarray(group * width, (group + 1) * width), (h * rows.length + t) * width));
  }
  return { shape: [nHeads, rows.length, width], data };
}

// Attention of n queries, and the output projection. Query t reads the keys and values of `caches[t]` that it
// sees; without a function `sees`, all.
function attend(run, name, queries, n, caches, sees) {
  const { model, values, off } = run;
  const { n_heads: nHeads, n_kv_heads: nGroups, d_key: dKey, d_value: dValue } = model;
  const merged = new Float64Array(n * nHeads * dValue);
  const nKeys = caches[0].keys.length;
  const shape = [nHeads, n, nKeys];
  const [scores, bias, weights] = [0, 1, 2].map(() => (values ? new Float64Array(nHeads * n * nKeys) : null));
  for (let t = 0; t < n; t++) {
    const { keys, values: read } = caches[t];
    const powers = new Float64Array(keys.length);
    for (let h = 0; h < nHeads; h++) {
      const [group, q, place] = [Math.floor((h * nGroups) / nHeads), (t * nHeads + h) * dKey, (h * n + t) * nKeys];
      let most = -Infinity;
      for (let j = 0; j < keys.length; j++) {
        const key = keys[j];
        let score = 0;
        for (let k = 0; k < dKey; k++) score += queries[q + k] * key[group * dKey + k];
        score /= Math.sqrt(dKey);
        const seen = !sees || sees(t, j);
        if (values) {
          scores[place + j] = score;
          if (!seen) bias[place + j] = -Infinity;
        }
        powers[j] = seen ? score : -Infinity;
        most = Math.max(most, powers[j]);
      }
      const sum = powers.reduce((total, score, j) => total + (powers[j] = Math.exp(score - most)), 0);
      const out = (t * nHeads + h) * dValue;
      for (let j = 0; j < keys.length; j++) {
        const weight = powers[j] / sum;
        if (values) weights[place + j] = weight;
        if (off.has(`${name}.heads.${h}`)) continue;
        const value = read[j];
        for (let k = 0; k < dValue; k++) merged[out + k] += weight * value[group * dValue + k];
      }
    }
  }
  const output = linear(model, `${name}.output`, merged);
  if (values) {
    values.set(`${name}.query`, byHead(rowsOf(queries, n), nHeads, dKey));
    values.set(`${name}.key`, byHead(caches[0].keys, nHeads, dKey));
    values.set(`${name}.value`, byHead(caches[0].values, nHeads, dValue));
    values.set(`${name}.scores`, { shape, data: scores });
    if (sees) values.set(`${name}.bias`, { shape, data: bias });
    values.set(`${name}.weights`, { shape, data: weights });
    values.set(`${name}.heads`, byHead(rowsOf(merged, n), nHeads, dValue));
    keep(run, `${name}.output.input`, merged, nHeads * dValue);
    keep(run, name, output, output.length / n);
  }
  return output;
}

// Self-attention: each row appends its key and its value to its cache, which rows of one sequence share.
function attendSelf(run, stack, name, x, caches, sees, offset, isEach) {
  const { model } = run;
  const n = caches.length;
  const all = linear(model, `${name}.query_key_value`, x);
  const [q, k] = [model.n_heads * model.d_key, model.n_kv_heads * model.d_key];
  const queries = columnsOf(all, n, 0, q);
  const pair = columnsOf(all, n, q, all.length / n);
  const [keys, values] = [columnsOf(pair, n, 0, k), columnsOf(pair, n, k, pair.length / n)];
  rotate(run, stack, queries, n, offset, isEach);
  rotate(run, stack, keys, n, offset, isEach);
  keep(run, `${name}.input`, x, x.length / n);
  rowsOf(keys, n).forEach((row, t) => caches[t].keys.push(row));
  rowsOf(values, n).forEach((row, t) => caches[t].values.push(row));
  return attend(run, name, queries, n, caches, sees);
}

function attendSource(run, name, x, memory) {
  const { model } = run;
  const n = x.length / model.d_model;
  keep(run, `${name}.input`, x, model.d_model);
  keep(run, `${name}.key_value.input`, memory.rows, model.d_model);
  const cache = (memory[name] ??= memoryCache(model, name, memory.rows));
  return attend(run, name, linear(model, `${name}.query`, x), n, new Array(n).fill(cache), () => true);
}

// The keys and values of the source.
function memoryCache(model, name, rows) {
  const n = rows.length / model.d_model;
  const pair = linear(model, `${name}.key_value`, rows);
  const split = model.n_kv_heads * model.d_key;
  const [keys, values] = [columnsOf(pair, n, 0, split), columnsOf(pair, n, split, pair.length / n)];
  return { keys: rowsOf(keys, n), values: rowsOf(values, n) };
}

function transform(run, name, x) {
  const { model } = run;
  const n = x.length / model.d_model;
  const activate = ACTIVATIONS[model.activation];
  const expanded = linear(model, `${name}.expand`, x);
  const width = expanded.length / n;
  const isGated = model.feed_forward === "gated";
  const hidden = isGated
    ? columnsOf(expanded, n, 0, width / 2).map(
        (v, i) => activate(v) * expanded[Math.floor(i / (width / 2)) * width + width / 2 + (i % (width / 2))],
      )
    : expanded.map(activate);
  const contracted = linear(model, `${name}.contract`, hidden);
  const output = run.off.has(name) ? contracted.fill(0) : contracted;
  keep(run, `${name}.input`, x, model.d_model);
  keep(run, `${name}.expand`, expanded, width);
  keep(run, `${name}.contract.input`, hidden, hidden.length / n);
  keep(run, name, output, model.d_model);
  return output;
}

// x + Sublayer(x), with the norm after or before.
function residual(run, name, x, sublayer) {
  const { model } = run;
  const [own, width, isPre] = [`${name}_residual`, model.d_model, model.residual === "pre"];
  const read = isPre ? norm(model, `${own}.norm`, x) : x;
  const sum = added(x, sublayer(read));
  const output = isPre ? sum : norm(model, `${own}.norm`, sum);
  keep(run, `${own}.input`, x, width);
  keep(run, `${own}.norm.input`, isPre ? x : sum, width);
  keep(run, `${own}.norm`, isPre ? read : output, width);
  keep(run, own, output, width);
  return output;
}

// The blocks of a stack. caches: for each row, those of all layers.
function blocks(run, stack, x, caches, sees, { memory = null, offset = 0, isEach = false } = {}) {
  const { model } = run;
  keep(run, `${stack}.blocks.0.input`, x, model.d_model);
  for (let layer = 0; layer < model.n_layers[stack]; layer++) {
    const name = `${stack}.blocks.${layer}`;
    const own = caches.map((one) => one[layer]);
    x = residual(run, `${name}.self_attention`, x, (y) =>
      attendSelf(run, stack, `${name}.self_attention`, y, own, sees, offset, isEach),
    );
    if (memory)
      x = residual(run, `${name}.cross_attention`, x, (y) => attendSource(run, `${name}.cross_attention`, y, memory));
    x = residual(run, `${name}.feed_forward`, x, (y) => transform(run, `${name}.feed_forward`, y));
    keep(run, name, x, model.d_model);
  }
  const output = norm(model, `${stack}.norm`, x);
  keep(run, `${stack}.norm.input`, x, model.d_model);
  keep(run, `${stack}.norm`, output, model.d_model);
  return output;
}

export const newCache = (model) => Array.from({ length: model.n_layers.decoder }, () => ({ keys: [], values: [] }));
export const copyCache = (cache) => cache.map(({ keys, values }) => ({ keys: [...keys], values: [...values] }));

// The encoder's output for a source, {rows}, which also caches keys and values; null for a model without an encoder.
export function readSource(run, ids) {
  const { model } = run;
  if (!model.n_layers.encoder && model.kind !== "transformer") return null;
  const shared = Array.from({ length: model.n_layers.encoder }, () => ({ keys: [], values: [] }));
  const x = embed(run, "src_embedding", ids);
  return { rows: blocks(run, "encoder", x, new Array(ids.length).fill(shared), () => true) };
}

// The decoder's output for a whole sequence.
export function readTarget(run, ids, memory) {
  const shared = newCache(run.model);
  const isMasked = ids.length > 1 && !run.off.has("decoder.mask");
  const sees = isMasked ? (query, key) => key <= query : null;
  return blocks(
    run,
    "decoder",
    embed(run, run.model.embeddings.decoder, ids),
    new Array(ids.length).fill(shared),
    sees,
    { memory },
  );
}

// The decoder's output for the next token of each row, at the same position.
export function readNext(run, ids, memory, caches, offset) {
  const x = embed(run, run.model.embeddings.decoder, ids, offset, true);
  return blocks(run, "decoder", x, caches, null, { memory, offset, isEach: true });
}

// Log-probabilities of all tokens: an array for each row.
export function logSoftmax(logits, n) {
  return rowsOf(logits, n).map((row) => {
    const most = row.reduce((a, b) => Math.max(a, b), -Infinity);
    const sum = Math.log(row.reduce((total, v) => total + Math.exp(v - most), 0)) + most;
    return row.map((v) => v - sum);
  });
}

export const logits = (model, hidden) => linear(model, "output", hidden);

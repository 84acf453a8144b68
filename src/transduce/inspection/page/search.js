// Beam search step by step, as decoding/search.py: each hypothesis with its fate and its best continuations.
import { BOS, EOS } from "./record.js";
import { copyCache, logits, logSoftmax, newCache, readNext } from "./compute.js";

const TOP = 10; // best continuations that a hypothesis keeps

// The numbers of the n largest values, largest first.
export function largestOf(values, n) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === n && !(values[i] > values[best.at(-1)])) continue;
    let place = best.length;
    while (place && values[i] > values[best[place - 1]]) place--;
    best.splice(place, 0, i);
    if (best.length > n) best.pop();
  }
  return best;
}

// Tokens that would repeat an n-gram.
function repeating(ids, n) {
  const tokens = [];
  const last = ids.slice(ids.length - n + 1).join();
  for (let i = 0; n && i + n <= ids.length; i++)
    if (ids.slice(i, i + n - 1).join() === last) tokens.push(ids[i + n - 1]);
  return tokens;
}

export function idsOf(node) {
  const ids = [];
  for (let one = node; one.parentNode; one = one.parentNode) ids.unshift(one.token_id);
  return ids;
}

// The scores of the continuations of a hypothesis; −∞ for tokens that may not follow.
function allowed(logProbs, node, { prefix, banned, no_repeat_ngram: n }, length) {
  const scores = logProbs.map((p) => node.log_prob + p);
  if (length < prefix.length) return scores.map((score, id) => (id === prefix[length] ? score : -Infinity));
  for (const id of [...banned, ...(n ? repeating(idsOf(node), n) : [])]) scores[id] = -Infinity;
  return scores;
}

// The 2 * beam best continuations of all live hypotheses, best first.
function bestContinuations(live, logProbs, options, length) {
  const n = 2 * options.beam;
  const all = live.flatMap((parent, i) => {
    const scores = allowed(logProbs[i], parent, options, length);
    return largestOf(scores, n).map((id) => ({ parent, id, log_prob: scores[id] }));
  });
  return all
    .filter((one) => one.log_prob > -Infinity)
    .sort((a, b) => b.log_prob - a.log_prob)
    .slice(0, n);
}

// Search for a translation. options: beam, length_penalty, limit, prefix, banned, no_repeat_ngram.
// Returns {steps, top, results}: nodes by step, the best first tokens, and the hypotheses, best first.
export function beamSearch(run, memory, options) {
  const { beam, length_penalty: alpha, limit } = options;
  const root = { id: 0, parentNode: null, log_prob: 0, cache: newCache(run.model), token_id: BOS, top: [] };
  const [steps, finished] = [[], []];
  let [live, n, nEnded] = [[root], 1, 0];
  for (let length = 0; ;) {
    const hidden = readNext(
      run,
      live.map((node) => node.token_id),
      memory,
      live.map((node) => node.cache),
      length,
    );
    const logProbs = logSoftmax(logits(run.model, hidden), live.length);
    live.forEach((node, i) => (node.top = largestOf(logProbs[i], TOP).map((id) => [id, Math.exp(logProbs[i][id])])));
    const best = bestContinuations(live, logProbs, options, length);
    length++;
    const step = [];
    const next = [];
    best.forEach(({ parent, id, log_prob: logProb }, rank) => {
      const ends = id === EOS;
      const isKept = ends ? rank < beam : next.length < beam;
      const fate = !isKept ? "pruned" : ends ? "finished" : "kept";
      const node = { id: n++, parentNode: parent, token_id: id, log_prob: logProb, fate, top: [] };
      step.push(node);
      if (fate === "kept") next.push(node);
      if (fate === "finished") finished.push({ node, score: logProb / length ** alpha, isEnded: true, length });
    });
    nEnded += step.filter((node) => node.fate === "finished").length;
    finished.sort((a, b) => b.score - a.score).splice(beam);
    for (const node of next) node.cache = copyCache(node.parentNode.cache);
    for (const node of live) delete node.cache;
    steps.push(step);
    live = next;
    const mostLikely = live[0]?.log_prob ?? -Infinity;
    const isEnough = nEnded >= beam && (finished[0]?.score ?? -Infinity) >= mostLikely / length ** alpha;
    const cannotImprove = (finished[beam - 1]?.score ?? -Infinity) >= mostLikely / limit ** alpha;
    const isDone = (nEnded > 0 || !live.length) && (isEnough || cannotImprove);
    if (!isDone && length < limit) continue;
    const cut = isDone ? [] : live.slice(0, beam - finished.length);
    const results = [
      ...finished,
      ...cut.map((node) => ({ node, score: node.log_prob / length ** alpha, isEnded: false, length })),
    ];
    return { steps, top: root.top, results };
  }
}

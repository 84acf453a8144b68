// The tour: ten stops on the reader's own sentence. Each asks for a guess before it shows.
import { choiceOf, format, matrix, page, percent, predictedSide, rowAt, set, view } from "./record.js";
import { button, buttonRow, el, paint } from "./draw.js";
import { trial } from "./stage.js";
import { logProb } from "./tokens.js";

const guesses = new Map(); // from a stop on a record to the number of the chosen answer
const find = (record, kind, stack) =>
  record.parts.find((part) => part.kind === kind && (!stack || part.stack === stack));
const weightsOf = (record, name) => record.attention.find((one) => one.name === name);
const without = (record, group) => record.without?.find((one) => one.group === group);
const canSwitch = (record, group) => record.can_switch.some((one) => one.group === group);
const highest = (row) => row.indexOf(Math.max(...row));

// A query in the middle of the sentence, its weights in the first head, and the names of its keys.
function queryOf(record, part) {
  const { weights, rows, row_tokens: queries, column_tokens: keys } = weightsOf(record, part.name);
  const m = matrix(weights, [0]);
  const q = Math.min(m.rows - 1, Math.max(1, Math.floor(m.rows / 2)));
  const row = [...rowAt(m, q)];
  const best = highest(row);
  return { q, rows, token: queries[q], keys, row, best, second: highest(row.map((x, j) => (j === best ? -1 : x))) };
}

// Four answers: the best key and three others, in the order of the sentence.
function keyQuiz({ token, keys, row, best }, values = {}) {
  const step = Math.max(1, Math.floor(keys.length / 4));
  const others = keys.map((_, j) => j).filter((j) => j !== best && j % step === 0);
  const shown = [best, ...others.slice(0, 3)].sort((a, b) => a - b);
  const answers = shown.map((j) => keys[j]);
  return {
    answers,
    right: shown.indexOf(best),
    values: { token, key: keys[best], share: percent(row[best]), ...values },
  };
}

// Numbers as answers, of which `right` is the right one.
function numberQuiz(numbers, right, values) {
  const answers = [...new Set(numbers)].sort((a, b) => a - b);
  return { answers, right: answers.indexOf(right), values };
}

const selfAttention = (record) => find(record, "self_attention", "encoder") ?? find(record, "self_attention");
const decoderAttention = (record) => find(record, "self_attention", "decoder");
const crossAttention = (record) => record.parts.findLast((part) => part.kind === "cross_attention");
const feedForward = (record) => find(record, "feed_forward", "decoder") ?? find(record, "feed_forward");

// A stop at a query in the first head of a part. `quiz` takes the query and the record.
const queryStop = (id, partOf, quiz, more = {}) => ({
  id,
  fits: partOf,
  state(record) {
    const part = partOf(record);
    const { q, rows } = queryOf(record, part);
    return { part: part.name, map: part.name, head: 0, [choiceOf(rows)]: q };
  },
  quiz: (record) => quiz(queryOf(record, partOf(record)), record),
  ...more,
});

// id: of its texts. needs: slow views. hides: what the guess is about. fits, state, quiz: of a record. quiz gives the
// answers (or numbers of the texts' answers), the right one, and the values in the texts.
const STOPS = [
  {
    id: "pieces",
    hides: "pieces",
    state: (record) => ({ part: find(record, "embedding")?.name ?? record.parts[0].name }),
    quiz(record) {
      const { text, tokens, word_texts: words } = Object.values(record.sides)[0];
      const n = tokens.length;
      return numberQuiz([words.length, n, n + 4, text.length], n, { text, n, pieces: tokens.join(" · ") });
    },
  },
  {
    id: "positions",
    needs: ["without"],
    fits: (record) => canSwitch(record, "positions"),
    state: (record) => ({ part: find(record, "embedding").name, src: 1 }),
    quiz(record) {
      const { text, log_prob: p } = without(record, "positions");
      const own = record.sides[predictedSide(record)].text;
      return { right: text === own ? 0 : 1, values: { text, own, p: format(p), before: format(logProb(record)) } };
    },
  },
  queryStop("query", selfAttention, (query) => keyQuiz(query), { hides: "shares" }),
  queryStop("softmax", selfAttention, ({ keys, second }, record) => {
    const head = selfAttention(record)
      .values.find((one) => one.axes[0] === "head")
      .shape.at(-1);
    return { right: 1, values: { key: keys[second], head }, drag: second };
  }),
  queryStop("value", selfAttention, ({ keys, second }) => ({ right: 2, values: { key: keys[second] }, only: second })),
  {
    id: "heads",
    hides: "labels",
    fits: (record) => record.attention.some((one) => one.labels.length > 1),
    state: (record) => ({ part: clearestHead(record).attention.name, head: 0 }),
    quiz(record) {
      const { attention, head } = clearestHead(record);
      const { label, score, shares } = attention.labels[head];
      const answers = attention.labels.map((_, i) => paint(matrix(attention.weights, [i]), 1, false));
      const name = score === null ? shares[0][0] : label;
      const rule = page.texts[view.language].rules?.[label] ?? record.rules[label];
      return { answers, right: head, values: { label: name, rule, head: head + 1 } };
    },
  },
  {
    id: "feedforward",
    hides: "active",
    fits: (record) => feedForward(record)?.values.length > 2,
    state: (record) => ({ part: feedForward(record).name, tgt: 1, src: 1 }),
    quiz(record) {
      const { data } = feedForward(record).values.at(-2);
      if (!data) return null; // the server is asked for it
      const m = matrix(data);
      const n = m.columns;
      const row = Math.min(1, m.rows - 1);
      const active = rowAt(m, row).filter((x) => x > 0).length;
      return numberQuiz([Math.round(active / 4), active, Math.min(n, 3 * active), n], active, { n, active });
    },
  },
  queryStop(
    "mask",
    decoderAttention,
    ({ token }, record) => {
      const { log_prob: p } = without(record, "mask");
      return { right: 1, values: { token, p: format(p), before: format(logProb(record)) } };
    },
    { needs: ["without"], hides: "shares", fits: (record) => decoderAttention(record) && canSwitch(record, "mask") },
  ),
  queryStop(
    "cross",
    crossAttention,
    (query, record) => {
      const { text, log_prob: p } = without(record, "cross");
      return keyQuiz(query, { text, p: format(p) });
    },
    { needs: ["without"], hides: "shares" },
  ),
  {
    id: "beam",
    hides: "tree",
    fits: (record) => record.steps?.results.length,
    state: (record) => ({ part: record.parts.at(-1).name, tree: true, step: 0 }),
    quiz(record) {
      const isGreedy = record.tokens.every((one) => one.rank === 1);
      return { right: isGreedy ? 0 : 1, values: { beam: record.steps.beam } };
    },
  },
  { id: "own", state: () => ({}), quiz: () => null },
];

// The head whose label is the clearest, if possible in a layer where no other head has its label.
function clearestHead(record) {
  const layers = record.attention.filter((one) => one.labels.length > 1);
  const all = layers.flatMap((attention) => attention.labels.map((one, head) => ({ attention, head, ...one })));
  const isAlone = ({ attention, label }) => attention.labels.filter((one) => one.label === label).length === 1;
  const alone = all.filter(isAlone);
  return (alone.length ? alone : all).reduce((best, one) => (one.score > best.score ? one : best));
}

const stopsOf = (record) => STOPS.filter((stop) => !stop.fits || stop.fits(record));
export const stopNeeds = (record) => stopsOf(record)[view.stop]?.needs ?? [];

let entered = "";

// Set the stage for a stop when it is entered.
export function enterStop(record) {
  const stops = stopsOf(record);
  view.stop = Math.min(view.stop, stops.length - 1);
  const stop = stops[view.stop];
  const key = `${stop.id} ${record.model.name} ${Object.values(record.sides)[0].text}`;
  if (key === entered) return;
  entered = key;
  trial.change = null;
  Object.assign(view, { tree: false, open: "", cell: "", index: [], key: -1 }, stop.state(record));
}

export function leaveTour() {
  entered = "";
  trial.change = null;
  delete document.body.dataset.hides;
}

export function drawTour(record, box) {
  const texts = page.texts[view.language];
  if (!texts) return box.replaceChildren();
  const stops = stopsOf(record);
  const stop = stops[view.stop];
  const { title, text, question, answers = [], reasons = [], answer, more = [] } = texts.stops[stop.id];
  const isReady = !stop.needs || record.without;
  const quiz = isReady ? stop.quiz(record) : null;
  const guess = guesses.get(entered);
  const fill = (template) => template.replace(/\{(\w+)\}/g, (_, name) => quiz?.values[name] ?? "…");
  const paragraph = (className, ...content) => el("p", { className }, ...content);
  const go = (label, i) => button(label, () => set({ stop: i }), { disabled: !stops[i], key: `stop-${label}` });
  const languages = Object.keys(page.texts).map((name) => [name.toUpperCase(), name]);
  const chooser = buttonRow("", "language", languages, view.language, (language) => set({ language }));
  document.body.dataset.hides = quiz && guess === undefined ? (stop.hides ?? "") : "";
  box.lang = view.language;
  box.replaceChildren(
    el("div.stop-bar", paragraph("soft", `${view.stop + 1} / ${stops.length}`), chooser),
    el("h2", title),
    paragraph("", fill(text)),
    ...more.map((one) => paragraph("task", one)),
  );
  if (!isReady) box.append(paragraph("soft", texts.computing));
  if (quiz) box.append(paragraph("question", fill(question)), answerButtons(quiz, answers.map(fill), guess));
  if (quiz && guess !== undefined) {
    const verdict = el("b", guess === quiz.right ? texts.right : texts.wrong);
    const said = [reasons[quiz.right], fill(answer)].filter(Boolean).join(" ");
    box.append(paragraph("answer", verdict, ` ${said}`), ...trialControls(quiz, texts));
  }
  return box.append(el("div.steps-bar", go(texts.back, view.stop - 1), go(texts.next, view.stop + 1)));
}

function answerButtons({ answers, right }, texts, guess) {
  const choose = (i) => {
    if (guess !== undefined) return;
    guesses.set(entered, i);
    set({ stop: view.stop });
  };
  const buttons = (answers ?? texts).map((answer, i) => {
    const mark = guess === undefined ? "" : i === right ? " right" : i === guess ? " wrong" : "";
    const isPicture = answer instanceof HTMLCanvasElement;
    return button(answer, () => choose(i), {
      className: `answer-button${mark}${isPicture ? " picture" : ""}`,
      label: isPicture ? `head ${i + 1}` : null,
      pressed: i === guess,
      key: `answer-${i}`,
    });
  });
  return el("div.answers", ...buttons);
}

// What a reader may change on the stage after the answer: one score, or one weight.
function trialControls({ drag, only }, texts) {
  const change = (value) => {
    trial.change = value;
    set({ stop: view.stop });
  };
  if (drag !== undefined) {
    const value = trial.change?.score ?? 0;
    const moved = ({ target }) => change({ key: drag, score: Number(target.value) });
    const input = el("input", { type: "range", min: -6, max: 6, step: 0.5, value, "data-key": "drag", input: moved });
    return [el("label.slider", texts.drag, input, el("output", format(value)))];
  }
  if (only === undefined) return [];
  const isOn = trial.change !== null;
  const toggle = () => change(isOn ? null : { key: only, only: true });
  return [button(isOn ? texts.undo : texts.only, toggle, { pressed: isOn, key: "only" })];
}

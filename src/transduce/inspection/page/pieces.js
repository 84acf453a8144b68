// SentencePiece in the page: normalization by the rules of the model, unigram and BPE pieces, and their words.
import { BOS, bytesOf, EOS, UNK } from "./record.js";

const SPACE = "\u2581";
const TYPES = { control: "3", user: "4", unused: "5", byte: "6" }; // digits of SentencePiece's types
const UNKNOWN_PENALTY = 10;
const SPACELESS = /^(?=\p{L})[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}]/u;
const SIGN = /^(?!_)[\p{P}\p{S}]/u;
const WHITE = /^[\s\x1c-\x1f\x85]$/u;

// The vocabulary of a side, from the data of `vocabulary_data`.
export function openVocabulary(data) {
  const { pieces, types } = data;
  const scores = new Float32Array(bytesOf(data.scores).buffer);
  const ids = new Map();
  const user = new Map(); // user-defined symbols with their lengths in bytes
  pieces.forEach((piece, id) => {
    if ("145".includes(types[id])) ids.set(piece, id);
    if (types[id] === TYPES.user) user.set(piece, new TextEncoder().encode(piece).length);
  });
  const bytes = new Map(
    pieces.flatMap((piece, id) => (types[id] === TYPES.byte ? [[parseInt(piece.slice(3), 16), id]] : [])),
  );
  const rules = readRules(bytesOf(data.rules));
  const longest = (all) => Math.max(0, ...[...all].map((piece) => [...piece].length));
  const least = scores.filter((_, id) => types[id] === "1").reduce((a, b) => Math.min(a, b), Infinity);
  const vocabulary = { ...data, scores, ids, user, bytes, rules, least };
  Object.assign(vocabulary, { longest: longest(ids.keys()), longestUser: longest(user.keys()) });
  return { data, pieces, encode: (text) => encodeText(vocabulary, text), decode: (row) => decodeIds(vocabulary, row) };
}

// --- normalization ------------------------------------------------------------------------------------------------

// The compiled rules: a double-array trie of byte strings, and their replacements, each ended by a zero byte.
function readRules(bytes) {
  if (!bytes.length) return null;
  const size = new DataView(bytes.buffer).getUint32(0, true);
  return { units: new Uint32Array(bytes.slice(4, 4 + size).buffer), texts: bytes.subarray(4 + size) };
}

// The longest rule at a place of a text in bytes: [length, replacement]; null if there is none.
function ruleAt({ units, texts }, bytes, place) {
  const offsetOf = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);
  let node = offsetOf(units[0]);
  let found = null;
  for (let end = place; end < bytes.length; end++) {
    node ^= bytes[end];
    const unit = units[node];
    if ((unit & 0x800000ff) >>> 0 !== bytes[end]) break;
    node ^= offsetOf(unit);
    if ((unit >>> 8) & 1) found = [end + 1 - place, units[node] & 0x7fffffff];
  }
  if (!found) return null;
  const [length, first] = found;
  return [length, new TextDecoder().decode(texts.subarray(first, texts.indexOf(0, first)))];
}

// The longest user-defined symbol at a place of a text, as characters.
function symbolAt({ user, longestUser }, characters, place) {
  for (let n = Math.min(longestUser, characters.length - place); n > 0; n--) {
    const symbol = characters.slice(place, place + n).join("");
    if (user.has(symbol)) return symbol;
  }
  return null;
}

// The parts into which rules divide a text: [replacement, number of characters].
function* replaced(vocabulary, characters) {
  const encoder = new TextEncoder();
  const bytes = encoder.encode(characters.join(""));
  const sizes = characters.map((one) => encoder.encode(one).length);
  for (let i = 0, place = 0; i < characters.length;) {
    const symbol = symbolAt(vocabulary, characters, i);
    const rule = symbol === null && vocabulary.rules ? ruleAt(vocabulary.rules, bytes, place) : null;
    let n = symbol === null ? 1 : [...symbol].length;
    if (rule) for (let left = rule[0] - sizes[i]; left > 0; n++) left -= sizes[i + n];
    yield [rule ? rule[1] : (symbol ?? characters[i]), n];
    for (const end = i + n; i < end; i++) place += sizes[i];
  }
}

// The normalized characters, and the place in the text of each and of the end.
function normalize(vocabulary, text) {
  const { dummy_prefix: hasPrefix, collapses } = vocabulary;
  const [characters, places] = [[], []];
  let place = 0;
  let isAfterSpace = collapses;
  let hasBegun = false;
  for (const [part, n] of replaced(vocabulary, [...text])) {
    if (collapses && !hasBegun && part === " ") {
      place += n;
      continue;
    }
    if (!hasBegun && hasPrefix) {
      characters.push(SPACE);
      places.push(place);
    }
    hasBegun = true;
    const kept = isAfterSpace ? part.replace(/^ +/, "") : part;
    for (const one of kept) {
      characters.push(one === " " ? SPACE : one);
      places.push(place);
    }
    if (kept) isAfterSpace = collapses && kept.endsWith(" ");
    place += n;
  }
  while (collapses && characters.at(-1) === SPACE) {
    characters.pop();
    place = places.pop();
  }
  return { characters, places: [...places, place] };
}

// --- pieces -------------------------------------------------------------------------------------------------------

// The best segmentation under a unigram model (Kudo 2018), as pieces. Sums are rounded to float32 as SentencePiece rounds
// them: segmentations with the same pieces in another order differ by rounding only.
function unigram(vocabulary, characters) {
  const { ids, user, scores, types, least, longest } = vocabulary;
  const best = Array.from({ length: characters.length + 1 }, () => ({ score: 0, start: -1 }));
  const offer = (end, own, start) => {
    const score = Math.fround(Math.fround(own) + best[start].score);
    if (best[end].start < 0 || score > best[end].score) best[end] = { score, start };
  };
  for (let start = 0; start < characters.length; start++) {
    let [piece, isKnown] = ["", false];
    for (let end = start + 1; end <= Math.min(start + longest, characters.length); end++) {
      piece += characters[end - 1];
      const id = ids.get(piece);
      if (id === undefined || types[id] === TYPES.unused) continue;
      offer(end, user.has(piece) ? 0.1 * (user.get(piece) - 1) : scores[id], start);
      isKnown ||= end === start + 1;
    }
    if (!isKnown) offer(start + 1, least - UNKNOWN_PENALTY, start);
  }
  const pieces = [];
  for (let end = characters.length; end > 0; end = best[end].start)
    pieces.unshift(characters.slice(best[end].start, end).join(""));
  return pieces;
}

// Characters, and user-defined symbols whole.
function units(vocabulary, characters) {
  const parts = [];
  for (let i = 0; i < characters.length; i += [...parts.at(-1)].length) {
    parts.push(symbolAt(vocabulary, characters, i) ?? characters[i]);
  }
  return parts;
}

// Merge the pair with the highest score, the first of several, until none is left; split pieces that are not used.
function bytePairs(vocabulary, characters) {
  const { ids, user, scores, types } = vocabulary;
  const parts = units(vocabulary, characters);
  const halves = new Map();
  const pairAt = (i) => {
    if (i < 0 || i + 1 >= parts.length || user.has(parts[i]) || user.has(parts[i + 1])) return -Infinity;
    const id = ids.get(parts[i] + parts[i + 1]);
    if (id === undefined) return -Infinity;
    if (types[id] === TYPES.unused) halves.set(parts[i] + parts[i + 1], [parts[i], parts[i + 1]]);
    return scores[id];
  };
  const pairs = parts.map((_, i) => pairAt(i));
  for (;;) {
    let first = 0;
    for (let i = 1; i < pairs.length; i++) if (pairs[i] > pairs[first]) first = i;
    if (!(pairs[first] > -Infinity)) break;
    parts.splice(first, 2, parts[first] + parts[first + 1]);
    pairs.splice(first, 2, pairAt(first));
    if (first) pairs[first - 1] = pairAt(first - 1);
  }
  const split = (piece) => (halves.has(piece) ? halves.get(piece).flatMap(split) : [piece]);
  return parts.flatMap(split);
}

const ALGORITHMS = { unigram, bpe: bytePairs, char: units };

// Ids and their spans in the text, in characters.
function encodeText(vocabulary, text) {
  text = text.toWellFormed();
  if (vocabulary.exact && text.includes(SPACE)) return aroundSpaces(vocabulary, text);
  const { characters, places } = normalize(vocabulary, text);
  const [ids, spans] = [[], []];
  let begin = 0;
  for (const piece of ALGORITHMS[vocabulary.algorithm](vocabulary, characters)) {
    const end = begin + [...piece].length;
    const span = [places[begin], places[end]];
    const known = vocabulary.ids.get(piece) ?? UNK;
    const id = vocabulary.types[known] === TYPES.unused ? UNK : known;
    begin = end;
    if (id === UNK && vocabulary.bytes.size) {
      const bytes = [...new TextEncoder().encode(piece)];
      ids.push(...bytes.map((byte) => vocabulary.bytes.get(byte)));
      spans.push(...bytes.slice(1).map(() => [span[0], span[0]]), span);
    } else if (id === UNK && ids.at(-1) === UNK) spans.at(-1)[1] = span[1];
    else {
      ids.push(id);
      spans.push(span);
    }
  }
  return vocabulary.exact ? { ids, spans: byteSpans(vocabulary, ids, text) } : { ids, spans };
}

// In an exact vocabulary, U+2581 in a text is written in bytes.
function aroundSpaces(vocabulary, text) {
  const sign = [...new TextEncoder().encode(SPACE)].map((byte) => vocabulary.bytes.get(byte));
  const ids = text.split(SPACE).flatMap((part, i) => [...(i ? sign : []), ...encodeText(vocabulary, part).ids]);
  return { ids, spans: byteSpans(vocabulary, ids, text) };
}

// The spans of the pieces of an exact vocabulary, which may be parts of characters.
function byteSpans(vocabulary, ids, text) {
  const owners = [...text].flatMap((one, i) => new Array(new TextEncoder().encode(one).length).fill(i));
  owners.push([...text].length);
  let place = 0;
  return ids.map((id) => {
    const first = owners[place];
    place += bytesOfPiece(vocabulary, id).length;
    return [first, owners[place]];
  });
}

function bytesOfPiece({ pieces, types }, id) {
  if (types[id] === TYPES.byte) return [parseInt(pieces[id].slice(3), 16)];
  const text = types[id] === TYPES.control ? "" : id === UNK ? "\u2047" : pieces[id].replaceAll(SPACE, " ");
  return [...new TextEncoder().encode(text)];
}

function decodeIds(vocabulary, ids) {
  const { exact, keeps_spaces: keepsSpaces, unknown, dummy_prefix: hasPrefix, types } = vocabulary;
  const shown = exact ? ids : ids.filter((id) => id > EOS || id === UNK);
  const unknownBytes = [...new TextEncoder().encode(unknown)];
  const bytes = shown.flatMap((id) => (id === UNK && !exact ? unknownBytes : bytesOfPiece(vocabulary, id)));
  const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
  if (exact) return text;
  const plain = text.replaceAll("\ufffd", "");
  if (!keepsSpaces) return plain.replace(/ {2,}/g, " ").replace(/^ +| +$/g, "");
  return hasPrefix && shown.length && types[shown[0]] !== TYPES.byte ? plain.replace(/^ /, "") : plain;
}

// --- words --------------------------------------------------------------------------------------------------------

function beginsWord(characters, i) {
  const [before, here] = [characters[i - 1], characters[i]];
  if (WHITE.test(before) || SPACELESS.test(before) || SPACELESS.test(here)) return true;
  const joins = "'’".includes(before) || ("'’".includes(here) && /^\p{L}/u.test(characters[i + 1] ?? ""));
  return !joins && (SIGN.test(before) || SIGN.test(here));
}

// The word of each token, from the spans of tokens; −1 in a text without words.
function wordsOfTokens(text, spans) {
  const characters = [...text];
  const starts = [];
  return spans.map(([begin]) => {
    let start = begin;
    while (start < characters.length && WHITE.test(characters[start])) start++;
    if (start < characters.length && (!starts.length || (start > starts.at(-1) && beginsWord(characters, start))))
      starts.push(start);
    return starts.length - 1;
  });
}

const SPECIAL = [BOS, EOS];

// One side of a sentence as in a record: its text, its tokens, the word of each token and the texts of the words.
export function sideOf(vocabulary, ids, text) {
  const tokens = ids.map((id) => vocabulary.pieces[id]);
  const plain = ids.flatMap((id, i) => (SPECIAL.includes(id) ? [] : [i]));
  const again = vocabulary.encode(text);
  const isPlain = String(again.ids) === String(plain.map((i) => ids[i]));
  const inside = isPlain ? wordsOfTokens(text, again.spans) : plain.map((_, i) => i);
  const words = [];
  ids.forEach((_, i) => {
    const place = plain.indexOf(i);
    words.push(place >= 0 ? inside[place] + plain[0] : words.length ? words.at(-1) + 1 : 0);
  });
  const texts = [...new Set(words)].map((word) => {
    const members = ids.flatMap((_, i) => (words[i] === word ? [i] : []));
    return vocabulary.decode(members.map((i) => ids[i])).trim() || members.map((i) => tokens[i]).join("");
  });
  return { text, tokens, words, word_texts: texts };
}

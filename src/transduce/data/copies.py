"""Augment training pairs with placeholders, which a model learns to copy, and with copies in capitals or title case.

In a small share of the sentence pairs, words that are equal on both sides, or translations of each other, are replaced
by placeholders. In every pair, words that the source's vocabulary cannot read are replaced if the target
contains them too.

An unreadable source word that the target does not contain stays `<unk>`. A placeholder without a counterpart
would teach the model to drop placeholders. A translator never reads `<unk>`, so training with it does no harm.

Training text rarely has sentences in capitals, in title case or without the last full stop. A translator without
copies of this kind (`data.case_augmentation`) translates headlines and capitals badly: pieces of a vocabulary are
mostly in lower case, and capitals become single letters that were never learned.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from zlib import crc32

from transduce.config.settings import Settings
from transduce.data.pairs import Pair
from transduce.text.languages import LETTER, base_language, is_spaced
from transduce.text.placeholders import PLACEHOLDERS, Masked, mask_pair, placeholders_in, shared_spans
from transduce.text.special import Span, Vocabulary
from transduce.text.tokenizer import Tokenizers

_SHARE = 0.015
"""Share of the pairs that get placeholders. In trials, 1 % was enough for names, at no cost to other sentences; the
rest is for `_SIGNS`.
"""
_MORE = 0.4
"""Probability of one more placeholder in a pair with placeholders: 40 % have two or more, 6 % four or more."""
_SAMPLED = 10_000
"""Number of pairs to learn word translations from: enough for a word in 2,500 sentences, and read in seconds."""
_LEAST, _MOST = 4, 0.02
"""Fewest occurrences of a word with its translation, since fewer may be chance. Largest share of pairs with a word,
since frequent words, such as articles, do not stand where names stand.
"""
_DICE = 0.6
"""Smallest Dice coefficient, 2 c(s, t) / (c(s) + c(t)), of a word and its translation: they mostly occur together.
Precision matters, not recall: few pairs are needed, and a wrong pair teaches a wrong position.
"""
_SIGNS = 0.3
"""Share of the pairs with placeholders that keep their word and get placeholders beside it, because in use unreadable
symbols, such as quotation marks, also occur next to known words.
"""
_FORMS = ("{first} {part} {second}", "{part} {first}", "{first} {part}")

_WORD = re.compile(f"{LETTER}+")

_AS_IT_IS = re.compile("(&#?\\w+;|<[^<>]*>|[\u10d0-\u10ff]+)")
"""HTML entities and tags, whose case matters, and Georgian letters, whose capitals are hardly used."""
_INITIAL = re.compile(r"<[^<>]*>|(?<![\w'’&;])\w")
"""A tag, or the first letter of a word, except in an entity or after an apostrophe."""
_STOP = re.compile(r"(?<=[^\s.])\s*[.。।۔։]\s*$")

_TURKIC = str.maketrans("iı", "İI")
_LETTERS = {"tr": _TURKIC, "az": _TURKIC, "el": str.maketrans("άέήίόύώΐΰ", "αεηιουωϊϋ")}
"""Letters that are replaced before they become capitals: Turkish i becomes İ, and Greek capitals have no accents."""

Units = dict[str, list[Span]]


@dataclass(frozen=True, slots=True)
class Copies:
    """Replaces parts of sentence pairs by placeholders. The result depends only on the pair and the seed.

    translations: Pairs of words that nearly always occur together. common: Words too frequent to stand for a name.
    share: The share of the pairs to draw, including unsuitable pairs, which stay unchanged.
    """

    tokenizers: Tokenizers
    seed: int
    translations: frozenset[tuple[str, str]]
    common: frozenset[str]
    share: float

    @classmethod
    def learn(cls, tokenizers: Tokenizers, pairs: Sequence[tuple[str, ...]], *, seed: int) -> Copies:
        """Learn words and their translations from a sample of the training pairs (source, target)."""
        step = max(1, len(pairs) // _SAMPLED)
        sampled = [(_units(src, tokenizers.src), _units(tgt, tokenizers.tgt)) for src, tgt in pairs[::step]]
        counts = [Counter(word for units in sampled for word in units[side]) for side in (0, 1)]
        most = _MOST * len(sampled)
        rare = [{word for word, count in side.items() if _LEAST <= count <= most} for side in counts]
        together = Counter[tuple[str, str]]()
        for src, tgt in sampled:
            together.update(product(rare[0].intersection(src), rare[1].intersection(tgt)))
        translations = {
            (src, tgt)
            for (src, tgt), count in together.items()
            if count >= _LEAST and 2 * count >= _DICE * (counts[0][src] + counts[1][tgt])
        }
        common = frozenset(word for word, count in counts[0].items() if count > most)
        copies = cls(tokenizers, seed, frozenset(translations), common, _SHARE)
        n_suitable = sum(bool(copies._candidates(*units)) for units in sampled)
        return replace(copies, share=min(1.0, _SHARE * len(sampled) / max(1, n_suitable)))

    def masked(self, pair: Pair, src_ids: Sequence[int]) -> Pair:
        """Replace words of the pair by placeholders, or return it unchanged. `src_ids`: its encoded source."""
        number = crc32(f"{self.seed}\n{pair.src}\n{pair.tgt}".encode("utf-8", "surrogatepass"))
        is_drawn = number < self.share * 2**32
        if not is_drawn and self.tokenizers.src.unreadable_ids.isdisjoint(src_ids):
            return pair  # fast path for nearly all pairs
        spans, draw = shared_spans(pair.src, pair.tgt, self.tokenizers.src, src_ids), random.Random(number)
        has_unreadable = bool(spans)
        if is_drawn and not spans and not placeholders_in(pair.src + pair.tgt):
            spans = self._chosen(pair, draw)
        if not spans:
            return pair
        order = draw.sample(PLACEHOLDERS, len(PLACEHOLDERS))
        src, tgt = mask_pair(pair.src, pair.tgt, spans, order)
        if has_unreadable or draw.random() >= _SIGNS or len(spans) > len(PLACEHOLDERS) - 2:
            return with_texts(pair, src.text, tgt.text)
        form = draw.choice(_FORMS).format(first=order[-1], second=order[-2], part="{part}")
        return with_texts(pair, _with_sign(src, order[0], form), _with_sign(tgt, order[0], form))

    def _chosen(self, pair: Pair, draw: random.Random) -> list[tuple[Span, Span]]:
        src, tgt = _units(pair.src, self.tokenizers.src), _units(pair.tgt, self.tokenizers.tgt)
        candidates = sorted(self._candidates(src, tgt))
        draw.shuffle(candidates)
        chosen, used = list[tuple[Span, Span]](), set[str]()
        for src_word, tgt_word in candidates:
            if src_word not in used and tgt_word not in used:
                used |= {src_word, tgt_word}
                chosen.append((src[src_word][0], tgt[tgt_word][0]))
                if draw.random() >= _MORE:
                    break
        return chosen

    def _candidates(self, src: Units, tgt: Units) -> set[tuple[str, str]]:
        """Pairs of a source word and an equal target word, or its translation, each of which occurs once."""
        once = [[word for word, spans in units.items() if len(spans) == 1] for units in (src, tgt)]
        same = {(word, word) for word in set(once[0]).intersection(once[1]) - self.common}
        return same | self.translations.intersection(product(*once))


def with_texts(pair: Pair, src: str, tgt: str) -> Pair:
    """Replace the texts of a pair. Its word links are dropped if the number of words changes."""
    is_same = (len(src.split()), len(tgt.split())) == (len(pair.src.split()), len(pair.tgt.split()))
    return pair._replace(src=src, tgt=tgt, links=pair.links if is_same else "")


def _with_sign(masked: Masked, placeholder: str, form: str) -> str:
    """Put back the original text of a placeholder, and add other placeholders beside it. `form`: see `_FORMS`."""
    part = masked.parts[placeholders_in(masked.text).index(placeholder)]
    form = form if is_spaced(part[0]) else form.replace(" ", "")
    return masked.text.replace(placeholder, form.format(part=part))


def _units(text: str, vocabulary: Vocabulary) -> Units:
    """The spans of each word or, in scripts without spaces, of each piece of the vocabulary, by its text."""
    spans = [match.span() for match in _WORD.finditer(text)]
    for start, stop in vocabulary.encode_with_offsets(text)[1]:
        if text[start:stop].isalpha() and not _WORD.search(text, start, stop):
            spans.append((start, stop))
    units = Units()
    for start, stop in spans:
        units.setdefault(text[start:stop], []).append((start, stop))
    return units


def capitals(text: str, language: str) -> str:
    """Convert a text to capitals, except HTML entities and tags.

    >>> capitals("Der Fluss ist groß &amp; kalt.", "de"), capitals("iyi", "tr")
    ('DER FLUSS IST GROSS &amp; KALT.', 'İYİ')
    """
    parts = _AS_IT_IS.split(text)
    parts[::2] = [part.translate(_LETTERS.get(language, {})).upper() for part in parts[::2]]
    return "".join(parts)


def title_case(text: str, language: str) -> str:
    """Capitalize the first letter of each word.

    >>> title_case("don't look back.", "en")
    "Don't Look Back."
    """
    return _INITIAL.sub(lambda match: capitals(match[0], language), text)


def without_stop(text: str, language: str) -> str:
    """Remove the full stop at the end of a text. An ellipsis stays."""
    return _STOP.sub("", text)


FORMS: tuple[Callable[[str, str], str], ...] = (capitals, title_case, without_stop)


@dataclass(frozen=True, slots=True)
class CaseCopies:
    """Makes copies in other case for a `share` of the pairs. The result depends only on the pair and the seed.

    languages: the language codes of the source and the target.
    """

    share: float
    seed: int
    languages: tuple[str, str]

    @classmethod
    def of(cls, settings: Settings) -> CaseCopies | None:
        data, seed = settings.data, settings.training.seed
        return cls(data.case_augmentation, seed, (data.src_lang, data.tgt_lang)) if data.case_augmentation else None

    def copy_of(self, pair: Pair) -> Pair | None:
        """Return a copy of the pair in one of the `FORMS`, which a hash of its text selects, or None.

        Only a share of the pairs has a copy. A pair has none if its source would not change, as in a script without
        case, or if its source would lose a full stop but its target has none.
        """
        number = crc32(f"case {self.seed}\n{pair.src}\n{pair.tgt}".encode("utf-8", "surrogatepass"))
        if number >= self.share * 2**32:
            return None
        form = FORMS[number % len(FORMS)]
        src, tgt = (form(text, base_language(code)) for text, code in zip(pair[:2], self.languages, strict=True))
        if src == pair.src or (form is without_stop and tgt == pair.tgt):
            return None
        return with_texts(pair, src, tgt)

"""Check that each side has the script and the language that the settings say.

Made to notice that a whole side is swapped or in another language. Libraries that identify languages well are large or
download their models. Of a single line it only reports what its script, or two common words, make clear.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from transduce.doctor.findings import Finding, percent
from transduce.doctor.sampling import Row, Sample
from transduce.text.scripts import script

N_ROWS = 20_000  # that are examined
_SCRIPTS = """
Cyrillic: ru uk bg mk be kk ky mn tg | Greek: el grc | Han: zh yue cmn | Kana Han: ja | Hangul Han: ko
Arabic: ar fa ur ps ug sd ckb | Hebrew: he yi | Devanagari: hi mr ne sa | Bengali: bn as | Tamil: ta | Telugu: te
Kannada: kn | Malayalam: ml | Gujarati: gu | Gurmukhi: pa | Thai: th | Lao: lo | Khmer: km | Myanmar: my
Georgian: ka | Armenian: hy | Ethiopic: am ti | Sinhala: si | Tibetan: bo
Latin: en de fr es it pt nl sv da no nb nn fi et lv lt pl cs sk sl hr hu ro sq tr id ms vi eu ca gl ga cy is mt af sw la
Latin: eo lb tl ha yo ig zu xh so oc br
"""
_SCRIPTS_OF = {
    code: frozenset(names.split())
    for names, codes in (row.split(":") for row in _SCRIPTS.strip().replace("\n", "|").split("|"))
    for code in codes.split()
}
_SHORT_CODES = """
eng=en deu=de ger=de fra=fr fre=fr spa=es ita=it por=pt nld=nl dut=nl rus=ru ukr=uk pol=pl ces=cs swe=sv zho=zh jpn=ja
kor=ko ara=ar ell=el tur=tr fin=fi hun=hu ron=ro
"""
_SHORT = dict(pair.split("=") for pair in _SHORT_CODES.split())
_WORDS = """
en the of and to in is that it was for on are with as his they be at have this from an by not you who what
de der die und das ist nicht ein eine ich zu mit auf für dem den von sie wir des sich auch im einem einer wird
fr le la les et est une des pas du dans que qui pour je il vous nous sur avec au ce ne elle sont cette aux
es el los las y es una del que por no con para se lo como más pero su está son al muy hay yo este esta
it il di che è la un una non per sono si con gli del della ho nel più anche ha dei alla lo questo i le
pt o os as e é um uma do da que não em para com se dos das na no por mais ele está são ao você muito isso
nl de het een en van is dat niet ik op te zijn met voor aan er hij ze wij maar om ook bij naar uit deze wat
sv och att det som en är på för med inte av till jag den har ett de han vi om var du så kan från detta
da og det at er en på for med ikke af til jeg den har et de han vi der som var du kan fra dette blev
fi ja on ei se että hän oli ovat mutta niin kun tämä olen minä sinä mitä kuin joka nyt vain myös siitä
pl i w na nie się z do to że jest jak o co tak ale po od za ma już jego dla czy przez są był tego
cs a se na v je že to s z do o i si ve ale jsem jak pro by tak co jsou byl když za jeho nebo této
hu a az és hogy nem egy van is ez meg volt csak de mint ki már még vagy azt kell ezt lesz nagyon itt
ro și de la în nu a cu că este pe un o să din mai pentru care sunt ce am fost se dar ca sau această
tr ve bir bu da de için çok ne ben o mi ile değil var daha gibi ama kadar sen olarak onun bunu şey
"""
_COMMON = {code: frozenset(words) for code, *words in map(str.split, _WORDS.split("\n")[1:-1])}
_WORD = re.compile(r"[^\W\d_]+")


def language(code: str) -> str:
    """The two-letter code of a language: en for en-US, EN_us and eng; unknown codes are returned as they are."""
    first = re.split("[-_]", code.lower())[0]
    return _SHORT.get(first, first)


def scripts(texts: Iterable[str]) -> dict[str, float]:
    """The fraction of each script among the letters, the largest first."""
    counts = Counter[str]()
    for character, n in Counter(character for text in texts for character in text).items():
        counts[script(character)] += n
    del counts[""]  # what is no letter
    total = counts.total()
    return {name: n / total for name, n in counts.most_common()}


def main_script(text: str) -> str:
    """The script of most letters of a text."""
    return next(iter(scripts([text])), "")


def looks_like(texts: Sequence[str]) -> str:
    """The language whose common words are a tenth of all words and clearly ahead of other languages, or nothing.

    >>> looks_like(["the dog is in the house", "that was for you"] * 30)
    'en'
    """
    counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
    total = counts.total()
    if total < 200:
        return ""
    shares = {code: sum(counts[word] for word in known) / total for code, known in _COMMON.items()}
    first, second = sorted(shares, key=lambda code: -shares[code])[:2]
    return first if shares[first] > 0.1 and shares[first] > 1.4 * shares[second] else ""


def is_clearly(text: str, code: str, other: str) -> bool:
    """Whether a line has two common words of one language and none that only the other has."""
    found = set(_WORD.findall(text.lower()))
    ours, theirs = _COMMON[code] - _COMMON[other], _COMMON[other] - _COMMON[code]
    return len(found & ours) >= 2 and not found & theirs


def languages(sample: Sample) -> Iterator[Finding]:
    """Each side has the script and the language that the settings say."""
    rows = [row for row in sample.some(N_ROWS) if row[0].strip() and row[1].strip()]
    if not rows:
        return
    wanted = [language(sample.settings.data.src_lang), language(sample.settings.data.tgt_lang)]
    sides = [[row[side] for row in rows] for side in (0, 1)]
    shares, seen = [scripts(side) for side in sides], [looks_like(side) for side in sides]
    found = list(map(_describe, shares, seen))
    summary = f"source {found[0]}, target {found[1]}"
    figures = {"scripts": [{k: round(v, 4) for k, v in share.items()} for share in shares], "looks_like": seen}
    yield Finding("languages", "note", summary, figures=figures)
    fits, fits_swapped = (list(map(_fits, shares, seen, codes)) for codes in (wanted, wanted[::-1]))
    if wanted[0] != wanted[1] and not all(fits) and all(fits_swapped):
        text = f"the sides are swapped: the languages should be {wanted[0]} → {wanted[1]}, but {summary}"
        yield Finding("languages", "obstacle", text, "swap the files")
    else:
        for name, fit, code, text in zip(("source", "target"), fits, wanted, found, strict=True):
            if fit is False:
                text = f"the {name} should be {code}, but it is {text}"
                yield Finding("languages", "warning", text, "is it the right file?")
    yield from _untranslated(rows, shares, seen)


def _untranslated(rows: list[Row], shares: list[dict[str, float]], seen: list[str]) -> Iterator[Finding]:
    """Targets in the language of the source."""
    src_script, tgt_script = (next(iter(share), "") for share in shares)
    if src_script != tgt_script:
        n = sum(main_script(row[1]) == src_script and main_script(row[0]) == src_script for row in rows)
        what = f"{src_script} letters"
    elif seen[0] and seen[1] and seen[0] != seen[1]:
        n = sum(is_clearly(row[1], seen[0], seen[1]) for row in rows)
        what = seen[0]
    else:
        return
    if (share := n / len(rows)) >= 0.02:
        text = f"{percent(share)} of the pairs seem to be untranslated: the target is in {what}, like the source"
        yield Finding("languages", "warning", text, "remove these pairs", {"share": round(share, 4)})


def _fits(share: dict[str, float], looks: str, code: str) -> bool | None:
    """Whether a side can be in a language; None if that language is unknown."""
    wanted = _SCRIPTS_OF.get(code)
    if wanted is None or not share:
        return None
    if sum(part for name, part in share.items() if name in wanted) < 0.3:
        return False
    return looks == code if looks and code in _COMMON else True


def _describe(share: dict[str, float], looks: str) -> str:
    shown = [f"{name} {percent(part)}" for name, part in list(share.items())[:2] if part >= 0.005]
    return (", ".join(shown) or "no letters") + (f", looks like {looks}" if looks else "")

"""Split running text into sentences, and join the translations of its sentences."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from transduce.text.languages import CODE, FINAL_SIGNS, IN_TOKEN, LONG_WORD, base_language, script, with_ascii_digits
from transduce.text.special import Span, characters

LONGEST = 1000
"""Maximum characters of a sentence. Longer sentences are cut between words. Strings longer than words do not count."""

_LONGEST_BLOCK = 10 * LONGEST  # sentencex takes quadratic time
_TOUCHING = re.compile(r"[\u2e80-\u312f\u3190-\ua4cf\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
"""Characters of Chinese and Japanese, which put no spaces between sentences."""
_TOUCHING_END = re.compile(r"[^\x00-\x7f…‥]$")  # ASCII excluded, for the dots of names such as System.Out
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "km", "my")
_LINE = re.compile(r"[^\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+")  # a line, or the cell of a table
_WIDE_SPACE = re.compile(r"[^\S ]")  # sentencex fails on these: it assumes that a space is one byte
_ELLIPSIS = re.compile(r"([…‥]|(?<=\.\.)\.)(?=[])”»\"'’]*\s+(.))")  # sentencex does not end a sentence at an ellipsis
_NARROW_ELLIPSIS = re.compile(r"(?<=\w\w)(?:…(?=[A-ZÀ-ÖØ-ÞΑ-ΩЀ-Я][^\W\d_])|\.\.\.(?=\s+I\b))")  # but not I...I
_FACE = re.compile(
    r"(?<=\w )(?:[\U0001f600-\U0001f64f\U0001f910-\U0001f92f\U0001f970-\U0001f97a]+|[:;]-?[()DP])"
    r"(?= [A-ZÀ-ÖØ-ÞΑ-ΩЀ-Я]\w* \w)"
)
"""Emoji faces and emoticons before a capital letter, which end a sentence. Hearts, as in "I ❤ New York", do not."""
_AFTER_WIDE_END = re.compile(r"(?<=[。！？])[0-9a-z]")  # sentencex does not end a sentence before these characters
_OTHER_ENDS = {"។ល។": "xx。", "។": "。", "៕": "。", "፡፡": "፡።", "৷": "।", "།": "।", "෴": "।", "׃": "।"}
"""Punctuation that ends sentences in Khmer, Amharic, Bengali, Tibetan, Sinhala and Hebrew, with replacements of equal
length that sentencex knows.
"""
_OTHER_END = re.compile("|".join(_OTHER_ENDS))
_WIDE_POINT = re.compile(r"(?<=\d)．(?=\d)")
_ARMENIAN_ENDS = {";": ",", "․": ",", ":": ",", ".": "։"}
"""Replacements for Armenian punctuation. sentencex ends sentences at the first three, but not at the full stop."""
_ARMENIAN_END = re.compile(r"[;․]|:(?!//|\s+[Ա-Ֆ])|(?<=\d)\.(?=\s+[Ա-Ֆ])")
_MAY_DIFFER = re.compile(
    r"[。！？][0-9a-z]|[\U0001f600-\U0001f97a…‥@`{&:;=¹²³⁰⁴-⁹\x1b។៕፡৷།෴׃\"“„«‹]|\.\.\.|://|www\.|(?<!\w)['‘]"
    r"|(?![0-9])\d"
)
"""A fast first test: `_for_sentencex` replaces nothing in a text in which this pattern finds nothing."""
# fast path for a text that is certainly one sentence
_PLAIN = re.compile(r"[A-Za-zÀ-ɏ][A-Za-zÀ-ɏ0-9 ,'’-]{9,900}[A-Za-zÀ-ɏ0-9][.!?]?")
_UNIT = re.compile(r"[^\s，；：、]*[\s，；：、]*")  # a text is cut between units
_LONGEST_WORD = 100
_LONG_WORD = re.compile(LONG_WORD)
_ADDRESS_OR_CODE = re.compile(
    rf"{CODE}|(?:[\w.+-]{{1,64}}@|[A-Za-z][A-Za-z0-9+.-]{{1,20}}://|www\.)(?:(?![<>()।\"'`]){IN_TOKEN})*[^\W_]/?"
)
_FOOTNOTE = re.compile(r"([.!?])([¹²³⁰⁴-⁹]+(?:\s[¹²³⁰⁴-⁹]+)*)(?=\s)")
_QUOTATION = re.compile(
    "|".join(
        rf"(?<!\w){first}(?:(?<=«)\s)?(?=\w)(?:[^{first}\n]|{first}(?=\w)){{1,1000}}?[{FINAL_SIGNS},]\s?{last}(?!\w)"
        for first, last in ('""', "''", "“”", "„“", "«»", "‹›", "‘’")
    )
)
_OPENING_MARKS = "\"'“„«‹‘"
_OPENING_MARK = re.compile(rf"\s[{_OPENING_MARKS}]")
_END_INSIDE = re.compile(rf"[{FINAL_SIGNS}]\s+(\w)")
_MARKER = re.compile(
    r"\s{0,99}+(?:[-–—•‣◦▪●·○■□►*#>+]{1,9}|\[[ xX]\]"
    r"|[①-⓿❶-➓㈠-㉇㉑-㉟㊀-㊿]\.?|[Ⅰ-ⅿ]{1,9}[.)]"
    r"|\(?(?:\d{1,3}(?:\.\d{1,3}){0,9}|[^\W\d_]|[ivxlc]{2,7}|[IVXLC]{2,7})\)"  # 2) (1) a) (iv)
    r"|((?:\d{1,3}(?:\.\d{1,3}){0,9}|[IVXLC]{1,7})[.။]\)?)(?!\s{0,9}\d{1,9}\.)"  # 1. 1.2. IV. but not a date
    r"|([^\W\d_]|(?=[ivx])x{0,3}(?:i[xv]|v?i{0,3}))\.)(?:\s+|$)"  # a. ii.
)
_LETTERED_LINE = re.compile(r"^[^\S\n]{0,20}([^\W\d_]|[IVXLC]{2,7})\.\s", re.MULTILINE)
_ENCLOSED = re.compile(
    rf"""[(\[（【「『《"“„«‹][^]()[（）【】「」『』《》"“”„«»‹›]*[{FINAL_SIGNS}][])）】」』》"”“»›]\s*"""
)
_BRACKETS = "([（【"
_CONTINUED = re.compile(
    r"""[])）】」』》"”“»›]+\s*$|(?<=[」』])(?:と|って)|(?<=[」』]\s)(?:と|って)"""
)  # positions at which sentencex wrongly begins a sentence
_INSIDE_PATHS = "/\\+=&%^|:;,"
_INITIAL = re.compile(rf"(?:^|[\s.])(?:(?!{_TOUCHING.pattern})[^\W\d_A-Za-z][^\w\s.]?){{1,2}}\.$")
"""Initials outside ASCII, such as พ.ย.: one or two letters, with their vowel signs, before a dot.

ASCII letters are left out because sentencex recognizes ASCII initials itself.
"""
_TONE_MARKS = "՛՜՞"  # Armenian question and exclamation marks, which follow a vowel inside a word
_LAST_WORD = re.compile(r"[^\W\d_][^\s()\[\]«»„“”\"'’]{0,20}(?=\.\s+$)")
_ABBREVIATIONS = {
    code: frozenset(words.split())
    for code, words in {
        "bg": "ул бул проф", "bn": "ডা ড মো রু", "fi": "tri", "fr": "dr mm mme mmes mlle mlles pr st ste",
        "gu": "ડૉ ડો શ્રી પ્રો રૂ તા નં", "he": "פרופ", "hi": "डॉ पं प्रो श्री रु रू",
        "hu": "özv ifj", "id": "jl", "ka": "აკად გვ იხ პროფ", "lo": "ດຣ ກມ", "mn": "км", "mr": "डॉ प्रा श्री",
        "ne": "डा प्रा श्री", "nl": "mevr", "pl": "al dr inż pl ul", "pt": "av", "ro": "bd dl dna str",
        "ru": "бул наб пер пл пр просп", "sr": "др проф ул",
        "si": "රු උදා ඒ බී සී ඩී ඊ එෆ් ජී එච් අයි ජේ කේ එල් එම් එන් ඕ පී ආර් එස් ටී යූ වී ඩබ්ලිව්",  # names of letters
        "ta": "ரூ டாக்டர் திரு திருமதி", "th": "ดร นพ พญ", "tr": "av sn", "uk": "пл пров просп",
        "vi": "bs gs pgs ths tp ts",
    }.items()
}  # fmt: skip
"""Abbreviations of each language that sentencex does not know, and whose dot does not end a sentence: titles, street
names, currencies and units.
"""
_SYLLABLES = ("Hangul", "Han", "Kana")
_ORDINAL = re.compile(r"(?<=[^\W\d_]\s\d\.\s)|(?<=[^\W\d_]\s\d\d\.\s)")  # im 5. Stock


def split_sentences(text: str, language: str | None) -> list[str]:
    """Split a text into sentences (at even indices) and separators (at odd indices). Joined, they are `text`.

    Separators are white space and list markers, such as `1.`, `a)` or a bullet. The first sentence is empty if the text
    begins with a separator. A sentence never contains a line end or a tab. `language`: the text's language. If it is
    None, each line or table cell is one sentence.
    """
    if _PLAIN.fullmatch(text) or (language is None and len(_LINE.findall(text)) <= 1):
        return [text]
    spans = map(re.Match.span, _LINE.finditer(text)) if language is None else _sentence_spans(text, language)
    parts, end = list[str](), 0
    for start, stop in spans:
        parts += [text[end:start], text[start:stop]]
        end = stop
    parts.append(text[end:])
    parts = ["", *parts] if parts[0] else parts[1:]
    if parts and not parts[-1]:
        del parts[-1]
    return parts or [""]


def n_sentences(text: str, language: str) -> int:
    return sum(1 for _ in _sentence_spans(text, language))


def joined_parts(sentences: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Join new sentences, such as translations, with the separators in the `parts` that `split_sentences` returned.

    Line breaks and list markers are kept. Spaces are kept unless only the old or only the new sentences are Chinese or
    Japanese. If the old sentences touch in another script, such as Burmese or Bengali, the new sentences get a space.
    """
    joined, others = [sentences[0]], [*sentences[1:], ""]
    for n, sentence in zip(range(1, len(parts), 2), others, strict=False):
        between = parts[n]
        is_space = not between.strip() and bool(not between or _LINE.fullmatch(between))
        touches = _TOUCHING.search(joined[-1][-1:] + sentence[:1]) is not None
        was_touching = _TOUCHING.search(parts[n - 1][-1:] + "".join(parts[n + 1 : n + 2])[:1]) is not None
        is_word_behind = "".join(parts[n + 1 : n + 2]).lstrip(_OPENING_MARKS)[:1].isalpha()  # not 👍, ¹ or </p>
        was_touching = was_touching or (not between and is_word_behind and bool(_TOUCHING_END.search(parts[n - 1])))
        keep = not is_space or touches == was_touching or not (joined[-1] and sentence)
        joined += [between if keep else " " * (not touches), sentence]
    return joined


def _sentence_spans(text: str, language: str) -> Iterator[Span]:
    code, letters = base_language(language), frozenset(_LETTERED_LINE.findall(text))
    for line in _LINE.finditer(text):
        start = before = line.start()
        ends, has_letters = _ends(text, line.span(), code), False
        for end in ends:
            has_letters = has_letters or any(map(str.isalpha, text[before:end]))
            before = end
            if not has_letters and end < line.end():
                continue  # the first numbers of the date 2024. 12. 1.
            start, has_letters = _skip_markers(text, (start, end), ends=ends, letters=letters), False
            while (whole := _ENCLOSED.match(text, start, end)) and (whole.end() == end or text[start] in _BRACKETS):
                for stop in _ends(text, (start + 1, whole.end()), code):
                    yield from _cut_span(text, start, stop, code)
                    start = stop
            yield from _cut_span(text, start, end, code)
            start = end


def _ends(text: str, span: Span, code: str) -> dict[int, None]:
    """The positions where the sentences of a span end, in order. A sentence includes the white space after it."""
    import sentencex

    ends, end = dict[int, None](), span[0]
    for block in _cut(text[slice(*span)], _LONGEST_BLOCK, code):
        for sentence in sentencex.segment(code, _for_sentencex(block, code)):
            is_continued = _CONTINUED.match(text, end, end + len(sentence)) or _is_inside_word(text, end)
            if is_continued or _is_abbreviated(text, end, code):
                ends.pop(end, None)
            end += len(sentence)
            is_mark_ahead = _OPENING_MARK.match(text, end - 2) is not None  # `_without_marks` made it a space
            ends[end - is_mark_ahead] = None
    return ends


def _for_sentencex(text: str, code: str) -> str:
    """Rewrite a text, without changing its length, so that sentencex splits it at the right positions.

    The inside of long words, URLs and code is replaced, so that they are not split. An ellipsis becomes a full stop
    unless a lower-case letter follows.
    """

    def hide(part: re.Match[str]) -> str:
        return part[0][0] + "x" * (len(part[0]) - 2) + part[0][-1]

    text = _WIDE_SPACE.sub(" ", _LONG_WORD.sub(hide, characters(text)))
    if code == "hy":
        text = _ARMENIAN_END.sub(lambda sign: _ARMENIAN_ENDS[sign[0]], text)
    if not _MAY_DIFFER.search(text):
        return text
    full_stop = "։" if code == "hy" else "."
    text = _WIDE_POINT.sub(".", with_ascii_digits(text))
    text = _FOOTNOTE.sub(r"\2\1", text)
    text = _QUOTATION.sub(_without_marks, text)
    text = _ELLIPSIS.sub(lambda sign: sign[1] if _is_small(sign[2]) else full_stop, text)
    if code != "de":  # German has capitals inside sentences
        text = _FACE.sub(lambda face: "x" * (len(face[0]) - 1) + ".", text)
    text = _NARROW_ELLIPSIS.sub(lambda sign: "xx."[-len(sign[0]) :], text)
    text = _OTHER_END.sub(lambda sign: _OTHER_ENDS[sign[0]], text)
    return _AFTER_WIDE_END.sub("三", _ADDRESS_OR_CODE.sub(hide, text))


def _without_marks(quotation: re.Match[str]) -> str:
    """Replace the marks of a quotation of several sentences, since sentencex does not split between the marks."""
    quoted, following = quotation[0], quotation.string[quotation.end() :].lstrip()[:1]
    if all(_is_small(letter) for letter in _END_INSIDE.findall(quoted)):
        return quoted
    core = quoted[1:-1].rstrip()
    n_signs = len(quoted) - 1 - len(core)
    if core[-1] == "," or _is_small(following):
        return f" {core}{'x' * n_signs}"
    return f" {core[:-1]}{'x' * n_signs}{core[-1]}"  # the end of the sentence, after the quotation mark


def _is_inside_word(text: str, end: int) -> bool:
    """Whether the punctuation mark before `end` is inside a word, such as a domain name or a path."""
    sign, following = text[end - 1 : end], text[end : end + 1]
    if sign in _TONE_MARKS:
        return following.isalpha()
    if sign not in ".?!" or not following:
        return False
    initial = _INITIAL.search(text, max(0, end - 9), end) if following.isalpha() else None
    # Two letters can be an abbreviation only in scripts without case; in other scripts they may be a word, as in "Да."
    is_initial = initial is not None and (sum(map(str.isalpha, initial[0])) == 1 or initial[0] == initial[0].swapcase())
    return is_initial or _is_small(following) or following in _INSIDE_PATHS


def _is_small(letter: str) -> bool:
    """Whether a letter has a different form at the start of a sentence. Unlike `islower`, False for Georgian."""
    return letter != letter.title()


def _is_abbreviated(text: str, end: int, code: str) -> bool:
    """Whether the dot and space before `end` belong to an abbreviation or ordinal number, and end no sentence."""
    if code == "de" and _ORDINAL.match(text, end):
        return True
    if (match := _LAST_WORD.search(text, max(0, end - 30), end)) is None:
        return False
    *before, word = match[0].split(".")
    following = text[end : end + 1]
    if all(before) and before:  # z.B., but not "..."
        longest = max(sum(map(str.isalpha, part)) for part in (*before, word))
        is_group = longest <= 1 + (code in ("si", "ta")) and script(word[0]) not in _SYLLABLES
        is_before_number = following.isdigit() and code != "en"  # at 5 p.m. 10 people came
        return _is_small(following) or is_before_number or (is_group and word == word.swapcase())
    if len(word) == 1:
        # A syllable can be a word, and the initial of a name is in the script of the name.
        is_name = script(word) not in _SYLLABLES and (not following.isalpha() or script(following) == script(word))
        return is_name and (not _is_small(word) or _is_small(following)) and (code, word) != ("en", "I")
    return word.lower() in _ABBREVIATIONS.get(code, ())


def _skip_markers(text: str, span: Span, *, ends: Collection[int], letters: frozenset[str]) -> int:
    """The position after list markers at the start of a sentence.

    A number with a dot is a marker only if a sentence may begin after it, unlike in the German date "1. Mai".
    `letters`: see `_is_letter_of_list`.
    """
    start, end = span
    while marker := _MARKER.match(text, start, end):
        number, letter = marker.groups()
        if number and marker.end() not in ends:
            if len(number) > 2 or number[0].isdigit():
                break
            letter = number  # C. and the like, which are Roman numerals too
        if letter and not _is_letter_of_list(letter, text[marker.end() : marker.end() + 2], letters):
            break
        start = marker.end()
    return start


def _is_letter_of_list(letter: str, following: str, letters: frozenset[str]) -> bool:
    """Whether a letter with a dot is a list marker, and not an initial or an abbreviation such as "z. B.".

    It is a marker if another line of the text begins with its neighbor in the alphabet or among Roman numerals, or if
    it is in lower case and the sentence after it begins with a capital. `letters`: all letters that begin lines.
    `following`: the two characters after the marker.
    """
    if not following or following[0].isdigit() or following[1:] == ".":
        return False
    neighbors = *(chr(ord(letter[0]) + step) for step in (-1, 1)), f"I{letter[0]}", f"{letter[0]}I"
    is_listed = not letters.isdisjoint(neighbors)
    return is_listed or (_is_small(letter[0]) and not _is_small(following[0]))


def _cut_span(text: str, start: int, end: int, code: str) -> Iterator[Span]:
    for piece in _cut(text[start:end], LONGEST, code):
        if core := piece.strip():
            first = text.index(core, start)
            yield first, first + len(core)
        start += len(piece)


def _cut(text: str, longest: int, code: str) -> Iterator[str]:
    """Cut a text into parts of at most `longest` characters. Words are cut only in languages without spaces."""
    start = size = 0  # start of a part, and number of its characters, not counting long words
    for unit in _UNIT.finditer(text) if len(text) > longest else ():
        is_word = code not in _WITHOUT_SPACES or _LONG_WORD.search(unit[0])
        length = 0 if is_word and len(unit[0]) > _LONGEST_WORD else len(unit[0])
        if size and size + length > longest:
            yield text[start : unit.start()]
            start, size = unit.start(), 0
        size += length
        while size > longest and not is_word:
            yield text[start : start + longest]
            start, size = start + longest, size - longest
    yield text[start:]

"""Translation memories: units become pairs, malformed files are refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from transduce.config.settings import Corpus
from transduce.data.corpus import read_pairs
from transduce.data.tmx import choose_language
from transduce.errors import DataError

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header/><body>\n'
FOOT = "</body></tmx>\n"


def unit(**segments: str) -> str:
    variants = "".join(
        f'<tuv xml:lang="{lang.replace("_", "-")}"><seg>{text}</seg></tuv>' for lang, text in segments.items()
    )
    return f"<tu>{variants}</tu>\n"


def write(folder: Path, content: str, encoding: str = "utf-8") -> Path:
    path = folder / "memory.tmx"
    path.write_bytes(content.encode(encoding))
    return path


def texts(path: Path, src: str = "en", tgt: str = "de") -> list[tuple[str, str, int]]:
    return [(p.src, p.tgt, p.line) for p in read_pairs(Corpus(path=path), src_lang=src, tgt_lang=tgt)]


def problem(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        texts(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_units_become_pairs_with_their_lines(tmp_path: Path) -> None:
    body = unit(en="One &amp; two", de="Eins &#228; <hi>zwei</hi>!") + unit(de_AT="Servus", EN_us="Hi", fr="Salut")
    path = write(tmp_path, HEAD + body + FOOT)
    assert texts(path) == [("One & two", "Eins ä zwei!", 4), ("Hi", "Servus", 5)]
    with pytest.raises(DataError, match="no unit has both 'de' and 'it'"):
        texts(path, "de", "it")


def test_markup_is_left_out_and_line_breaks_become_spaces(tmp_path: Path) -> None:
    segment = '\n  Press <bpt i="1">&lt;b&gt;</bpt>OK<ept i="1">&lt;/b&gt;</ept>\n  now<ph>{0}<sub>x</sub></ph>.\n'
    assert texts(write(tmp_path, HEAD + unit(en=segment, de="Jetzt") + FOOT))[0][0].strip() == "Press OK now."


def test_a_unit_without_one_side_gives_an_empty_one(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + unit(en="a", de="b") + unit(en="only") + unit(fr="rien") + FOOT)
    assert texts(path) == [("a", "b", 4), ("only", "", 5)]


def test_one_segment_never_becomes_both_sides(tmp_path: Path) -> None:
    """A segment whose code is exactly that of one side does not replace the other."""
    units = [unit(pt_PT="a", fr="b"), unit(pt_PT="c", pt_AO="d"), unit(pt_AO="e", pt_BR="f"), unit(pt_AO="g")]
    path = write(tmp_path, HEAD + "".join(units) + FOOT)
    assert texts(path, "pt-BR", "pt-PT") == [("", "a", 4), ("d", "c", 5), ("f", "e", 6), ("g", "", 7)]
    assert texts(path, "pt", "pt-BR") == [("a", "", 4), ("d", "c", 5), ("e", "f", 6), ("g", "", 7)]


@pytest.mark.parametrize("encoding", ["utf-16", "iso-8859-1"])
def test_the_declared_encoding_is_used(tmp_path: Path, encoding: str) -> None:
    content = HEAD.replace("UTF-8", encoding) + unit(en="a", de="schön") + FOOT
    assert texts(write(tmp_path, content, encoding)) == [("a", "schön", 4)]


def test_older_files_use_the_lang_attribute(tmp_path: Path) -> None:
    assert texts(write(tmp_path, (HEAD + unit(en="a", de="b") + FOOT).replace("xml:lang", "lang"))) == [("a", "b", 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEAD + unit(en="a", de="b") + "<tu></body>", ", line 5: not valid TMX: mismatched tag"),
        (HEAD + unit(en="a", de="b"), ", line 5: not valid TMX: no element found"),
        ("", ", line 1: not valid TMX: no element found"),
        ("just text\n", ", line 1: not valid TMX: syntax error"),
        ("<html><body/></html>", ": the root element is <html>, not <tmx>"),
        (HEAD + unit(en="a", fr="b") + FOOT, ": no unit has both 'en' and 'de'; languages in the file: en, fr"),
    ],
)
def test_malformed_files_are_one_line_errors(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path, content)
    assert problem(path) == f"{path}{message}"


def test_errors_name_the_line_of_invalid_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + unit(en="a", de="schön") + FOOT, "latin-1")
    assert problem(path) == f"{path}, line 4: not valid TMX: not well-formed (invalid token)"


def test_external_entities_are_refused_and_internal_ones_do_not_expand_without_bound(tmp_path: Path) -> None:
    head = "<?xml version='1.0'?>\n<!DOCTYPE tmx [{}]>\n<tmx><body>"
    (tmp_path / "secret").write_text("secret")
    external = head.format(f'<!ENTITY a SYSTEM "{(tmp_path / "secret").as_uri()}">')
    assert "line 3: the text contains an external XML entity" in problem(
        write(tmp_path, external + unit(en="x&a;", de="b") + FOOT)
    )
    laughs = "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9))
    bomb = head.format('<!ENTITY a0 "hahahahahaha">' + laughs)
    assert "amplification" in problem(write(tmp_path, bomb + unit(en="&a9;", de="b") + FOOT))


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """3 MB of units are read with less than 1 MB of memory."""
    path = tmp_path / "big.tmx"
    with path.open("w") as file:
        file.write(HEAD)
        for n in range(1500):
            file.write(unit(en=f"{n} " + "x" * 950, de=f"{n} " + "y" * 950))
        file.write(FOOT)
    tracemalloc.start()
    n_pairs = sum(1 for _ in read_pairs(Corpus(path=path), src_lang="en", tgt_lang="de"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_pairs == 1500 and peak < 1 << 20


def test_units_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + unit(en="a", de="b") * 5000 + "<broken")
    pairs: Iterator = read_pairs(Corpus(path=path), src_lang="en", tgt_lang="de")
    assert next(pairs).src == "a"


@pytest.mark.parametrize(
    ("wanted", "known", "found"),
    [
        ("en", {"en", "en-US"}, "en"),
        ("en", {"EN-us", "de"}, "EN-us"),
        ("en-GB", {"en-US"}, "en-US"),
        ("pt_br", {"pt-PT", "pt-BR"}, "pt-BR"),
        ("en", {"eng", "de"}, None),
        ("en", set(), None),
    ],
)
def test_choose_the_nearest_language(wanted: str, known: set[str], found: str | None) -> None:
    assert choose_language(wanted, known) == found

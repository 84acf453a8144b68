"""Translation memories: units become pairs, malformed files are refused."""

import json
import tracemalloc
from pathlib import Path

import pytest

from transduce.config.settings import Corpus, DataSettings, Settings
from transduce.data.clean import Cleaner
from transduce.data.pairs import infer_languages, read_pairs
from transduce.doctor.diagnose import diagnose
from transduce.errors import DataError
from transduce.logging import Log
from transduce.pipeline import prepare
from transduce.text.languages import match_language

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header/><body>\n'
FOOT = "</body></tmx>\n"

ADVICE = "; data.on_error = 'skip' leaves out records that cannot be read"
EN_DE = DataSettings(src_lang="en", tgt_lang="de")


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
    return [(p.src, p.tgt, p.line) for p in read_pairs(Corpus(path=path), DataSettings(src_lang=src, tgt_lang=tgt))]


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


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ("then<ph>..</ph>press", "then press"),
        ("then<x/>press<it pos='begin'>b</it>now", "then press now"),
        ("then<ph>\n</ph>press", "then press"),
        ("then\n<ph/>\npress", "then press"),
        ("Press <ph>{0}</ph> now<ph/>, or <ut/><ph/> not.", "Press now, or not."),
        ("un<bpt i='1'>b</bpt>do<ept i='1'>e</ept>ne <hi>x</hi>", "undone x"),
        ("<ph/> Press <ph/>", "Press"),
        ("按<ph/>键 ก<ph/>ข", "按键 กข"),
        ("می\u200cروم<ph/>کتاب", "می\u200cروم کتاب"),
        ("A<ph/>\u00a0: B", "A\u00a0: B"),
        (" a  b ", " a  b "),
    ],
)
def test_markup_between_two_words_is_a_space(tmp_path: Path, segment: str, text: str) -> None:
    assert texts(write(tmp_path, HEAD + unit(en=segment, de="x") + FOOT))[0][0] == text


AS_WRITTEN = [
    "می\u200cروم و \u200fسلام\u200e",
    "\u061cمرحبا",
    "在公园，一只猫！",
    "ไทย\u200bภาษา",
    "क्\u200dष हिन्दी",
    "Prix\u202f: 5\u00a0€",
    "zwei\u2028Zeilen",
    "e\u0301",
]


@pytest.mark.parametrize("name", ["a.tmx", "a.tsv", "a.jsonl", "a.parquet", "two files"])
def test_every_reader_gives_the_text_as_it_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    corpus = Corpus(path=path)
    if name == "a.tmx":
        write(tmp_path, HEAD + "".join(unit(en=text, de=text) for text in AS_WRITTEN) + FOOT).rename(path)
    elif name == "a.tsv":
        path.write_text("".join(f"{text}\t{text}\n" for text in AS_WRITTEN), encoding="utf-8")
    elif name == "a.jsonl":
        path.write_text("\n".join(json.dumps({"src": text, "tgt": text}) for text in AS_WRITTEN), encoding="utf-8")
    elif name == "a.parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"src": AS_WRITTEN, "tgt": AS_WRITTEN}), path)
    else:
        path.write_text("".join(f"{text}\n" for text in AS_WRITTEN), encoding="utf-8")
        corpus = Corpus(src=path, tgt=path)
    pairs = list(read_pairs(corpus, EN_DE))
    assert [pair[:2] for pair in pairs] == [(text, text) for text in AS_WRITTEN]
    assert [Cleaner(DataSettings()).by_rules(pair) for pair in pairs] == pairs


def test_the_first_variant_with_text_counts(tmp_path: Path) -> None:
    empty, full = ('<tuv xml:lang="{}"><seg>{}</seg></tuv>'.format(*variant) for variant in (("en", " "), ("en", "a")))
    rest = '<tuv xml:lang="en"><seg>b</seg></tuv><tuv xml:lang="de"><seg>x</seg></tuv></tu>\n'
    body = f"<tu>{empty}{full}{rest}<tu>{full.replace('en', 'en-US')}{empty}{rest.replace('b', '')}"
    assert texts(write(tmp_path, HEAD + body + FOOT)) == [("a", "x", 4), ("a", "x", 5)]


@pytest.mark.parametrize(("srclang", "text"), [("en-US", "color"), ("EN_us", "color"), ("*all*", "colour")])
def test_the_variant_of_the_header_comes_first(tmp_path: Path, srclang: str, text: str) -> None:
    body = unit(en_GB="colour", en_US="color", de="x") + unit(en_US="color", en_GB="colour", de="x")
    path = write(tmp_path, HEAD.replace("<header/>", f'<header srclang="{srclang}"/>') + body + FOOT)
    assert texts(path) == [(text, "x", 4), (text, "x", 5)]
    assert texts(path, "de", "en") == [("x", text, 4), ("x", text, 5)]
    assert texts(path, "en-GB", "en-US") == [("colour", "color", 4), ("colour", "color", 5)]


BROKEN = [
    (unit(en="a \x1f", de="b"), "not valid TMX"),
    (unit(en="a &#2; b", de="b"), "not valid TMX"),
    (unit(en="a & b", de="b"), "not valid TMX"),
    (unit(en="a < b", de="b"), "not valid TMX"),
    (unit(en="a &notanentity; b", de="b"), "not valid TMX"),
    (unit(en="a", de="b").replace("</seg>", "", 1), "not valid TMX"),
    (unit(en="a", de="b").replace("</tu>", ""), "not valid TMX"),
    (unit(en="a", de="x" * 200_000 + " & " + "y" * 200_000), "not valid TMX"),
    (unit(en="a", de="x" * 2_000_000), "longer than data.max_record"),
    ('<tu><tuv xml:lang="en"/></tu>\n', "<tu> without <seg>"),
    ("<tu/>\n", "<tu> without <seg>"),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize(("broken", "reason"), BROKEN)
def test_a_unit_that_cannot_be_read_is_counted_and_the_others_stay(
    tmp_path: Path, broken: str, reason: str, encoding: str
) -> None:
    body = unit(en="a", de="b") * 3 + broken + unit(en="c", de="d") * 3 + broken + unit(en="e", de="f")
    path = write(tmp_path, HEAD.replace("UTF-8", encoding) + body + FOOT, encoding)
    pairs = list(read_pairs(Corpus(path=path), EN_DE.model_copy(update={"on_error": "skip"})))
    assert [pair[:2] for pair in pairs if not pair.fault] == [("a", "b")] * 3 + [("c", "d")] * 3 + [("e", "f")]
    assert [(pair.fault.kind, pair.line) for pair in pairs if pair.fault] in (
        [(reason, 7), (reason, 11)],
        [(reason, 8), (reason, 12)],  # a unit without an end: it is noticed where the next one starts
    )
    held_out = read_pairs(Corpus(path=path), EN_DE, held_out=True)
    if reason.startswith("longer"):
        assert len(texts(path)) == 9
    if reason.startswith("<"):  # structure without text never stops
        assert len(texts(path)) == 9 and len(list(held_out)) == 7
        return
    if reason.startswith("not"):
        assert problem(path).endswith(ADVICE) and reason in problem(path)
    with pytest.raises(DataError, match=reason) as caught:
        list(held_out)
    assert "on_error" not in str(caught.value)


def test_bytes_that_are_not_in_the_encoding_are_one_unit(tmp_path: Path) -> None:
    head = HEAD.replace("UTF-8", "windows-1252").encode()
    body = unit(en="caf\xe9", de="b").encode("cp1252") + b"<tu><tuv xml:lang='en'><seg>\x81</seg></tuv></tu>"
    (tmp_path / "a.tmx").write_bytes(head + body + unit(en="c", de="d").encode() + FOOT.encode())
    pairs = list(read_pairs(Corpus(path=tmp_path / "a.tmx"), EN_DE.model_copy(update={"on_error": "skip"})))
    assert [(pair.src, pair.fault.kind if pair.fault else "") for pair in pairs] == [
        ("caf\xe9", ""),
        ("", "not valid TMX"),
        ("c", ""),
    ]


@pytest.mark.parametrize("doctype", ['<!DOCTYPE tmx SYSTEM "tmx14.dtd">', ""])
def test_entities_of_the_dtd_that_is_not_loaded(tmp_path: Path, doctype: str) -> None:
    good, bad = unit(en="a&nbsp;b&hellip;&amp;&lt;", de="x"), unit(en="a &word; b", de="x")
    head = HEAD.replace(HEAD.splitlines()[1], doctype)
    assert texts(write(tmp_path, head + good + FOOT)) == [("a\u00a0b…&<", "x", 4)]
    path = write(tmp_path, head + good + bad + good + FOOT)
    assert problem(path) == f"{path}, line 5: not valid TMX: undefined entity &word;{ADVICE}"
    pairs = list(read_pairs(Corpus(path=path), EN_DE.model_copy(update={"on_error": "skip"})))
    assert [pair.src for pair in pairs] == ["a\u00a0b…&<", "", "a\u00a0b…&<"]


def test_a_utf8_file_that_claims_to_be_utf16(tmp_path: Path) -> None:
    content = HEAD.replace("UTF-8", "utf-16") + unit(en="a", de="schön") + FOOT
    assert texts(write(tmp_path, content)) == [("a", "schön", 4)]


@pytest.mark.parametrize(
    ("srclang", "units", "asked", "languages"),
    [
        ("", unit(en_US="a", de="b"), {}, ("en-US", "de")),
        ("*all*", unit(en_US="a", de="b"), {}, ("en-US", "de")),
        ("de", unit(en_US="a", de="b"), {}, ("de", "en-US")),
        ("DE-de", unit(en_US="a", de="b"), {}, ("de", "en-US")),
        ("de", unit(en_US="a", de="b"), {"src_lang": "en"}, ("en", "de")),
        ("de", unit(en_US="a", de="b"), {"tgt_lang": "de"}, ("en-US", "de")),
        ("", unit(pt_PT="a", pt_BR="b"), {}, ("pt-PT", "pt-BR")),
        ("fr-FR", unit(en_US="a", fr="b") + unit(en_GB="a", fr_CA="b"), {}, ("fr", "en")),
    ],
)
def test_a_memory_of_two_languages_needs_no_options(
    tmp_path: Path, srclang: str, units: str, asked: dict[str, str], languages: tuple[str, str]
) -> None:
    path = write(tmp_path, HEAD.replace("<header/>", f'<header srclang="{srclang}"/>') + units + FOOT)
    assert infer_languages(path, DataSettings(**asked)) == languages


def test_other_numbers_of_languages_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + unit(en="a", de="b", fr="c") + FOOT)
    with pytest.raises(DataError, match=r"data.src_lang and data.tgt_lang: .* segments in de, en, fr; name two"):
        infer_languages(path, DataSettings())


def test_training_takes_prints_and_stores_the_languages_of_a_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    units = "".join(unit(de=f"Zahl {n}", en=f"number {n}") for n in range(300)) + BROKEN[0][0]
    path = write(tmp_path, HEAD.replace("<header/>", '<header srclang="en"/>') + units + FOOT)
    data = {"train": [{"path": str(path)}], "on_error": "skip"}
    more = {"tokenizer": {"kind": "char"}, "model": {"preset": "tiny"}, "training": {"max_updates": 1}}
    prepare(Settings.from_mapping({"data": data, **more}), tmp_path / "run", log=Log())
    said = capsys.readouterr().err
    assert f"{path}: source en, target de; data.src_lang" in said
    assert f"dropped 1: not valid TMX, e.g. {path}:304\n" in said
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
    assert (kept["src_lang"], kept["tgt_lang"]) == ("en", "de")
    cleaning = json.loads((tmp_path / "run" / "data.json").read_text())["sets"][0]["cleaning"]
    assert cleaning["read"] == 301 and [tally["reason"] for tally in cleaning["dropped"]] == ["not valid TMX"]
    findings = diagnose(Settings.from_mapping({"data": data, **more}), seconds=0.1).findings
    assert any(one.check == "unreadable" and "not valid TMX; first: " in one.text for one in findings)


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
        (HEAD + unit(en="a", de="b") + "<tu></body>", ", line 5: not valid TMX: no element found"),
        (HEAD + unit(en="a", de="b"), ", line 5: not valid TMX: no element found"),
        ("", ", line 1: not valid TMX: no element found"),
        ("just text\n", ", line 1: not valid TMX: syntax error"),
        ("<html><body/></html>", ": the root element is <html>, not <tmx>"),
        (HEAD + unit(en="a", fr="b") + FOOT, ": no unit has both 'en' and 'de'; languages in the file: en, fr"),
    ],
)
def test_malformed_files_are_one_line_errors(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path, content)
    assert problem(path).removesuffix(ADVICE) == f"{path}{message}"


def test_errors_name_the_line_of_invalid_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + unit(en="a", de="schön") + FOOT, "latin-1")
    assert problem(path) == f"{path}, line 4: not valid TMX: not well-formed (invalid token){ADVICE}"


def test_entities_that_a_file_declares_are_neither_loaded_nor_expanded(tmp_path: Path) -> None:
    head = "<?xml version='1.0'?>\n<!DOCTYPE tmx [{}]>\n<tmx><body>"
    (tmp_path / "secret").write_text("secret")
    external = f'<!ENTITY a SYSTEM "{(tmp_path / "secret").as_uri()}">'
    laughs = "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9))
    for declared, name in ((external, "a"), ('<!ENTITY a0 "hahahahahaha">' + laughs, "a9")):
        path = write(tmp_path, head.format(declared) + unit(en=f"x&{name};", de="b") + FOOT)
        assert f"line 3: not valid TMX: undefined entity &{name};" in problem(path)


@pytest.mark.parametrize("n", [1 << 20, 1 << 23])
def test_a_long_unit_takes_linear_time_and_lines_are_counted_in_it(tmp_path: Path, n: int) -> None:
    """Each byte of a unit is searched once, although units are found in chunks of 64 KiB."""
    path = write(tmp_path, HEAD + unit(en="x\n" * n, de="b") + unit(en="a", de="b") + FOOT)
    settings = EN_DE.model_copy(update={"max_record": 1 << 16, "on_error": "skip"})
    pairs = list(read_pairs(Corpus(path=path), settings))
    assert [(pair.src, pair.line) for pair in pairs] == [("", 4), ("a", 5 + n)]
    assert pairs[0].fault is not None and pairs[0].fault.kind == "longer than data.max_record"


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """3 MB of units are read with less than 1 MB of memory."""
    path = tmp_path / "big.tmx"
    with path.open("w") as file:
        file.write(HEAD)
        for n in range(1500):
            file.write(unit(en=f"{n} " + "x" * 950, de=f"{n} " + "y" * 950))
        file.write(FOOT)
    tracemalloc.start()
    n_pairs = sum(1 for _ in read_pairs(Corpus(path=path), EN_DE))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_pairs == 1500 and peak < 1 << 20


@pytest.mark.parametrize(
    ("wanted", "known", "found"),
    [
        ("en", {"en", "en-US"}, "en"),
        ("en", {"EN-us", "de"}, "EN-us"),
        ("en-GB", {"en-US"}, "en-US"),
        ("pt_br", {"pt-PT", "pt-BR"}, "pt-BR"),
        ("en", {"enm", "de"}, None),
        ("en", {"eng", "de"}, "eng"),
        ("en", set(), None),
    ],
)
def test_choose_the_nearest_language(wanted: str, known: set[str], found: str | None) -> None:
    assert match_language(wanted, known) == found

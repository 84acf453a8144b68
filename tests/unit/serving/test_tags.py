"""Tags and kept parts in the right places of a translation."""

import os
import re
import shutil
import string
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Collection, Mapping, Sequence
from html import escape, unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from transduce.decoding.alignment import Link
from transduce.errors import SettingsError
from transduce.serving.tags.markup import MarkupRules, Segment, parse_markup
from transduce.serving.tags.protected import DEFAULT_KINDS, KINDS, Kind, find_kinds, find_terms
from transduce.serving.tags.transfer import MOST_PARTS, Element, project, words_of
from transduce.text.placeholders import KEPT_WORDS

HTML, XML = MarkupRules(kind="html"), MarkupRules(kind="xml")


def quoted(text: str) -> str:
    return escape(text, quote=False)


def kept(
    text: str, kinds: Collection[Kind] = DEFAULT_KINDS, terms: Mapping[str, str] = {}, root: Element | None = None
) -> Element:
    """The root of a text of which the terms of a glossary and parts of these kinds are kept."""
    root = root or Element(0, len(text))
    root.keep(find_terms(text, terms), quoted)
    root.keep(find_kinds(text, kinds), quoted)
    return root


def in_order(source: str, target: str, order: list[int]) -> list[Link]:
    """Link word number i of the target to word order[i] of the source, -1: to none."""
    places = [m.span() for m in re.finditer(r"\S+", source)]
    found = zip((m.span() for m in re.finditer(r"\S+", target)), order, strict=True)
    return [Link(*places[i], *place) for place, i in found if i >= 0]


def projected(root: Element, source: str, target: str, links: Sequence[Link]) -> str:
    """The target, a translation of one sentence with these links, with the elements of the source."""
    words = words_of(target, links, src=0, tgt=0, number=0)
    return project(root, source, target, words, [(0, len(source))], quoted)


def translated(document: str, target: str, order: list[int], kinds: Collection[Kind] = ()) -> str:
    (segment,) = parse_markup(document, HTML)
    assert isinstance(segment, Segment)
    root = kept(segment.text, kinds, root=segment.root)
    return projected(root, segment.text, target, in_order(segment.text, target, order)).strip()


@pytest.mark.parametrize(
    ("document", "target", "order", "expected"),
    [
        ("a <b>red hat</b> here", "ein roter Hut hier", [0, 1, 2, 3], "ein <b>roter Hut</b> hier"),
        ("I <b>gave</b> it <i>up</i>", "A U B G", [0, 3, 2, 1], "A <i>U</i> B <b>G</b>"),
        ("x <a href='?a&b'>one <i>two</i></a>", "Z E X", [2, 1, 0], "<a href='?a&b'><i>Z</i> E</a> X"),
        ("<b>all of it</b>", "das alles hier ganz", [-1, 0, -1, -1], "<b>das alles hier ganz</b>"),
        ("a <b>b c</b> d", "A B x C D", [0, 1, -1, 2, 3], "A <b>B x C</b> D"),
        ("a <b>the</b> c", "A C", [0, 2], "A <b></b>C"),
        ("<b>T</b>he d<i>o</i>g", "Der Hund", [0, 1], "<b>Der</b> <i>Hund</i>"),
        ("dog<b>!</b> runs", "Hund! läuft", [0, 1], "Hund!<b></b> läuft"),
        ("<u>the <b>h</b>ats</u> here", "hier Die Hüte", [2, 0, 1], "hier <u>Die <b>Hüte</b></u>"),
        ("a <b>ශ්‍රී</b> <i>ලංකා</i> c", "C ශ්‍රී ලංකා A", [3, 1, 2, 0], "C <b>ශ්‍රී</b> <i>ලංකා</i> A"),
        ("one <img src=x> two", "Eins Zwei", [0, 1], "Eins <img src=x> Zwei"),
        ("one<img> two", "Eins Zwei", [0, 1], "Eins<img> Zwei"),
        ("<img> one", "Eins", [0], "<img> Eins"),
        ("one<!-- c --> two", "Eins Zwei", [0, 1], "Eins<!-- c --> Zwei"),
        ("run <code>f(x)</code> now", "lauf G jetzt", [0, 1, 2], "lauf <code>f(x)</code> jetzt"),
        ("run <code>f(x)</code> now", "f(x) jetzt f(x)", [1, 2, 0], "<code>f(x)</code> jetzt"),
        ("run <code>f(x)</code> now", "lauf jetzt", [0, 2], "lauf <code>f(x)</code> jetzt"),
        ("run <code>f(x)</code>, now", "jetzt", [2], "<code>f(x)</code> jetzt"),
        ("a &lt; b &amp; <b>c</b>", "A < B & C", [0, 1, 2, 3, 4], "A &lt; B &amp; <b>C</b>"),
        ("no <i translate=no>Big Corp</i> yes", "ja Groß Firma", [3, 1, 2], "ja <i translate=no>Big Corp</i>"),
    ],
)  # fmt: skip
def test_tags_follow_their_words(document: str, target: str, order: list[int], expected: str) -> None:
    assert translated(document, target, order) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("see https://a.b/c?d=1#e, or (www.x.org).", ["https://a.b/c?d=1#e", "www.x.org"]),
        ("mail a.b+c@d-e.co.uk.", ["a.b+c@d-e.co.uk"]),
        ("@anna, ask @b.c-d. @ 5", ["@anna", "@b.c-d"]),
        ("{} {0} {name!r} ${x} #{y} {{ z }} %s %(n)d %1$s %.2f", 10),
        ("50% of it, 100 %, {not this}, a@b, <b>", []),
        ("<0>x</0>", ["<0>", "</0>"]),
        ("%s " * 200, MOST_PARTS),
    ],
)
def test_what_is_protected(text: str, parts: list[str] | int) -> None:
    found = [leaf.copy for leaf in kept(text).leaves()]
    assert found == parts or len(found) == parts


def parts_of(text: str) -> list[str]:
    return [part for *_, part in find_kinds(text, ["placeholders"])]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("%dKB %lld %zu %I64d %1$sx%2$s %sdog %d%%", "%d %lld %zu %I64d %1$s %2$s %s %d %%"),
        ("%-5s%*d %.*f %,.2f %#x %+05.1e %2$*1$d", "%-5s %*d %.*f %,.2f %#x %+05.1e %2$*1$d"),
        ("%@x %1$@ %#@files@ %<tY %1$tB %S %n", "%@ %1$@ %#@files@ %<tY %1$tB %S %n"),
        ("%(name)sx %(a b)5.2f %r %{count} %name%.", "%(name)s %(a_b)5.2f %r %{count} %name%"),
        ("50% of 100 %, 100%ige, 3%-ig, 5% (of) {not this} p{", ""),
        ("{0} {} {name!r:>10} {x.y[0]:{w}.{p}} {a[b c]} {:%H:%M} {{x}} {{ y|z }} {{{r}}} {% if x %}",
         "{0} {} {name!r:>10} {x.y[0]:{w}.{p}} {a[b_c]} {:%H:%M} {{x}} {{_y|z_}} {{{r}}} {%_if_x_%}"),
        ("${x} #{y} $name US$ 5 ${a + b} { z }", "${x} #{y} $name ${a_+_b} {_z_}"),
        ("<0>a</0> <1/>", "<0> </0> <1/>"),
        ("{a,number,#.##} {b, date} {c, choice, 0#no|1#one {d}}",
         "{a,number,#.##} {b,_date} {c,_choice,_0#no|1#one_{d}}"),
        ("x {n, plural, =0 {no {m} files} other {it''s # '{'}} y",
         "{n,_plural,_=0_{no_{m}_files}_other_{it''s_#_'{'}}"),
        ("{g, select, male {{n, plural, one {a {b}} other {c}}} other {d}}.",
         "{g,_select,_male_{{n,_plural,_one_{a_{b}}_other_{c}}}_other_{d}}"),
    ],
)  # fmt: skip
def test_placeholders_are_those_of_their_grammars(text: str, parts: str) -> None:
    assert [part.replace(" ", "_") for part in parts_of(text)] == parts.split()


LETTERS = st.text(alphabet="abxyé ,.!", max_size=6)
NAMES = st.sampled_from(["", "name", "0", "a.b", "a[0]", "a[x y]"])
SPECS = st.sampled_from(["", ":", ":>10", ":.2f", ":{w}", ":{w}.{p}", ":%d %m"])
FLAGS = st.sampled_from(["", "-", "+", "#", "0", "-+"])
SIZES = st.sampled_from(["", "5", "10", ".2", ".", "5.1"])


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(LETTERS, NAMES, st.sampled_from(["", "!r", "!s"]), SPECS), max_size=5))
def test_replacement_fields_are_those_of_pythons_formatter(fields: list[tuple[str, str, str, str]]) -> None:
    text = "".join(f"{before}{{{name}{conversion}{spec}}}" for before, name, conversion, spec in fields)
    parsed = [parts for parts in string.Formatter().parse(text) if parts[1] is not None]
    assert len(parsed) == len(fields)
    assert [next(iter(string.Formatter().parse(part)))[1:] for part in parts_of(text)] == [one[1:] for one in parsed]


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(LETTERS, FLAGS, SIZES, st.sampled_from("diouxXeEfFgGrsa%")), max_size=5))
def test_conversions_are_those_of_pythons_formatting(fields: list[tuple[str, ...]]) -> None:
    """Everything but the conversions can be left out without a change in the arguments that they need."""
    text = "".join("".join([before, "%", *("%" if rest[-1] == "%" else rest)]) for before, *rest in fields)
    values = [7] * sum(rest[-1] != "%" for _, *rest in fields)
    kept_parts = parts_of(text)
    assert len(kept_parts) == len(fields)
    formatted = text % tuple(values)
    rest = iter(values)
    each = [part % (() if part == "%%" else next(rest)) for part in kept_parts]
    assert "".join(a + b for (a, *_), b in zip(fields, each, strict=True)) == formatted


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LETTERS, st.sampled_from(["$name", "${name}", "$_x1"])), max_size=5))
def test_templates_are_those_of_pythons_templates(fields: list[tuple[str, str]]) -> None:
    text = " ".join(before + " " + field for before, field in fields)
    identifiers = [match["named"] or match["braced"] for match in string.Template.pattern.finditer(text)]
    assert [part.strip("${}") for part in parts_of(text)] == identifiers


@pytest.mark.skipif(shutil.which("msgfmt") is None, reason="needs msgfmt of GNU gettext")
@pytest.mark.parametrize(
    ("language", "texts"),
    [
        ("c", ["%dKB", "%lld of %zu", "%1$sx%2$s", "%sdog", "%d%% of %s", "%-5s%*d", "%hhu%jd%Lf", "%5.1f%%"]),
        ("objc", ["%@dog", "%1$@x%2$@", "%ld%%", "%lu of %lld"]),
        ("java-printf", ["%,d KB", "%1$tY-%1$tm", "%sdog%n", "%1$sx%2$s", "%S%%", "%tB"]),
        ("java", ["{0}x{1}", "{0,number,#.##} of {1,date,short}", "{0,choice,0#no files|1#one file|1<{0} files}"]),
        ("python", ["%(name)sdog", "%rdog %5.2f%%", "%(a)d%(b)s"]),
        ("python-brace", ["{0}x{1}", "{name!r:>10}", "{a.b[0]:{width}}"]),
    ],
)
def test_gettext_misses_no_placeholder(tmp_path: Path, language: str, texts: list[str]) -> None:
    """msgfmt compares the placeholders of a text and its translation; here the translation has the kept parts only."""
    file = tmp_path / "x.po"
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'

    def check(translations: list[str]) -> int:
        entries = (
            f'#, {language}-format\nmsgid "{text}"\nmsgstr "{translation}"\n'
            for text, translation in zip(texts, translations, strict=True)
        )
        file.write_text("\n".join([header, *entries]))
        return subprocess.run(["msgfmt", "-c", "-o", os.devnull, file], capture_output=True, check=False).returncode

    assert check(["ü ".join(["", *parts_of(text), ""]) for text in texts]) == 0
    assert check(["ü"] * len(texts)) != 0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("请看https://a.b/c?d=e，谢谢", ["https://a.b/c?d=e"]),
        ("请看https://a.b查看详情。", ["https://a.b"]),
        ("请看http://例え.jp/道?あ=1。谢谢", ["http://例え.jp/道?あ=1"]),
        ("请写信到a.b@c.com谢谢，或почта@例え.jp吧", ["a.b@c.com", "почта@例え.jp"]),
        ("你好@anna你好@小明 好", ["@anna", "@小明"]),
        ("价格$name元", ["$name"]),
        ("ดูwww.a.b/cขอบคุณ", ["www.a.b/c"]),
    ],
)
def test_kept_parts_end_where_text_without_spaces_goes_on(text: str, parts: list[str]) -> None:
    assert [leaf.copy for leaf in kept(text).leaves()] == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1 or 22, 3.5; 1,000.50 (7) and 1.000,5.", ["1", "22", "3.5", "1,000.50", "7", "1.000,5"]),
        ("50% of 12.5 %, -3 and \u22124; 3-4 kg, +7", ["50%", "12.5 %", "-3", "\u22124", "3-4", "+7"]),
        ("1 000 000 \u20ac, $1'000, 10\u202f000, in 2020 500", ["1 000 000", "1'000", "10\u202f000", "2020", "500"]),
        ("在10：30来了50％的", ["10：30", "50％"]),
        ("2026-11-22T10:00:30Z, 22.11.2026 14:25 5/6", ["2026-11-22T10:00:30Z", "22.11.2026", "14:25", "5/6"]),
        ("B2 COVID-19 A4, 3rd 10km 3.5km H2O x_1 1st", []),
        ("5-year-old {0} %1$d http://x.y/1 a1@b.c", ["5", "{0}", "%1$d", "http://x.y/1", "a1@b.c"]),
        ("\u0661\u0662\u066b\u0665 \uff11\uff12", ["\u0661\u0662\u066b\u0665", "\uff11\uff12"]),
    ],
)
def test_numbers_are_kept_if_asked_for(text: str, parts: list[str]) -> None:
    assert [leaf.copy for leaf in kept(text, KINDS).leaves()] == parts
    assert not any(re.match(r"[-+\d]", leaf.copy) for leaf in kept(text).leaves())
    assert not list(kept(text, ()).leaves())


@pytest.mark.parametrize(
    ("source", "target", "order", "expected"),
    [
        ("it costs 1,000.5 now", "jetzt kostet es 1.000,5", [3, 1, 0, 2], "jetzt kostet es 1,000.5"),
        ("on 2026-11-22 at 14:25", "um 14.25 am 22.11.2026 da", [2, 3, 0, 1, -1], "um 14:25 am 2026-11-22 da"),
        ("5 of 1.5 %", "1,5 % von 5", [2, 3, 1, 0], "1.5 % von 5"),
        ("7 men", "sieben", [0], "7"),
        ("7 men", "M\u00e4nner: 8", [1, 0], "M\u00e4nner: 7"),
        ("7 men", "2 M\u00e4nner", [-1, 1], "2 7 M\u00e4nner"),
    ],
)
def test_numbers_replace_what_the_model_wrote(source: str, target: str, order: list[int], expected: str) -> None:
    root = kept(source, ["numbers"])
    assert projected(root, source, target, in_order(source, target, order)) == expected


def test_glossary_terms_are_whole_words() -> None:
    source = "the red hat of Hattie, a hat"
    root = kept(source, (), {"hat": "Mütze", "red hat": "Rotkappe & Co"})
    assert [(leaf.start, leaf.end, leaf.verbatim) for leaf in root.leaves()] == [
        (4, 11, "Rotkappe &amp; Co"), (25, 28, "Mütze"),
    ]  # fmt: skip
    target = "der rote Hut von Hattie, eine Mütze"
    found = projected(root, source, target, in_order(source, target, list(range(7))))
    assert found == "der Rotkappe &amp; Co von Hattie, eine Mütze"


def test_scripts_without_spaces_between_words() -> None:
    root = kept("用户{n}有3个红帽子", KINDS, {"帽子": "HUT", "用户{": "no"})
    assert [leaf.copy for leaf in root.leaves()] == ["no", "3", "HUT"]
    source, target = "user {n} has 3 files", "用户{n}有3个文件"
    links = [Link(0, 4, 0, 2), Link(5, 8, 2, 5), Link(9, 12, 5, 6), Link(15, 20, 8, 10)]
    assert projected(kept(source, KINDS), source, target, links) == target


@pytest.mark.parametrize(
    ("document", "target", "order", "expected"),
    [
        ("<code>a</code> {b}", "Zwei", [1], "<code>a</code> {b}"),
        (
            "x <i>{a} <code>b</code></i> <b><code>c</code> d</b>",
            "",
            [],
            "<i>{a} <code>b</code></i> <b><code>c</code></b>",
        ),
        ("x {a}{b} (<b>{c}</b>) y.", "Ü Ö .", [0, 3, -1], "Ü {a}{b} <b>{c}</b> Ö ."),
        ("x <b>{a}</b> y", "X (Y)", [0, 2], "X <b>{a}</b> (Y)"),
    ],
)
def test_parts_side_by_side_keep_their_distance(document: str, target: str, order: list[int], expected: str) -> None:
    assert translated(document, target, order, DEFAULT_KINDS) == expected


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "<b>", "</b>", "<i>", "</i>", "{}", "{}", ",", "<br>"]), max_size=16), st.data())
def test_kept_parts_never_touch_words_or_each_other(tokens: list[str], draw: st.DataObject) -> None:
    document = "".join(f"{{{i}}} " if one == "{}" else f"{one} " for i, one in enumerate(tokens))
    for segment in parse_markup(document, HTML):
        if isinstance(segment, Segment):
            source, root = segment.text, kept(segment.text, root=segment.root)
            parts = [leaf.copy for leaf in root.leaves()]
            target = " ".join(draw.draw(st.lists(st.sampled_from(["x", "y.", *parts]), max_size=8, unique=True)))
            n = len(target.split())
            order = draw.draw(st.lists(st.integers(-1, len(source.split()) - 1), min_size=n, max_size=n))
            found = projected(root, source, target, in_order(source, target, order))
            visible = re.sub(r"<[^>]*>", "", found.replace("<br>", " "))
            assert sorted(re.findall(r"\{\d+\}", visible)) == sorted(parts)
            assert not re.search(r"\w\{|\}\w|\}\{", visible), (document, target, found)


@hypothesis_settings(max_examples=300, deadline=None)
@given(draw=st.data(), part=st.sampled_from(["{name}", "${x}", "%s", "http://a.b/c", "a@b.cd", "dog"]))
def test_kept_parts_do_not_touch_other_words(draw: st.DataObject, part: str) -> None:
    """Also where they replace a comma, or a part of a word with hyphens."""
    inside = draw.draw(st.lists(st.sampled_from(["one", "two,", "U-Bahn"]), max_size=4))
    place = draw.draw(st.integers(0, len(inside)))
    source = " ".join([*inside[:place], part, *inside[place:]])
    target = " ".join(
        draw.draw(st.lists(st.sampled_from(["eins,", "U-Bahn-Fahrt", "3,5", "ä"]), min_size=1, max_size=5))
    )
    places = [m.span() for m in re.finditer(r"\w+|[^\w\s]", target)]
    sources = [m.span() for m in re.finditer(r"\S+", source)]
    links = [Link(*draw.draw(st.sampled_from(sources)), *one) for one in places if draw.draw(st.booleans())]
    found = projected(kept(source, terms={"dog": "üb5"}), source, target, links)
    copy = "üb5" if part == "dog" else part
    assert len(re.findall(rf"(?<!\w){re.escape(copy)}(?!\w)", found)) == 1, (source, target, found)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [("A{x}b c", "C-D", "C{x}D"), ("a {x} b", "模型好", "模{x}好"), ("a {x} b", "A-में", "A {x} में")],
)
def test_kept_parts_touch_words_as_in_the_source(source: str, target: str, expected: str) -> None:
    first, last = source.index("{"), source.index("}") + 1
    links = [Link(0, 1, 0, 1), Link(first, last, 1, 2), Link(last, len(source), 2, len(target))]
    assert projected(kept(source), source, target, links) == expected


def test_only_running_text_is_cut_out() -> None:
    document = (
        "<!DOCTYPE html><html><head><title>A t</title><style>p > b {}</style></head>\n"
        " <p class=x>\n One &amp; <b>two</b><br>three </p><script>if (a < b) '<p>x</p>'</script><pre>a  b</pre>\n"
        "<ul><li>x<li translate=no>y</ul> <p>1 <b>unclosed <p>and </i> stray a < b</body>"
    )
    parts = parse_markup(document, HTML)
    texts = [part.text.strip() for part in parts if isinstance(part, Segment)]
    assert texts == ["A t", "One & two", "three", "x", "1", "unclosed", "and", "stray a < b"]
    assert restored(parts) == document.replace("a < b</body", "a &lt; b</body")
    assert restored(parse_markup("just text", HTML)) == "just text" and parse_markup("", HTML) == []


@pytest.mark.parametrize(
    ("document", "text", "parts"),
    [
        ("runs 10<sup>2</sup> m, H<sub>2</sub>O.", "runs 102 m, H2O.", ["10<sup>2</sup> m", "H<sub>2</sub>O"]),
        ("it has 10<sup>3</sup> km of 5<sup>2</sup>&lt;x", "it has 103 km of 52<x",
         ["10<sup>3</sup> km", "5<sup>2</sup>"]),
        ("at -3.5<sup>-3</sup>, 5<sup>th</sup>", "at -3.5-3, 5th", ["-3.5<sup>-3</sup>", "5<sup>th</sup>"]),
        ("E = mc<sup>2</sup>, (CO<sub>2</sub>)", "E = mc2, (CO2)", ["mc<sup>2</sup>", "CO<sub>2</sub>"]),
        ("as SO<sub>4</sub><sup>2-</sup> is", "as SO42- is", ["SO<sub>4</sub><sup>2-</sup>"]),
        ("as H<sub>2</sub>SO<sub>4</sub> is", "as H2SO4 is", ["H<sub>2</sub>SO<sub>4</sub>"]),
        ("<b>x<sub>1</sub></b> of y<sup><i>n</i></sup>z", "x1 of ynz", ["x<sub>1</sub>", "y<sup><i>n</i></sup>z"]),
        ("A dog<sup>[1]</sup> runs.<sup>2</sup><sup>3</sup> A", "A dog runs. A",
         ["<sup>[1]</sup>", "<sup>2</sup><sup>3</sup>"]),
        ("dog<a href=a><sup>1</sup></a>, <b>cat</b><sup>2</sup>.", "dog, cat.",
         ["<a href=a><sup>1</sup></a>", "<sup>2</sup>"]),
        ("A dog<sup>of my friend</sup> <sub>runs</sub> fast", "A dogof my friend runs fast", []),
        ("<sup>1</sup>The dog <sup>*</sup>", "The dog ", ["<sup>1</sup>", "<sup>*</sup>"]),
        ("<sup>1</sup> A <sup>2</sup> dog<!-- --><sup>3</sup>", " A 2 dog", ["<sup>1</sup>", "<!-- --><sup>3</sup>"]),
        ("他用10<sup>2</sup>米", "他用102米", ["10<sup>2</sup>"]),
        ("runs.<!-- 1 --> <!-- 2 --><img>The", "runs. The", ["<!-- 1 --> <!-- 2 --><img>"]),
        ("dog<!-- 1 --> <u></u> runs", "dog runs", ["<!-- 1 --> <u></u>"]),
        ("dog <img> <img>runs", "dog runs", ["<img> <img>"]),
        ("dog<img>runs", "dogruns", ["<img>"]),
        ("dog <img> runs", "dog  runs", ["<img>"]),
        ("dog &unknown; &eacute; &copy runs", "dog &unknown; é © runs", ["&unknown;"]),
    ],
)  # fmt: skip
def test_formulas_footnotes_and_neighbours_without_text_stay(document: str, text: str, parts: list[str]) -> None:
    (segment,) = parse_markup(f"<p>{document}</p>", HTML)[1:-1]
    assert isinstance(segment, Segment) and segment.text == text
    assert [leaf.verbatim for leaf in segment.root.leaves()] == parts
    assert "".join(unescape(restored([segment])).split()) == "".join(unescape(document).split())


def test_long_runs_of_raised_elements_are_parsed() -> None:
    for document in ("x" + "<sub>1</sub>" * 3000, "x" + "<sup>a</sup>b" * 3000, "a dog " + "<img> " * 3000):
        assert restored(parse_markup(document, HTML)) == document


@pytest.mark.parametrize("tag", ['a href="x""', 'p title=5"', "b 'x", 'p class="a"b\'', "a b = 'x>y' c", 'a b="<i>"'])
def test_quotes_in_wrong_places_are_inside_the_tag(tag: str) -> None:
    document = f"<{tag}>A dog.</{tag[0]}>"
    parts = parse_markup(document, HTML)
    assert [part.text for part in parts if isinstance(part, Segment)] == ["A dog."] and restored(parts) == document


def restored(parts: list[str | Segment]) -> str:
    """The document with each segment translated to itself."""
    out = []
    for part in parts:
        if isinstance(part, str):
            out.append(part)
            continue
        text = part.text
        found = projected(part.root, text, text, [Link(*m.span(), *m.span()) for m in re.finditer(r"\S+", text)])
        before, after = part.spaces
        out.append(before + found.strip() + after if before or after else found)
    return "".join(out)


@pytest.mark.parametrize("text", ["<a>x", "x</a>", "<a><b>x</a></b>", "<a>" * 300, "<a>x</A>", "<a>A < B</a>",
                                  "<a b='1' b='2'>x</a>", "<a>A & B</a>", "<a x=1>x</a>", "x</_><_>"])  # fmt: skip
def test_malformed_xml_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"not well-formed XML|nested more than"):
        parse_markup(text, XML)


def test_well_formed_xml_may_have_several_roots() -> None:
    for text in (
        "<?xml version='1.0' encoding='latin-1'?>\n<!DOCTYPE a>\n<a b='&own;'>x</a>",
        "x <a>ü</a> <a>y</a> &lt;",
    ):
        assert restored(parse_markup(text, XML)) == text
    with pytest.raises(SettingsError, match=r"invalid token.* line 2, column 5"):
        parse_markup("<a>\n A & B</a>", XML)


@pytest.mark.parametrize(
    ("number", "character"), [("9" * 5000, "\ufffd"), ("0" * 5000 + "65", "A"), ("0" * 9, "\ufffd")]
)
def test_long_character_references_are_read_as_browsers_do(number: str, character: str) -> None:
    (segment,) = parse_markup(f"a &#{number}; b", HTML)
    assert isinstance(segment, Segment) and segment.text == f"a {character} b"


def test_entities_of_a_document_type_are_never_resolved() -> None:
    bomb = '<!DOCTYPE a [<!ENTITY b "lol"><!ENTITY c "&b;&b;&b;">]><a>x &c; and &eacute; y</a>'
    assert restored(parse_markup(bomb, XML)) == bomb
    many = "<a>x " + "&c; " * 5000 + "</a>"
    assert restored(parse_markup(many, XML)) == many
    assert len(parse_markup("x " + "<b>y</b> " * 3000, HTML)) < 100


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> str:
    """Content of an XML document."""
    word = st.sampled_from(["red", "a", "b &amp; c", "&lt;x&gt;", "é", "{name}", "%s", "http://x.y/z", "&own;", ""])
    out = []
    for _ in range(draw(st.integers(0, 4))):
        out.append(draw(word) + draw(st.sampled_from(["", " ", " ", ". "])))
        if depth and draw(st.booleans()):
            name, inner = draw(st.sampled_from(["b", "i", "code", "p", "g"])), draw(trees(depth - 1))
            out.append(draw(st.sampled_from([f"<{name} k='1&amp;2'>{inner}</{name}>", f"<{name}/>", "<!-- x -->"])))
    return "".join(out)


def test_copies_of_several_elements_are_cut_between_them() -> None:
    for document in ("a <b>5</b> <i>6</i> dog", "a <b>A</b><i>B</i><u>C</u> dog"):
        (segment,) = parse_markup(document, HTML)
        assert isinstance(segment, Segment)
        copy = segment.text[2:-4]
        link = Link(2, 2 + len(copy), 5, 5 + len(copy))
        translation = projected(segment.root, segment.text, f"Hund {copy} a", [link])
        assert translation == document.replace("a <", "Hund <").replace("dog", "a")


@hypothesis_settings(max_examples=300, deadline=None)
@given(content=trees(), draw=st.data(), kind=st.sampled_from(["html", "xml"]))
def test_documents_keep_their_elements(content: str, draw: st.DataObject, kind: str) -> None:
    """With any translation and any alignment, whether characters stand for parts that stay or not."""
    content = re.sub(r"<(\w+)/>", r"<\1></\1>", content) if kind == "html" else content
    rules = MarkupRules(kind=kind, ignore=frozenset({"code"}))  # type: ignore[arg-type]
    out = []
    for part in parse_markup(content, rules):
        if isinstance(part, str):
            out.append(part)
            continue
        kept(part.text, root=part.root)
        hidden: list[str] = []
        if draw.draw(st.booleans()):
            part.text = part.root.hide_leaves(part.text)
            hidden = [character for character in part.text if ord(character) >= KEPT_WORDS[0]]
        n_source = len(part.text.split())
        n_kept = sum(leaf.copy == "{name}" for leaf in part.root.leaves())
        copies = ["{name}"] if n_kept and n_kept == part.text.count("{name}") else []
        words = draw.draw(st.lists(st.sampled_from(["x", "y & z", "%s", "<", "red.", *copies]), max_size=8))
        target = " ".join(draw.draw(st.permutations([*words, *hidden])))
        order = draw.draw(
            st.lists(st.integers(-1, n_source - 1), min_size=len(target.split()), max_size=len(target.split()))
        )
        out.append(projected(part.root, part.text, target, in_order(part.text, target, order)))
    result = "".join(out)
    entity = '<!DOCTYPE d [<!ENTITY own "own">]>'
    before, after = (ET.fromstring(f"{entity}<d>{text.replace('&own;', 'own')}</d>") for text in (content, result))
    assert outline(before) == outline(after)
    codes = [sorted("".join(e.itertext()) for e in document.iter("code")) for document in (before, after)]
    assert codes[0] == codes[1]
    assert kind == "html" or result.count("&own;") == content.count("&own;")
    assert result.count("<!-- x -->") == content.count("<!-- x -->")
    assert result.count("{name}") == content.count("{name}"), (content, result)


def outline(element: ET.Element) -> tuple[object, ...]:
    """The nesting of elements, whatever the order of neighbours is."""
    return element.tag, tuple(sorted(element.attrib.items())), tuple(sorted(map(outline, element), key=repr))


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.text(alphabet="<>/ab!-[]&;\"'= x", max_size=60), st.sampled_from([HTML, XML]))
def test_any_text_is_parsed(text: str, rules: MarkupRules) -> None:
    try:
        parts = parse_markup(text, rules)
    except SettingsError:
        assert rules is XML
        return
    tags = re.findall(r"<[^<>]*>", "".join(part for part in parts if isinstance(part, str)))
    assert all(tag in text for tag in tags)
    restored(parts)

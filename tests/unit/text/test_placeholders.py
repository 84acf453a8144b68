"""Parts of a sentence that a vocabulary cannot read, or that must stay, come back as they were."""

from itertools import accumulate, product

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.text.placeholders import (
    KEPT_SIGNS,
    KEPT_WORDS,
    PLACEHOLDERS,
    Masked,
    encode_masked,
    mask,
    mask_pair,
    prepare,
    restore,
    shared_spans,
)
from transduce.text.special import PLACEHOLDER_IDS, Vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizers

A, B, C, D = PLACEHOLDERS[:4]
LINES = ["The old doctor calls the dog - now.", "A man can't run, or jump: (why?)", "Who has quiz books 24 times?"] * 40


def vocabularies(**settings: object) -> Tokenizers:
    return train_tokenizers(LINES, LINES, TokenizerSettings(**settings), vocab_size=90)  # type: ignore[arg-type]


KNOWN = vocabularies(placeholders=8)


def prepared(text: str) -> Masked:
    return prepare(text, KNOWN.src, KNOWN.src.encode(text))


@pytest.mark.parametrize(
    ("text", "read", "parts"),
    [
        ("The old doctor calls Ødegård.", f"The old doctor calls {A}.", ["Ødegård"]),
        ("Ødegård-Hansen calls.", f"{A} calls.", ["Ødegård-Hansen"]),
        ("The dog calls 😀.", f"The dog calls {A}.", ["😀"]),
        ("The dog 👩\u200d💻 runs", f"The dog {A} runs", ["👩\u200d💻"]),
        ("Лев Толстой calls a 漢字 now", f"{A} calls a {B} now", ["Лев Толстой", "漢字"]),
        ("The dog calls Л. Толстой now", f"The dog calls {A} now", ["Л. Толстой"]),
        ("The dog calls -5 now", f"The dog calls {A} now", ["-5"]),
        ("The +7/8 dog", f"The {A} dog", ["+7/8"]),
        ("The dog ... runs", f"The dog {A} runs", ["..."]),
        ("The … dog… calls", f"The {A} dog {B} calls", ["…", "…"]),
        ("Who-- has ?! books", f"Who {A} has {B} books", ["--", "?!"]),
        ("A dog² calls 24² or H₂O", f"A {A} calls {B} or {PLACEHOLDERS[2]}", ["dog²", "24²", "H₂O"]),
        ("The dog™ has CO₂ or Mª or book® now.", f"The {A} has {B} or {C} or {D} now.", ["dog™", "CO₂", "Mª", "book®"]),
        ("The dog has 5 ª now", f"The dog has {A} now", ["5 ª"]),
        ("The dog.¹ Who, ² has", f"The dog.{A} Who, {B} has", ["¹", "²"]),
        ("The ½ dog ① now", f"The {A} dog {B} now", ["½", "①"]),
        ("The ▁dog▁ has \ufffd now", f"The {A} dog {B} has {PLACEHOLDERS[2]} now", ["▁", "▁", "\ufffd"]),
        ("The " + "dog" * 40 + " now", f"The {A} now", ["dog" * 40]),
        ("doctor\u00adcalls", "doctorcalls", []),
        ("The dog می\u200cخواهم now", f"The dog {A} now", ["می\u200cخواهم"]),
        ("The \u200fمحمد\u200f calls", f"The {A} calls", ["\u200fمحمد\u200f"]),
        ("The xไทย-Արամ now", f"The {A} now", ["xไทย-Արամ"]),
        ("The dog calls 1,003.57 now", f"The dog calls {A} now", ["1,003.57"]),
        ("The https://a.org/b?c=2#d, dog", f"The {A}, dog", ["https://a.org/b?c=2#d"]),
        ("The %s calls {name}.", f"The {A} calls {B}.", ["%s", "{name}"]),
        ("The Ødegård's dog", f"The {A} dog", ["Ødegård's"]),
        (f"the {A} dog", f"the {A} dog", [A]),
    ],
)
def test_words_that_cannot_be_read_become_placeholders(text: str, read: str, parts: list[str]) -> None:
    masked = prepared(text)
    assert masked.text == read and list(masked.parts) == parts
    assert restore(masked.text, masked) == text.replace("\u00ad", "")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("The doc\u200btor calls", "The doctor calls"),
        ("The doc\ufefftor calls", "The doctor calls"),
        ("\ufeffThe dog\u200f, now", "\ufeffThe dog, now"),
        ("The dog\u200b calls", "The dog calls"),
        ("The Øde\u200bgård calls", "The Øde\u200bgård calls"),
        ("The \u2067Ødegård\u2069 calls", "The \u2067Ødegård\u2069 calls"),
        ("The \u2067Ødegård (dog)\u2069 calls", "The Ødegård (dog) calls"),
        ("The \u202bdog, Ødegård\u202c calls", "The dog, Ødegård calls"),
        ("The \u2068dog\u2069 calls \u202aØ\u202c", "The dog calls \u202aØ\u202c"),
        ("\u2067The \u2068dog\u2069 calls\u2069", "\u2067The dog calls\u2069"),
        ("\u2067The\u2069 dog calls", "The dog calls"),
        ("The dog \u202ecalls\u202c", "The dog calls"),
        ("\u202aThe \u2066Ødegård calls\u202c", "\u202aThe \u2066Ødegård calls\u202c"),
    ],
)
def test_invisible_characters_neither_part_words_nor_lose_their_partners(text: str, written: str) -> None:
    masked = prepared(text)
    assert restore(KNOWN.tgt.decode(KNOWN.tgt.encode(masked.text)), masked) == written


@pytest.mark.parametrize(
    ("text", "written", "dropped"),
    [
        ("The\x07dog\x07 calls", "The dog calls", ["\x07"]),
        ("The\x00dog calls", "The dog calls", ["\x00"]),
        ("\x07The dog calls", "\x07The dog calls", []),
        ("The \x07Øde\x07gård\x07 calls", "The \x07Øde\x07gård\x07 calls", []),
        ("The \u202edog\u202c calls\u200f now", "The dog calls now", ["\u202e", "\u202c", "\u200f"]),
        ("The \u2067Ødegård\u2069 calls", "The \u2067Ødegård\u2069 calls", []),
        ("The doc\u00adtor calls", "The doctor calls", []),
    ],
)
def test_dropped_control_characters_and_direction_marks_part_words_and_are_named(
    text: str, written: str, dropped: list[str]
) -> None:
    masked = prepared(text)
    assert restore(KNOWN.tgt.decode(KNOWN.tgt.encode(masked.text)), masked) == written
    assert list(masked.dropped) == dropped


@pytest.mark.parametrize("text", ["-", "***", "•", "0", "()", "\u00ad", "😀", "Привет, мир!", "漢字。", "… —", "½"])
def test_a_text_without_anything_to_read_is_left_as_it_is(text: str) -> None:
    masked = prepared(text)
    assert masked.text == "" and masked.before == text


@pytest.mark.parametrize(
    ("text", "read"), [("• A dog", "A dog"), ("“A dog”", "A dog"), ("The dog 😀", "The dog"), ("😀 漢 dog", f"{A} dog")]
)
def test_signs_at_the_edges_are_not_given_to_the_model(text: str, read: str) -> None:
    masked = prepared(text)
    assert masked.text == read and restore(masked.text, masked) == text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("X The dog calls Y now.", f"The dog calls {A} now."),
        ("X: The dog calls Y", f"The dog calls {A}"),
        ("X. - The dog", "The dog"),
        ("X! The dog", "The dog"),
        ("X can run", f"{A} can run"),
        ("X - now", f"{A} - now"),
        ("+ The dog calls + now +", f"The dog calls {A} now"),
        ("+ X can run", f"{A} can run"),
        ("The dog calls XY +.", f"The dog calls {A}."),
        ("X, Y: +", ""),
    ],
)
def test_parts_to_keep_are_left_out_at_the_edges_unless_they_are_words_of_the_sentence(text: str, read: str) -> None:
    signs = {"X": KEPT_WORDS[0], "Y": KEPT_WORDS[-1], "+": KEPT_SIGNS[0]}
    masked = prepared(text.translate(str.maketrans(signs)))
    assert masked.text == read
    assert restore(masked.text, masked) == text.translate(str.maketrans(signs))


@pytest.mark.parametrize(
    ("text", "read", "translation", "restored"),
    [
        ("The dog runs...", "The dog runs.", "Der Hund läuft.", "Der Hund läuft..."),
        ("The dog runs…", "The dog runs.", "Der Hund läuft.", "Der Hund läuft…"),
        ("The dog runs፡፡", "The dog runs.", "Der Hund läuft.", "Der Hund läuft፡፡"),
        ("Who runs?!! 😀", "Who runs?", "Wer läuft?", "Wer läuft?!! 😀"),
        ("…A dog", "A dog", "Ein Hund", "…Ein Hund"),
        ("The dog ! and runs !", f"The dog {A} and runs.", f"Der Hund läuft {A}.", "Der Hund läuft ! !"),
        ("The Ødegård… runs ...", f"The {A} runs.", f"Der {A}.", "Der Ødegård… ..."),
        ("The Ødegård...", f"The {A}.", f"Der {A}.", "Der Ødegård..."),
        ("The dog runs¡", "The dog runs", "Der Hund läuft.", "Der Hund läuft.¡"),
        ("The dog runs！", "The dog runs.", "Der Hund läuft.", "Der Hund läuft！"),
    ],
)
def test_the_model_reads_one_sign_instead_of_a_run_at_the_end(
    text: str, read: str, translation: str, restored: str
) -> None:
    masked = prepared(text)
    assert masked.text == read and restore(translation, masked) == restored and masked.unreadable


@pytest.fixture(scope="module")
def large() -> Vocabulary:
    """A vocabulary large enough to have pieces for the signs that begin words in its text."""
    words = ["".join(syllables) for syllables in product(("ba", "dek", "ki", "lof", "mug", "nep"), repeat=4)]
    lines = [f"{' '.join(words[i : i + 4])} It's a well-read IV, B or Th, C! (why?)" for i in range(len(words))] + LINES
    return train_tokenizers(lines, lines, TokenizerSettings(placeholders=8, kind="bpe"), vocab_size=1100).src


@pytest.mark.parametrize(
    ("text", "read", "parts"),
    [
        ("It is -5 °C now.", f"It is {A} now.", ["-5 °C"]),
        ("The doctor has 50 % now.", f"The doctor has {A} now.", ["50 %"]),
        ("A man has 5 ㎏ or 5℃ now.", f"A man has {A} or {B} now.", ["5 ㎏", "5℃"]),
        ("A man has 20 km² or €5 now.", f"A man has {A} or {B} now.", ["20 km²", "€5"]),
        ("The doctor has 1.80 m or 5 km/h now.", f"The doctor has {A} or {B} now.", ["1.80 m", "5 km/h"]),
        ("The doctor has 5 men.", f"The doctor has {A} men.", ["5"]),
        ("²The doctor", f"{A} The doctor", ["²"]),
        ("A man and № 5™ read.", f"A man and {A} read.", ["№ 5™"]),
        ("The old doctor - reads.", "The old doctor - reads.", []),
        ("The old doctor , reads.", f"The old doctor {A} reads.", [","]),
        ("The 'old' doctor reads.", f"The {A} old {B} doctor reads.", ["'", "'"]),
        ("The doctor reads.¹", "The doctor reads.", []),
        ("The doctor reads.'", "The doctor reads.", []),
        ("The doctor's not old.", "The doctor's not old.", []),
        ("A man (why?) can run.", "A man (why?) can run.", []),
        ("The doctor reads `a man` now.", f"The doctor reads {A} now.", ["`a man`"]),
        ("The doctor reads {{ a man }} now.", f"The doctor reads {A} now.", ["{{ a man }}"]),
        ("The doctor {% if (a man) %} reads.", f"The doctor {A} reads.", ["{% if (a man) %}"]),
        (
            "A man has {n, plural, one {# dog} other {# dogs}}.",
            f"A man has {A}.",
            ["{n, plural, one {# dog} other {# dogs}}"],
        ),
        ("A man&nbsp;has :dog: or &amp; now.", f"A man {A} has {B} or {C} now.", ["&nbsp;", ":dog:", "&amp;"]),
        ("A man :-) has :D, now.", f"A man {A} has {B}, now.", [":-)", ":D"]),
        ("The \x1b[31mdoctor\x1b[0m reads.", f"The {A} doctor {B} reads.", ["\x1b[31m", "\x1b[0m"]),
        ("The doctor reads ``ls -l`` now.", f"The doctor reads {A} now.", ["``ls -l``"]),
        ("The old doctor reads . . .", "The old doctor reads.", []),
        ("The doctor reads IV and Ⅳ now.", f"The doctor reads IV and {A} now.", ["Ⅳ"]),
        ("Ｔｈｅ　ﬁne doctor， reads！", "Ｔｈｅ　ﬁne doctor， reads！", []),
        ("THE OLD DOCTOR READS.", "", []),
        ("The QUIZ doctor.", f"The {A} doctor.", ["QUIZ"]),
        ("The man has 1'234 € now.", f"The man has {A} now.", ["1'234 €"]),
        ("The man has 1 234 567 € now.", f"The man has {A} now.", ["1 234 567 €"]),
        ("The man has 10:30 → now.", f"The man has {A} now.", ["10:30 →"]),
        ("A man has 2024-05-17 ♥ now.", f"A man has {A} now.", ["2024-05-17 ♥"]),
        ("A man at №5 or №\u00a07 now.", f"A man at {A} or {B} now.", ["№5", "№\u00a07"]),
        ("It is ≥5 or ~5 or √2 now.", f"It is {A} or {B} or {C} now.", ["≥5", "~5", "√2"]),
        ("A man has 3 ½ or 5 kΩ or 5 μm now.", f"A man has {A} or {B} or {C} now.", ["3 ½", "5 kΩ", "5 μm"]),
        ("A man has €5k or ￥100 now.", f"A man has {A} or {B} now.", ["€5k", "￥100"]),
        ("I read C++ or A+ or C# now.", f"I read {A} or {B} or {C} now.", ["C++", "A+", "C#"]),
        ("A man != B or th := A now.", f"A man {A} B or th {B} A now.", ["!=", ":="]),
        ("A man has --dry-run or --man=on now.", f"A man has {A} or {B} now.", ["--dry-run", "--man=on"]),
        ("A man has man() or a.man() now.", f"A man has {A} or {B} now.", ["man()", "a.man()"]),
        ("A man has ../man or *.py or .git now.", f"A man has {A} or {B} or {C} now.", ["../man", "*.py", ".git"]),
    ],
)
def test_quantities_code_and_signs_without_a_piece_are_kept(
    large: Vocabulary, text: str, read: str, parts: list[str]
) -> None:
    assert large.vocab_size == 1100
    masked = prepare(text, large, large.encode(text))
    assert (masked.text, list(masked.parts)) == (read, parts)
    if not masked.end:
        assert restore(masked.text, masked) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_entities_that_the_training_text_often_has_are_read_and_others_are_kept(kind: str) -> None:
    src = ["the dog &apos;s house", "a man &apos;s hat &quot;"] * 30
    tgt = ["das haus des hundes", "der hut des mannes"] * 30
    known = train_tokenizers(src, tgt, TokenizerSettings(placeholders=8, kind=kind), vocab_size=80)
    text = "the man &apos;s house &quot; a hat &lt; the dog"
    assert "&apos;" in known.src.pieces(known.src.encode(text))
    masked = prepare(text, known.src, known.src.encode(text))
    assert (masked.text, masked.parts) == (f"the man &apos;s house &quot; a hat {A} the dog", ("&lt;",))
    assert known.tgt.decode(known.tgt.encode("der &apos;hund&apos;")) == "der &apos;hund&apos;"


@pytest.mark.parametrize("code", ["{0}", ":-)"])
def test_code_that_is_a_piece_is_kept(code: str) -> None:
    lines = [f"a man {code} here", f"the dog {code}"] * 40
    known = train_tokenizers(lines, lines, TokenizerSettings(placeholders=8, kind="bpe"), vocab_size=80)
    assert any(code in piece for piece in known.src.pieces(known.src.encode(lines[0])))
    masked = prepare(lines[0], known.src, known.src.encode(lines[0]))
    assert (masked.text, masked.parts) == (f"a man {A} here", (code,))


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_entities_that_only_the_target_has_are_not_read(kind: str) -> None:
    src, tgt = ["the dog and the house", "a man and a hat"] * 40, ["das haus &amp; der hund", "ein hut"] * 40
    known = train_tokenizers(src, tgt, TokenizerSettings(placeholders=8, kind=kind), vocab_size=80)
    assert known.joint and known.tgt.decode(known.tgt.encode("der hut &amp; das haus")) == "der hut &amp; das haus"
    text = "the man &amp; the dog"
    masked = prepare(text, known.src, known.src.encode(text))
    assert (masked.text, masked.parts) == (f"the man {A} the dog", ("&amp;",))


def test_entities_take_a_small_part_of_a_vocabulary() -> None:
    lines = [" ".join(f"&#{1000 + 10 * i + j};" for j in range(10)) for i in range(60)] * 20 + ["&amp; a man"] * 30
    known = train_tokenizers(lines, ["ein mann"] * len(lines), TokenizerSettings(placeholders=8), vocab_size=320)
    pieces = known.src.pieces(range(known.n_src))
    entities = [piece for piece in pieces if piece.startswith("&") and piece.endswith(";")]
    assert len(entities) == 10 and "&amp;" in entities


def test_zero_width_spaces_between_words_of_scripts_without_spaces_are_read_as_spaces() -> None:
    lines = ["ខ្ញុំ\u200bទៅ\u200bផ្ទះ", "គាត់\u200bមក"] * 60
    known = train_tokenizers(lines, lines, TokenizerSettings(placeholders=8), vocab_size=60)
    masked = prepare(text := "គាត់\u200bទៅ", known.src, known.src.encode(text))
    assert masked.text == text and known.src.decode(known.src.encode(text)) == "គាត់ ទៅ"
    assert known.tgt.decode(known.tgt.encode(text)) == text


def test_an_apostrophe_that_the_vocabulary_lacks_is_read_as_another_one_inside_words() -> None:
    assert prepared("A man can’t run") == Masked("A man can't run")
    masked = prepared("The Ødegård’s dog")
    assert masked.text == f"The {A} dog" and masked.parts == ("Ødegård’s",)


def test_signs_that_the_training_text_repeats_are_read_as_they_are() -> None:
    lines = ["The dog runs... and m² now.", "Who has it?!"] * 40
    known = train_tokenizers(lines, lines, TokenizerSettings(placeholders=8, normalization="nfc"), vocab_size=200).src
    text = "The dog has m²..."
    assert prepare(text, known, known.encode(text)) == Masked(text)


def test_parts_beyond_the_number_of_placeholders_keep_their_order() -> None:
    text = " and ".join(f"é{i}é" for i in range(11))
    masked = mask(text, [(i * 8, i * 8 + 3) for i in range(10)] + [(80, 84)])
    assert len(masked.parts) == 11 and restore(masked.text, masked) == text


def test_parts_that_a_translation_lacks_follow_it() -> None:
    masked = Masked(f"{A} {B}", ("x", "y"), before="• ")
    assert restore(f"und {B} {B}", masked) == "• und y x"
    assert restore("und", masked, whole=False) == "• und"


@pytest.mark.parametrize(
    ("text", "parts", "restored"),
    [
        ("Der Hund läuft.", ["x", "y"], "Der Hund läuft. x y"),
        ("狗跑步。", ["x", "y"], "狗跑步。x y"),
        ("หมาวิ่ง", ["x"], "หมาวิ่งx"),
        ("真的！", ["漢"], "真的！漢"),
        ("", ["漢", "x"], "漢x"),
    ],
)
def test_missing_parts_follow_without_a_space_in_scripts_that_have_none(
    text: str, parts: list[str], restored: str
) -> None:
    assert restore(text, mask(" ".join(parts), spans_of(parts))) == restored


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("价格是100€左右。", ["100€"]),
        ("温度是25℃的水。", ["25℃"]),
        ("价格是￥100。", ["￥100"]),
        ("重量是5KG♥。", ["♥"]),
        ("温度是C的水♥很好。", ["♥"]),
        ("答案是水/酒。", ["/"]),
        ("葛\U000e0100城是水。", []),
    ],
)
def test_text_without_spaces_beside_a_part_is_read(text: str, parts: list[str]) -> None:
    lines = ["价格是100左右。", "温度是25的水。", "答案是酒和水。", "重量是5KG很好。", "葛城是C。"] * 20
    known = train_tokenizers(lines, lines, TokenizerSettings(placeholders=8), vocab_size=90).src
    masked = prepare(text, known, known.encode(text), whole=True)
    assert list(masked.parts) == parts and masked.text


def test_a_number_in_a_box_at_the_start_stays_there() -> None:
    masked = prepared("1️⃣ The dog runs")
    assert (masked.text, masked.before) == ("The dog runs", "1️⃣ ")


def spans_of(parts: list[str]) -> list[tuple[int, int]]:
    ends = list(accumulate(len(part) + 1 for part in parts))
    return [(end - len(part) - 1, end - 1) for end, part in zip(ends, parts, strict=True)]


@pytest.mark.parametrize("normalization", ["nmt_nfkc", "identity"])
def test_spaces_at_the_edges_are_read_only_by_a_vocabulary_that_keeps_them(normalization: str) -> None:
    known = vocabularies(placeholders=8, normalization=normalization).src
    masked = prepare("  The dog ", known, known.encode("  The dog "))
    kept = Masked("  The dog ") if known.keeps_spaces else Masked("The dog", before="  ", after=" ")
    assert masked == kept and known.keeps_spaces == (normalization == "identity")


COPIED = {
    "zh": ["今天天气很好，我们去公园吧", "这本书（很旧）是我的；那本不是", "《红楼梦》价格是25元、30元"],
    "th": ["วันนี้อากาศดีมาก", 'เขาพูดว่า "สวัสดี" แล้วไป', "รถไฟออกเวลา 10.30 น. (เช้า)"],
    "fa": ["امروز هوا خوب است.", "او گفت: «سلام» و رفت", "می\u200cروم به خانه (خیلی)"],
    "hi": ["आज मौसम अच्छा है।", 'उसने कहा, "नमस्ते" और चला गया', "ट्रेन 10:30 बजे (आज) जाती है"],
    "el": ["Σήμερα ο καιρός είναι καλός.", "Είπε: «Γεια» και έφυγε", "Το τρένο φεύγει στις 10:30 (πολύ)"],
}
FORMS = [
    *("{} – {}", "“{}” {}", "{} (x) {}", "{}: 5 °C {}", "{} ... {}", "{}… {}", "{} `a b` {}", "{} № 5™ {}", "{} 😀 {}"),
    *("{} @anna {}", "{} https://a.b/c?d=e {}", "{} Ødegård {}", "{} -5 {}", " {} {}\t ", "{}/{}", "{} & {}", "{}*{}*"),
    *("{} ½ {}", "{} ㎏ {}", "{}、{}", "{} ① {}", "{} 5,000.50 {}", "{} $5 {}", "{} 50% {}", "{} 漢字 {}", "{} ไทย {}"),
    *("{} Русский {}", "«{}» {}", "{} 'x' {}", "{} #tag {}", "{} %s {{0}} {}", "{} <b>x</b> {}", "({}) {}", "{} ≤ {}"),
    *(
        "_{}_ {}",
        "{} __{}__",
        "[{}](https://a.b/c_(d)) {}",
        "{} [x](a.b) {}",
        "{} f(1) {}",
        "{} [^1] {}",
        "{} a_b() {}",
    ),
    *("{}. . . {}", "{} 1⁄2 {}", "{} m² {}", "{} H₂O {}", "{} ′ ″ {}", "{} ℃ {}", "{} Ⅳ {}", "{} ´ ` {}"),
]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("这本书https://a.org/b?c=d，很旧", f"这本书{A}，很旧"),
        ("今天https://a.org/b?c=d很好", f"今天{A}很好"),
        ("今天https://a.org/天?气=书，很好", f"今天{A}，很好"),
        ("这是~/a/我们/b.txt，旧的", f"这是{A}，旧的"),
        ("价格是x^2+y^2的", f"价格是{A}的"),
    ],
)
def test_addresses_and_code_end_where_text_without_spaces_goes_on(text: str, read: str) -> None:
    known = train_tokenizers(COPIED["zh"] * 60, COPIED["zh"] * 60, TokenizerSettings(placeholders=8), vocab_size=200)
    masked = prepare(text, known.src, known.src.encode(text))
    written = known.tgt.encode(read)
    assert known.src.encode(masked.text) == known.src.encode(read)
    assert restore(known.tgt.decode(written), masked) == text


@pytest.mark.parametrize("language", COPIED)
def test_a_model_that_copies_what_it_reads_gives_the_text_back(language: str) -> None:
    lines = COPIED[language] * 60
    known = train_tokenizers(lines, lines, TokenizerSettings(placeholders=8), vocab_size=200)
    for form, one, two in product(FORMS, COPIED[language], COPIED[language]):
        masked = prepare(text := form.format(one, two), known.src, known.src.encode(text))
        written = known.tgt.decode(known.tgt.encode(masked.text))
        assert restore(written, masked) == text, masked


def test_a_vocabulary_without_placeholders_reads_the_text_as_it_is() -> None:
    known = vocabularies().src
    text = "The Ødegård calls 😀"
    masked = prepare(text, known, known.encode(text))
    assert masked.text == "The Ødegård calls" and masked.after == " 😀" and masked.unreadable == ("Ødegård", "😀")


def test_a_text_may_contain_the_characters_of_placeholders() -> None:
    known = vocabularies().src
    text = f"The {A} calls"  # an icon of some fonts
    masked = prepare(text, known, known.encode(text))
    assert (masked.text, masked.parts) == (text, ()) and restore(f"{A} ruft", masked) == f"{A} ruft"
    one, two = KNOWN.masked(src := "Ødegård calls", f"Ødegård ruft {B}", KNOWN.src.encode(src))
    assert one.parts == two.parts == ("Ødegård",)
    assert encode_masked(KNOWN.tgt, two)[1][-1] == (13, 14)


def test_pairs_have_the_same_placeholders_and_offsets_of_their_texts() -> None:
    src, tgt = "Ødegård calls 漢.", "Es ruft 漢 Ødegård."
    spans = shared_spans(src, tgt, KNOWN.src, KNOWN.src.encode(src))
    one, two = mask_pair(src, tgt, spans)
    assert (one.text, two.text) == (f"{A} calls {B}.", f"Es ruft {B} {A}.")
    ids, places = encode_masked(KNOWN.tgt, two)
    assert [tgt[slice(*place)] for i, place in zip(ids, places, strict=True) if i in (4, 5)] == ["漢", "Ødegård"]


def test_parts_that_stood_alone_are_not_joined_to_words() -> None:
    alone = Masked(f"a {A} b", ("x@y.org",))
    assert restore(f"ende.{A}und", alone) == "ende. x@y.org und"
    assert restore(f"叫{A}。", alone) == "叫x@y.org。"
    assert restore(f"der {A}-Hund", Masked(f"({A}) dog", ("é",))) == "der é-Hund"
    assert restore(f"叫{A}{B}。", Masked(f"a {A} b {B}", ("é", "$4"))) == "叫é $4。"
    assert restore(f"“{A}” sagt er", Masked(f"“{A}”", ("é",))) == "“é” sagt er"


@pytest.mark.parametrize("form", ["a ({}) b", "a “{}” b", 'a "{}" b', "a [{}] b", "a *{}* b", "（{}）"])
def test_parts_between_signs_are_not_joined_to_words(form: str) -> None:
    between = Masked(form.format(A), ("Zürich",))
    assert restore(f"Hund{A}und", between) == "Hund Zürich und"
    assert restore(f"Ende.{A}und", between) == "Ende. Zürich und"
    assert restore(f"({A}) und «{A}»", between) == "(Zürich) und «»"
    assert restore(f"狗{A}跑", between) == "狗Zürich跑"
    assert restore(f"{A}und", Masked(f"({A}, b)", ("Zürich",))) == "Zürich und"
    assert restore(f"a:{A}, b", Masked(f"a:{A}, b", ("Zürich",))) == "a:Zürich, b"


@pytest.mark.parametrize(
    ("text", "read", "translation", "restored"),
    [
        ('The "dog" runs', f"The {A} dog {B} runs", f"Der {A} Hund {B} läuft", 'Der "Hund" läuft'),
        ('The "dog" runs', f"The {A} dog {B} runs", f"{A} 狗 {B}跑步", '"狗"跑步'),
        (
            "The dog—a man—runs",
            f"The dog {A} a man {B} runs",
            f"Der Hund {A} ein Mann {B} läuft",
            "Der Hund—ein Mann—läuft",
        ),
        ("dog→man (old)doctor", f"dog {A} man (old)doctor", f"Hund {A} Mann (alter)Arzt", "Hund→Mann (alter)Arzt"),
        ("The ***dog*** runs", f"The {A} dog {B} runs", f"Der {A} Hund {B} läuft", "Der ***Hund*** läuft"),
        ("A <b>man</b> runs", f"A {A} man {B} runs", f"Ein {A} Mann {B} läuft", "Ein <b>Mann</b> läuft"),
        ("A <a href='x y'>man</a>", f"A {A} man {B}", f"Ein {A} Mann {B}", "Ein <a href='x y'>Mann</a>"),
        ("Who;what", f"Who {A} what", f"Wer {A} was", "Wer;was"),
        ("Who* runs", f"Who {A} runs", f"Wer {A} läuft", "Wer* läuft"),
        ('The *"dog"* runs', f"The {A} dog {B} runs", f"Der {A} Hund {B} läuft", 'Der *"Hund"* läuft'),
        ("The Ødegård runs", f"The {A} runs", f"Der{A}läuft", "Der Ødegård läuft"),
    ],
)
def test_signs_that_touch_words_are_read_apart_from_them_and_written_together(
    text: str, read: str, translation: str, restored: str
) -> None:
    masked = prepared(text)
    assert masked.text == read and restore(translation, masked) == restored
    assert restore(masked.text, masked) == text
    ids, spans = encode_masked(KNOWN.src, masked)
    words = [text[slice(*span)] for i, span in zip(ids, spans, strict=True) if i in PLACEHOLDER_IDS]
    assert words == list(masked.parts)
    assert "".join(text[start:stop] for start, stop in spans) == text


def test_signs_between_letters_of_scripts_without_spaces_touch_the_words_of_the_translation() -> None:
    masked = mask("一只“狗”跑步", [(2, 3), (4, 5)])
    assert masked.text == f"一只{A}狗{B}跑步"
    assert restore(f"The {A} dog {B} runs", masked) == "The “dog” runs"


def test_signs_at_the_edges_are_placeholders_if_asked_for() -> None:
    text = "😀 The dog"
    masked = prepare(text, KNOWN.src, KNOWN.src.encode(text), whole=True)
    assert masked.text == f"{A} The dog" and not masked.before

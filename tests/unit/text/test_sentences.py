"""Running text in sentences, and back."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.decoding.prefix import prefixes_of
from transduce.text.sentences import LONGEST, joined_parts, split_sentences

PIECES = [
    *("a", "B", ". ", "! ", "B\u00a0.", "J. ", "\n", "\r\n", " ", "\u2028", "\u3000", "。", "？", "Mr. ", "1.5"),
    *(
        "'",
        '"',
        "é",
        "中",
        "ひ",
        "한",
        "😀",
        "…",
        "\x00",
        "\x1c",
        "עברית. ",
        "\u202f",
        "नमस्ते। ",
        "- ",
        "1. ",
        "(",
        ".)",
    ),
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.sampled_from(["en", "de-AT", "zh", "hi", "km", "x", None]),
)
def test_a_text_is_joined_from_its_parts(text: str, language: str | None) -> None:
    parts = split_sentences(text, language)
    assert "".join(parts) == text and len(parts) >= 1
    if language is not None:
        assert all(sentence == sentence.strip() and "\n" not in sentence for sentence in parts[::2])
        assert not any(map(str.isalpha, re.sub(r"\w\.", "", "\n".join(parts[1::2]))))  # but a. may be a marker
        assert "".join(joined_parts(parts[::2], parts)) == text


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    [
        (
            "en",
            "Mr. Smith paid 3.5 dollars. Why?  Nobody knows.",
            ["Mr. Smith paid 3.5 dollars.", "Why?", "Nobody knows."],
        ),
        ("en", "(The doctor sleeps.) The dog runs.", ["(The doctor sleeps.)", "The dog runs."]),
        ("en", "‹The dog. The cat.›", ["‹The dog.", "The cat.›"]),
        ("zh", "《狗跑。猫跑。》", ["《狗跑。", "猫跑。》"]),
        ("gu", "અની ૧૦.૩૦ જુએ છે. રવિ આવે છે.", ["અની ૧૦.૩૦ જુએ છે.", "રવિ આવે છે."]),
        ("hi", "मूल्य ३.१४ है। वह खुश है।", ["मूल्य ३.१४ है।", "वह खुश है।"]),
        ("th", "วันที่ ๓๐.๑๑.๒๕๖๙ ครับ", ["วันที่ ๓๐.๑๑.๒๕๖๙ ครับ"]),
        ("ja", "値は３．１４です。", ["値は３．１４です。"]),
        ("km", "អានីទិញ ។ល។ ថ្ងៃនេះ", ["អានីទិញ ។ល។", "ថ្ងៃនេះ"]),
        (
            "hy",
            "Անի &nbsp;Բաբա foo(1); 2026 թ․ Անի :) գնում է։ Անի:",
            ["Անի &nbsp;Բաբա foo(1); 2026 թ․ Անի :) գնում է։", "Անի:"],
        ),
        ("gu", "રૂ. ૫૦૦ અને કિ.મી. 5 ઈ.સ. 2026 ડૉ. રવિ", ["રૂ. ૫૦૦ અને કિ.મી. 5 ઈ.સ. 2026 ડૉ. રવિ"]),
        ("lo", "ສ.ປ.ປ. ລາວ ຄ.ສ. 2026", ["ສ.ປ.ປ. ລາວ ຄ.ສ. 2026"]),
        ("ru", "Всего, т.е. 5 человек.", ["Всего, т.е. 5 человек."]),
        ("en", "It is at 5 p.m. 10 people came.", ["It is at 5 p.m.", "10 people came."]),
        ("ko", "네.네. 알겠습니다.", ["네.네.", "알겠습니다."]),
        ("he", "כן.לא. הוא הלך.", ["כן.לא.", "הוא הלך."]),
        ("hy", "Տես https://a.bc/d?Բան այստեղ։ Անի:", ["Տես https://a.bc/d?Բան այստեղ։", "Անի:"]),
        ("si", "රු. 500 ඩී. එස්. සේනානායක", ["රු. 500 ඩී. එස්. සේනානායක"]),
        ("en", "[The doctor sleeps. The dog runs.] Yes.", ["[The doctor sleeps.", "The dog runs.]", "Yes."]),
        ("en", "He ran. (It was fun.) Then he left.", ["He ran.", "(It was fun.)", "Then he left."]),
        ("en", '"The doctor sleeps. The dog runs."', ['"The doctor sleeps.', 'The dog runs."']),
        ("en", "The dog (it is mine!) runs.", ["The dog (it is mine!) runs."]),
        ("en", '"Go!" he said.', ['"Go!" he said.']),
        ("en", 'He said: "A dog runs. It is old." Yes.', ['He said: "A dog runs.', 'It is old."', "Yes."]),
        (
            "en",
            'He said "Mr. Smith sleeps. He can\'t run," and left.',
            ['He said "Mr. Smith sleeps.', "He can't run,\" and left."],
        ),
        ("en", "He said 'A dog runs. It isn't old.' Yes.", ["He said 'A dog runs.", "It isn't old.'", "Yes."]),
        ("en", "A dog runs.¹ It is old!² ³ Yes.", ["A dog runs.¹", "It is old!² ³", "Yes."]),
        ("en", 'The “dog. runs.” and "Yes." sleep.', ['The “dog. runs.” and "Yes." sleep.']),
        ("fr", "Il dit : « Oui ! Il dort. » Il part.", ["Il dit : « Oui !", "Il dort. »", "Il part."]),
        ("bo", "བོད་སྐད་ཡིག །བཀྲ་ཤིས་བདེ་ལེགས། ཀ།", ["བོད་སྐད་ཡིག །", "བཀྲ་ཤིས་བདེ་ལེགས།", "ཀ།"]),
        ("en", "A dog runs׃ It sleeps෴ Yes.", ["A dog runs׃", "It sleeps෴", "Yes."]),
        ("src", "A man rides. Two dogs run. A woman sits.", ["A man rides.", "Two dogs run.", "A woman sits."]),
        ("de", "Das kam z.B. am 3. Oktober. Gut!", ["Das kam z.B. am 3. Oktober.", "Gut!"]),
        ("de", "Er fuhr in den 5. Stock. Gut!", ["Er fuhr in den 5. Stock.", "Gut!"]),
        ("fr", "« Oui ! » dit-il. Il part.", ["« Oui ! » dit-il.", "Il part."]),
        ("ru", "Да, т. е. нет. А. С. Пушкин ушёл.", ["Да, т. е. нет.", "А. С. Пушкин ушёл."]),
        ("ru", "Он живёт на наб. Мойки. Да.", ["Он живёт на наб. Мойки.", "Да."]),
        (
            "fr",
            "M. Dupont et Mme. Durand lisent. Le Dr. Martin dort.",
            ["M. Dupont et Mme. Durand lisent.", "Le Dr. Martin dort."],
        ),
        ("el", "Ο Κ. Π. Καβάφης έγραψε. Ο κ. Σεφέρης ήρθε.", ["Ο Κ. Π. Καβάφης έγραψε.", "Ο κ. Σεφέρης ήρθε."]),
        ("fa", "م. رضایی خواند. او رفت.", ["م. رضایی خواند.", "او رفت."]),
        ("sv", "Han läser t.ex. böcker. Ja.", ["Han läser t.ex. böcker.", "Ja."]),
        ("hi", "डॉ. सिंह पढ़ते हैं. वे सोते हैं.", ["डॉ. सिंह पढ़ते हैं.", "वे सोते हैं."]),
        ("en", "It was I. He left the U.S. They go.", ["It was I.", "He left the U.S.", "They go."]),
        ("zh", "你好。今天天气很好！", ["你好。", "今天天气很好！"]),
        ("zh", "（医生睡觉。）狗跑。", ["（医生睡觉。）", "狗跑。"]),
        ("ja", "こんにちは。元気ですか？", ["こんにちは。", "元気ですか？"]),
        ("ja", "「はい。」と言った。", ["「はい。」と言った。"]),
        ("ko", "안녕하세요. 갈까요?", ["안녕하세요.", "갈까요?"]),
        ("ko", "2024. 12. 1. 그는 왔다. 좋다.", ["2024. 12. 1. 그는 왔다.", "좋다."]),
        ("hi", "(वह सोता है।) कुत्ता दौड़ता है। ठीक है?", ["(वह सोता है।)", "कुत्ता दौड़ता है।", "ठीक है?"]),
        ("ar", "هل أنت بخير؟ نعم. أنا بخير.", ["هل أنت بخير؟", "نعم.", "أنا بخير."]),
        ("km", "ខ្ញុំទៅ។ គាត់មក។ល្អ៕", ["ខ្ញុំទៅ។", "គាត់មក។", "ល្អ៕"]),
        ("am", "ሰላም። እንዴት ነህ፧ ደህና ነኝ።", ["ሰላም።", "እንዴት ነህ፧", "ደህና ነኝ።"]),
        ("th", "หมา แมว", ["หมา แมว"]),
        ("th", "วันที่ 5 พ.ย.นี้ ธ.ค.", ["วันที่ 5 พ.ย.นี้ ธ.ค."]),
        ("hi", "वैध यू.आर.एल भरें. चाहिए.खातों", ["वैध यू.आर.एल भरें.", "चाहिए.", "खातों"]),
        ("ru", "А.С.Пушкин спит.Да.Он спит.", ["А.С.Пушкин спит.", "Да.", "Он спит."]),
        ("fa", "ساعت ۵ ب.ظ است.", ["ساعت ۵ ب.ظ است."]),
        ("ko", "문자 @/./+/-/_만 가능합니다. 네.", ["문자 @/./+/-/_만 가능합니다.", "네."]),
        (
            "en",
            "See ./a or C:\\b.\\c now. **So.** It is.😀 Yes.",
            ["See ./a or C:\\b.\\c now.", "**So.", "It is.", "😀 Yes."],
        ),
        ("en", "He left… Then he came.", ["He left…", "Then he came."]),
        ("en", "He left… and came back.", ["He left… and came back."]),
        ("en", "“He left…” Then he came.", ["“He left…”", "Then he came."]),
        ("ru", "Он ушёл… Потом пришёл.", ["Он ушёл…", "Потом пришёл."]),
        ("ka", "ის წავიდა… მერე მოვიდა... კი.", ["ის წავიდა…", "მერე მოვიდა...", "კი."]),
        ("hy", "(Նա եկավ։) Նա գնաց... Ի՞նչ։", ["(Նա եկավ։)", "Նա գնաց...", "Ի՞նչ։"]),
        ("ka", "ა. ბერიძე მოვიდა. იხ. გვ. 5. კი.", ["ა. ბერიძე მოვიდა.", "იხ. გვ. 5.", "კი."]),
        ("src", "(ខ្ញុំទៅ។) «គាត់មក។» ល្អ៕ខ្ញុំ", ["(ខ្ញុំទៅ។)", "«គាត់មក។»", "ល្អ៕", "ខ្ញុំ"]),
        ("am", "ሰላም፡፡ እንዴት ነህ፡፡ደህና ነኝ፡፡", ["ሰላም፡፡", "እንዴት ነህ፡፡", "ደህና ነኝ፡፡"]),
        ("bn", "সে এল৷ সে গেল॥ হ্যাঁ।", ["সে এল৷", "সে গেল॥", "হ্যাঁ।"]),
        (
            "zh",
            "他来了。3天后走了！10分钟后iPhone来了？x好。",
            ["他来了。", "3天后走了！", "10分钟后iPhone来了？", "x好。"],
        ),
        ("ja", "彼は来た。3日後に行った。", ["彼は来た。", "3日後に行った。"]),
        ("en", "Tom is here 😀 Mary is there.", ["Tom is here 😀", "Mary is there."]),
        ("en", "Tom runs :-) Mary is old. I ❤ New York.", ["Tom runs :-)", "Mary is old.", "I ❤ New York."]),
        ("en", "I saw 😀 Berlin. I saw 😀 it there.", ["I saw 😀 Berlin.", "I saw 😀 it there."]),
        ("de", "Ich mag 😀 Katzen sehr.", ["Ich mag 😀 Katzen sehr."]),
        ("en", "He left…Then he came.", ["He left…", "Then he came."]),
        ("en", "A…And. He left…and came.", ["A…And.", "He left…and came."]),
        ("en", "Wait... I know. I... I know it.", ["Wait...", "I know.", "I... I know it."]),
        ("en", "Tom \udcff runs. \ud800 It is old.", ["Tom \udcff runs.", "\ud800 It is old."]),
        ("hy", "Ո՞վ է նա։ Այո՜ Գնա՜նք։", ["Ո՞վ է նա։", "Այո՜", "Գնա՜նք։"]),
    ],
)
def test_sentences(language: str, text: str, sentences: list[str]) -> None:
    assert split_sentences(text, language)[::2] == sentences


@pytest.mark.parametrize(
    "kept",
    [
        *("ivan@пример.рф", "http://пример.рф/а?б=1", "http://example.com/путь?Б=1", "почта@例え.jp", "пример.рф"),
        *(
            "www.пример.рф/а?б",
            "http://例え.jp/道?あ=1!い",
            "https://მაგალითი.გე/ა?ბ=1",
            "`ls. Then`",
            "``Go! Now?``",
            "{{ a.b. C }}",
            "{% a. B %}",
        ),
    ],
)
@pytest.mark.parametrize("language", ["en", "ru", "hi", "x"])
def test_sentences_are_not_cut_inside_addresses_and_code(language: str, kept: str) -> None:
    text = f"Look at {kept} now. Ask {kept}. And {kept}?"
    assert split_sentences(text, language)[::2] == [f"Look at {kept} now.", f"Ask {kept}.", f"And {kept}?"]
    assert split_sentences(f"看{kept}，好。走。", "zh")[::2] == [f"看{kept}，好。", "走。"]


@pytest.mark.parametrize(
    ("language", "text", "parts"),
    [
        ("en", "1. A dog.", ["", "1. ", "A dog."]),
        ("en", "1. A dog. 2. A cat.", ["", "1. ", "A dog.", " 2. ", "A cat."]),
        ("en", "1. a dog", ["", "1. ", "a dog"]),
        ("en", "1. 5 dogs run.", ["", "1. ", "5 dogs run."]),
        ("en", "2) A dog. b) A cat.", ["", "2) ", "A dog.", " b) ", "A cat."]),
        ("en", "(iv) A dog.", ["", "(iv) ", "A dog."]),
        ("en", "IV. A dog.", ["", "IV. ", "A dog."]),
        ("en", "  - 1.2. A dog. • A cat.", ["", "  - 1.2. ", "A dog.", " • ", "A cat."]),
        ("en", "# A dog\n* A cat", ["", "# ", "A dog", "\n* ", "A cat"]),
        ("en", "1. (The doctor sleeps.) The dog runs.", ["", "1. ", "(The doctor sleeps.)", " ", "The dog runs."]),
        ("en", "A. A dog.\nB. A cat.", ["", "A. ", "A dog.", "\nB. ", "A cat."]),
        ("he", "א. כלב.\nב. חתול.", ["", "א. ", "כלב.", "\nב. ", "חתול."]),
        ("en", "a. A dog. b. A cat.", ["", "a. ", "A dog.", " b. ", "A cat."]),
        ("en", "ii. A dog.\nⅣ. A cat.", ["", "ii. ", "A dog.", "\nⅣ. ", "A cat."]),
        ("en", "① A dog. ⒉ A cat.", ["", "① ", "A dog.", " ⒉ ", "A cat."]),
        ("my", "၁။ မြန်မာ။ ၂။ မြန်မာ။", ["", "၁။ ", "မြန်မာ။", " ၂။ ", "မြန်မာ။"]),
        ("en", "[x] A dog.\n- [ ] A cat.", ["", "[x] ", "A dog.", "\n- [ ] ", "A cat."]),
        ("de", "z. B. Hunde.", ["z. B. Hunde."]),
        ("en", "***", ["", "***"]),
        ("de", "1. Ein Hund.", ["", "1. ", "Ein Hund."]),
        ("ja", "1. 犬。", ["", "1. ", "犬。"]),
        ("hy", "1. Անի:\n- 2. Բաբա։", ["", "1. ", "Անի:", "\n- 2. ", "Բաբա։"]),
        ("ru", "а) Собака. – Да.", ["", "а) ", "Собака.", " – ", "Да."]),
        ("en", "-5 degrees", ["-5 degrees"]),
        ("en", "3.5 km", ["3.5 km"]),
        ("en", "A. Smith sleeps.", ["A. Smith sleeps."]),
        ("en", "No. 5 sleeps.", ["No. 5 sleeps."]),
        ("en", "#tag", ["#tag"]),
        ("de", "1. Mai ist ein Feiertag.", ["1. Mai ist ein Feiertag."]),
        ("de", "3. 5. 2024 kam er.", ["3. 5. 2024 kam er."]),
        ("en", "2024. 12. 1.", ["2024. 12. 1."]),
    ],
)
def test_markers_of_lists_are_no_part_of_a_sentence(language: str, text: str, parts: list[str]) -> None:
    assert split_sentences(text, language) == parts


def test_line_breaks_stay_and_spaces_are_those_of_the_target_language() -> None:
    parts = split_sentences("你好。今天！\n\n好。", "zh")
    assert "".join(joined_parts(["Hello.", "Today!", "Good."], parts)) == "Hello. Today!\n\nGood."
    parts = split_sentences("Hello.  Today!\r\n- Good. ", "en")
    assert "".join(joined_parts(["你好。", "今天！", "好。"], parts)) == "你好。今天！\r\n- 好。 "


@given(st.from_regex(r"[A-Za-zÀ-ɏ][A-Za-zÀ-ɏ0-9 ,'’-]{9,40}[A-Za-zÀ-ɏ0-9][.!?]?", fullmatch=True))
def test_what_is_plainly_one_sentence_is_one_for_the_splitter_too(text: str) -> None:
    """A line end makes the splitter look closer."""
    assert split_sentences(text, "en") == [text] and split_sentences(f"{text}\n", "en") == [text, "\n"]


def test_only_chinese_and_japanese_sentences_touch() -> None:
    parts = split_sentences("Hello. Today!", "en")
    for sentences, text in (
        (["สวัสดี", "วันนี้"], "สวัสดี วันนี้"),
        (["សួស្តី។", "ថ្ងៃនេះ។"], "សួស្តី។ ថ្ងៃនេះ។"),
        (["你好", "ABC。"], "你好ABC。"),
        (["안녕.", "오늘!"], "안녕. 오늘!"),
    ):
        assert "".join(joined_parts(sentences, parts)) == text
        back = split_sentences("你好。今天！", "zh")
        assert "".join(joined_parts(sentences, back)) == text


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("my", "သူလာ။သူလာ။"),
        ("bo", "བོད་སྐད་ཡིག །བཀྲ་ཤིས་བདེ་ལེགས།"),
        ("am", "ሰላም፡፡ደህና ነኝ።"),
        ("bn", "সে এল।সে গেল।"),
        ("ur", "وہ آیا۔وہ گیا۔"),
        ("th", "ไทย" * 600),
    ],
)
def test_sentences_that_touch_get_a_space(language: str, text: str) -> None:
    parts = split_sentences(text, language)
    assert "".join(joined_parts(["A dog.", "A cat."], parts)) == "A dog. A cat."
    assert "".join(joined_parts(["狗。", "猫。"], parts)) == "狗。猫。"


@pytest.mark.parametrize("behind", ["👍", "¹ Բ", "</p>", "~~", "\u200b"])
def test_what_is_no_sentence_stays_joined_to_the_one_before(behind: str) -> None:
    parts = split_sentences(f"Անի։{behind}", "hy")
    assert "".join(joined_parts(["A dog.", *parts[2::2]], parts)) == f"A dog.{behind}"


def test_without_splitting_a_line_is_a_sentence() -> None:
    assert split_sentences(" A dog. A cat. ", None) == [" A dog. A cat. "]
    assert split_sentences("A dog. A cat.\n\n1. B\n", None) == ["A dog. A cat.", "\n\n", "1. B", "\n"]


def test_the_first_sentence_has_the_prefix_without_the_markers() -> None:
    parts = split_sentences("1. A dog. A cat.", "en")
    assert prefixes_of(parts, "1. Ein") == ["", "Ein", ""] and prefixes_of(parts, "1") == [""] * 3
    assert prefixes_of(parts, "Ein") == ["", "Ein", ""]
    assert prefixes_of([""], "Ein") == ["Ein"]


def test_a_text_without_ends_of_sentences_is_cut() -> None:
    for text, language in (("a, b " * 2000, "en"), ("中" * 5000, "zh"), ("中文，" * 900 + "x " * 900, "zh")):
        parts = split_sentences(text, language)
        assert "".join(parts) == text and max(map(len, parts)) <= LONGEST


@pytest.mark.parametrize("word", ["x" * 5000, "aGVsbG8/" * 300, "ไทย" * 400, "a.b?c" * 3000, "1,2;" * 600])
def test_a_word_is_never_cut(word: str) -> None:
    text = f"The doctor calls {word}. A dog runs."
    assert split_sentences(text, "en") == [f"The doctor calls {word}.", " ", "A dog runs."]
    assert split_sentences(word, "en") == [word]


@pytest.mark.parametrize("unit", ["1. ", "“", "(a.) ", "- ", '"a. '])
def test_the_time_is_linear_in_the_length(unit: str) -> None:
    """Of a quadratic function, this would take minutes."""
    text = unit * 100_000
    assert "".join(split_sentences(text, "en")) == text


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("The doctor reads 책. The dog sleeps.", 2),
        ("The dog runs 3 م. The doctor sleeps.", 2),
        ("Βιταμίνη Α. The dog sleeps.", 2),
        ("네. 개가 잔다.", 2),
        ("The doctor calls Γ. Παπαδόπουλος.", 1),
        ("ம. கண்ணன் sleeps.", 1),
        ("A. Smith sleeps.", 1),
    ],
)
def test_an_initial_is_in_the_script_of_its_name_and_no_syllable(text: str, n: int) -> None:
    assert len([part for part in split_sentences(text, "en")[::2] if part]) == n


def test_letters_that_are_roman_numerals_too_mark_the_lines_of_a_list() -> None:
    text = "B. A dog runs.\nC. A cat runs.\nV. A man runs.\nW. A boy runs."
    assert split_sentences(text, "en")[1::2] == ["B. ", "\nC. ", "\nV. ", "\nW. "]
    text = "I. A dog runs.\nII. A cat runs.\nIV. A man runs.\nV. A boy runs.\nIX. A girl runs.\nX. A bird runs."
    assert split_sentences(text, "en")[1::2] == ["I. ", "\nII. ", "\nIV. ", "\nV. ", "\nIX. ", "\nX. "]
    assert split_sentences("C. Smith runs.\nI. Newton runs.", "en")[::2] == ["C. Smith runs.", "I. Newton runs."]

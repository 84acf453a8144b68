"""Codes of languages, and the languages of texts."""

from __future__ import annotations

import pytest

from transduce.text.languages import base_language, guess_languages, is_detectable, language_name, normalize_code
from transduce.text.sentences import split_sentences

EN_TO_DE = {"de": 0.5, "en": 1.0}


@pytest.mark.parametrize(
    ("code", "normal", "base"),
    [
        *(("EN", "en", "en"), ("en_GB", "en-gb", "en"), ("pt_BR", "pt-br", "pt"), ("PB", "pt-br", "pt")),
        *(("deu_Latn", "de-latn", "de"), ("fra_Latn", "fr-latn", "fr"), ("jpn_Jpan", "ja-jpan", "ja")),
        *(("fil", "tl", "tl"), ("eng", "en", "en"), ("yue_Hant", "yue-hant", "yue"), ("zho-CN", "zh-hans", "zh")),
        *(
            ("no", "nb", "nb"),
            ("no_NO", "nb-no", "nb"),
            ("NB", "nb", "nb"),
            ("iw", "he", "he"),
            ("IW-il", "he-il", "he"),
        ),
        *(
            ("zt", "zh-hant", "zh"),
            ("zh_Hant", "zh-hant", "zh"),
            ("zh-TW", "zh-hant", "zh"),
            ("zh-CN", "zh-hans", "zh"),
        ),
    ],
)
def test_codes_have_one_form(code: str, normal: str, base: str) -> None:
    assert (normalize_code(code), base_language(code)) == (normal, base)


def test_names_of_languages() -> None:
    names = [language_name(code) for code in ("no", "nb-NO", "iw", "pb", "zt", "xx")]
    assert names == ["Norwegian", "Norwegian", "Hebrew", "Portuguese", "Chinese", "xx"]
    assert [language_name(code) for code in ("deu_Latn", "fra_Latn", "jpn_Jpan")] == ["German", "French", "Japanese"]
    assert is_detectable("deu_Latn") and is_detectable("jpn_Jpan")


def test_sentences_end_alike_under_long_codes() -> None:
    text = "Am 3. Mai kam Dr. Weber. Er ging bald."
    assert split_sentences(text, "deu_Latn") == split_sentences(text, "de") != [text]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The old doctor sleeps.", "en"), ("A dog runs.", "en"), ("Hello", "en"), ("Thank you", "en"), ("Yes", "en"),
        ("Der alte Arzt schläft.", "de"), ("Guten Tag", "de"), ("Nein", "de"),
        ("Le vieux médecin dort.", "fr"), ("Bonjour le monde", "fr"), ("¿Cómo estás?", "es"), ("你好", "zh"),
        ("猫が走る。", "ja"), ("Старый врач спит.", "ru"), ("Ο γιατρός κοιμάται.", "el"), ("הרופא ישן.", "he"),
        ("ឆ្កែធំឃើញសៀវភៅ", "km"), ("ໝາໃຫຍ່", "lo"), ("ලොකු බල්ලා", "si"), ("ခွေးကြီး", "my"), ("ትልቅ ውሻ", "am"),
        ("ദൊക", "ml"), ("iPhone ಮತ್ತು ಪುಸ್ತಕ 5", "kn"), ("The dog ឆ្កែ runs.", "en"),
        ('<p class="the quick container"><b>Der alte Arzt schläft.</b></p> https://the.example/has/words', "de"),
    ],
)  # fmt: skip
def test_the_language_of_a_text_is_one_of_all(text: str, language: str) -> None:
    (guess,) = guess_languages([text], EN_TO_DE)
    assert next(iter(guess)) == language and sum(guess.values()) == pytest.approx(1)


@pytest.mark.parametrize("text", ["", " ", "123", "😀", "1,000.50 %", "***", "<br/>", "https://example.org/the/page"])
def test_a_text_without_words_has_no_language(text: str) -> None:
    assert guess_languages([text], EN_TO_DE) == [{}]


def test_texts_are_evidence_for_each_other() -> None:
    expected = {"nl": 1.0, "de": 1.0}
    (alone,) = guess_languages(["Hallo!"], expected)
    for code, text in (("de", "Der alte Arzt schläft nicht."), ("nl", "De oude dokter slaapt niet.")):
        beside, other, number = guess_languages(["Hallo!", text, "123"], expected)
        assert beside[code] > alone[code] and next(iter(beside)) == next(iter(other)) == code and not number
    mixed = guess_languages(["Der alte Arzt schläft nicht.", "The old doctor does not sleep."], {"en": 1.0, "de": 1.0})
    assert [next(iter(guess)) for guess in mixed] == ["de", "en"]


def test_languages_that_cannot_be_detected() -> None:
    assert [is_detectable(code) for code in ("no", "zh_Hant", "fo", "src")] == [True, True, False, False]
    (guess,) = guess_languages(["The old doctor sleeps."], {"fo": 1.0})
    assert next(iter(guess)) == "en"


def test_a_script_that_the_detector_lacks_tells_the_language() -> None:
    assert is_detectable("lao_Laoo") and is_detectable("tir") and not is_detectable("")
    assert guess_languages(["ትልቅ ውሻ", "A dog runs."], {"en": 1.0, "ti_ET": 1.0})[0] == {"ti_ET": 1.0}

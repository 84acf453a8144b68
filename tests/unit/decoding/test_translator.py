"""`Translator`: translation, scoring, options, notes, streams."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from transduce.config.decoding import DecodingOptions
from transduce.config.settings import DataSettings
from transduce.decoding import translator as translator_module
from transduce.decoding.engine import Hypothesis
from transduce.decoding.results import Translation, lost_numbers
from transduce.decoding.torch_engine import TorchEngine, make_batches
from transduce.decoding.translator import EncodedSource, Translator, chunks
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.text.sentences import split_sentences


class Untouched(nn.Linear):
    """A model that fails the test when it is used."""

    def start(self, src: torch.Tensor, *, capacity: int, n_beams: int) -> object:
        raise AssertionError("the model was asked to start")

    forward = advance = logits = start  # type: ignore[assignment]


def test_translations_are_in_the_order_of_the_lines(translator: Translator, texts: list[str]) -> None:
    together = translator.translate(texts)
    assert [t.text for t in together] == [translator.translate([text])[0].text for text in texts]
    assert len({t.text for t in together}) > 40, "the model does not look at its source"
    for t in together:
        assert t.sentences or t.text == translator.tokenizers.tgt.decode(t.ids)
        assert len(t.candidates) == 1


def test_blank_lines_stay_as_they_are_without_the_model(translator: Translator) -> None:
    untouched = Translator(TorchEngine(Untouched(1, 1).eval()), translator.tokenizers)
    for blank in ("", " ", "\t"):
        t = untouched.translate(blank)
        assert (t.text, t.ids, t.score, t.finished, t.note) == (blank, (), 0.0, True, "")
    assert untouched.translate([]) == []
    assert untouched.score([""], [""])[0].log_prob == 0.0
    lines = translator.translate(["", "A dog.", ""])
    assert [bool(t.ids) for t in lines] == [False, bool(translator.translate(["A dog."])[0].ids), False]


def test_a_text_without_letters_stays_as_it_is_between_languages_only(translator: Translator) -> None:
    untouched = TorchEngine(Untouched(1, 1).eval())
    texts = ["1,234", "២០២៦ – 5.", " (12) ", "* 7 *\n| 3 |"]
    between = Translator(untouched, translator.tokenizers, data=DataSettings(src_lang="en", tgt_lang="de"))
    assert [(t.text, t.note) for t in between.translate(texts)] == [(text, "") for text in texts]
    with pytest.raises(AssertionError, match="asked to start"):  # with a prefix, the model continues it
        between.translate(["1990"], prefixes=["Ein Hund"])
    for data in (None, DataSettings(src_lang="en", tgt_lang="words")):  # such as a model that spells numbers
        with pytest.raises(AssertionError, match="asked to start"):
            Translator(untouched, translator.tokenizers, data=data).translate("1,234")


def test_an_empty_translation_and_lost_numbers_are_noted(translator: Translator) -> None:
    def note_on_output(text: str, output: str) -> str:
        (source,) = translator.encode([text], DecodingOptions())
        assert isinstance(source, EncodedSource)
        hypothesis = Hypothesis(tuple(translator.tokenizers.tgt.encode(output)), -1.0, -1.0)
        return translator.decode(source, [hypothesis], DecodingOptions()).note

    assert note_on_output("A dog.", "") == "the translation is empty"
    assert note_on_output("A dog.", "Ein Hund.") == ""
    assert note_on_output("A dog 123.", "Ein Hund.").endswith("numbers that the translation lacks: 123")


@pytest.mark.parametrize(
    ("src", "tgt", "lost"),
    [
        ("in 2026", "im Jahr 206", ["2026"]),
        ("1,234 or 1 234 or 1234", "1.234", []),
        ("1,00,000 fish", "100,000 Fische", []),
        ("on 2026-11-30", "am 30.11.2026", []),
        ("on 2026-11-30", "am 30.11.2025", ["2026-11-30"]),
        ("12 of 34", "nichts", []),
        ("២០២៦ and ૧૨૩", "2026 und 123", []),
        ("2026", "٢٠٢٦", []),
        ("100 and 1000", "1000", ["100"]),
    ],
)
def test_numbers_are_compared_without_separators_and_scripts(src: str, tgt: str, lost: list[str]) -> None:
    assert lost_numbers(src, tgt) == lost


def test_scores_equal_those_of_the_same_output(translator: Translator, texts: list[str]) -> None:
    """The sums of beam search equal those of one forward."""
    sources, outputs = [], []
    for text, translation in zip(
        texts[:30], translator.translate(texts[:30], DecodingOptions(beam=4, n_best=4, split=False)), strict=True
    ):
        for candidate in translation.candidates:
            sources.append(text)
            outputs.append(candidate)
    scores = translator.score(sources, [c.ids for c in outputs])
    assert {c.finished for c in outputs} == {True, False}
    for score, candidate in zip(scores, outputs, strict=True):
        tokens = score.token_log_probs if candidate.finished else score.token_log_probs[:-1]
        assert candidate.log_prob == pytest.approx(sum(tokens), rel=1e-5)
        assert candidate.score == pytest.approx(sum(tokens) / len(tokens), rel=1e-5)


def test_score_of_texts(translator: Translator, texts: list[str]) -> None:
    tgts = ["Ein Hund.", "", "Die alte Frau schläft heute."]
    srcs = [texts[0], texts[1], ""]
    ids = [translator.tokenizers.tgt.encode(tgt) for tgt in tgts]
    scores = translator.score(srcs, tgts)
    assert scores == translator.score(srcs, ids)
    assert [s.n_tokens for s in scores] == [len(i) + 1 for i in ids]
    assert all(s.log_prob == pytest.approx(sum(s.token_log_probs)) and s.log_prob < 0 for s in scores)
    alone = [translator.score([src], [tgt])[0] for src, tgt in zip(srcs, tgts, strict=True)]
    for one, other in zip(scores, alone, strict=True):
        assert one.token_log_probs == pytest.approx(other.token_log_probs, rel=1e-5)
    with pytest.raises(DataError, match="2 sources but 1"):
        translator.score(["a", "b"], ["c"])


def test_options_change_the_search(translator: Translator, texts: list[str]) -> None:
    one, three = (translator.translate(texts[:5], DecodingOptions(beam=3, n_best=n)) for n in (1, 3))
    assert [t.text for t in one] == [t.text for t in three]
    for t in three:
        assert len(t.candidates) == 3
        assert sorted((c.score for c in t.candidates), reverse=True) == [c.score for c in t.candidates]
    for t in translator.translate(texts[:5], DecodingOptions(length_penalty=0.0)):
        assert t.score == t.log_prob
    wide = translator.translate(texts[:5], DecodingOptions(n_best=9))  # the beam widens where none is given
    assert all(len(t.candidates) == 9 for t in wide)
    with pytest.raises(SettingsError, match="n_best = 4"):
        translator.translate(texts[:1], DecodingOptions(beam=3, n_best=4))


def test_a_list_of_the_best_has_each_text_once(translator: Translator, texts: list[str]) -> None:
    tokenizer = translator.tokenizers.tgt
    ids = tuple(tokenizer.encode(texts[0]))
    other = tuple(tokenizer.encode(texts[1]))
    spellings = (
        (*ids[:n], first, second, *ids[n + 1 :])
        for n in range(len(ids))
        for first in range(tokenizer.vocab_size)
        for second in range(tokenizer.vocab_size)
    )
    again = next(one for one in spellings if tokenizer.decode(one) == tokenizer.decode(ids))
    found = [Hypothesis(one, log_prob, log_prob) for log_prob, one in enumerate((again, other, ids), -3)]
    (source,) = translator.encode(texts[:1], DecodingOptions())
    assert isinstance(source, EncodedSource)
    candidates = translator.decode(source, found, DecodingOptions(n_best=3)).candidates
    assert [one.ids for one in candidates] == [again, other]
    samples = translator.decode(source, found, DecodingOptions(n_best=3, sample=True))
    assert len(samples.candidates) == 3


def test_a_cut_off_output_is_flagged(translator: Translator, texts: list[str]) -> None:
    for t in translator.translate(texts, DecodingOptions(max_length=2, split=False)):
        assert len(t.ids) <= 2
        assert t.finished == ("cut off at 2 tokens" not in t.note)
    assert not all(t.finished for t in translator.translate(texts, DecodingOptions(max_length=2)))


def test_the_default_length_limit_depends_on_each_sentence(translator: Translator, texts: list[str]) -> None:
    never_ends = Translator(translator.engine, translator.tokenizers)
    n_ids = len(translator.tokenizers.src.encode("A dog."))
    for found in (never_ends.translate(["A dog."]), never_ends.translate(["A dog.", *texts])):
        assert len(found[0].ids) <= min(40, 2 * n_ids + 16)


def test_a_source_longer_than_in_training_is_translated_whole_and_noted(translator: Translator) -> None:
    text = " ".join(["dog"] * 200)
    assert len(translator.tokenizers.src.encode(text)) > 60
    plain, noted = translator.translate(["A dog.", text], DecodingOptions(max_length=5))
    assert "in training data.max_length was 60" in noted.note
    assert "training" not in plain.note


def test_a_source_longer_than_the_model_takes_gets_an_empty_translation_and_a_note(
    make_run: Callable[..., Path],
) -> None:
    learned = Translator.load(make_run(positions="learned", max_positions=61), device="cpu")
    text = " ".join(["dog"] * 200)
    short, empty, long = learned.translate(["A dog.", "", text])
    assert short.ids and "not translated" not in short.note and not empty.note
    assert long.text == "" and "not translated: " in long.note and "takes at most 60" in long.note
    with pytest.raises(DataError, match="line 1: a translation of"):
        learned.score(["A dog."], [text])
    fits = next(" ".join(["dog"] * n) for n in range(70, 0, -1) if len(learned.tokenizers.src.encode("dog " * n)) <= 60)
    assert "not translated" not in learned.translate([fits])[0].note


def test_an_output_is_cut_off_at_the_learned_positions(make_run: Callable[..., Path]) -> None:
    learned = Translator.load(make_run(positions="learned", max_positions=61), device="cpu")
    options = DecodingOptions(max_length=2000, no_repeat_ngram=1)  # what repeats nothing is long
    for translator in (learned, Translator(TorchEngine(learned.model), learned.tokenizers, position_limit=61)):
        (found,) = translator.translate(["dogs"], options)
        assert len(found.ids) == 60 and found.note == "output cut off at 60 tokens"
        assert translator.score(["dogs"], [found.ids]) and translator.align(["dogs"], [found])
        with pytest.raises(DataError, match=r"its output may have 60; shorten the prefix$"):
            translator.translate(["dogs"], options, prefixes=["dog " * 61])


def test_text_of_any_size_streams(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads at most one chunk ahead."""
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for i in range(100):
            read += 1
            yield f"dog {i}"

    monkeypatch.setattr(translator_module, "CHUNK_LINES", 8)
    found = translator.translate_lines(lines(), DecodingOptions(beam=1, max_length=3))
    assert read == 0
    for n, translation in enumerate(found, start=1):
        assert isinstance(translation, Translation)
        assert n <= read <= n + 8
    assert n == read == 100


def test_samples_are_a_function_of_seed_and_place(translator: Translator, texts: list[str]) -> None:
    drawn = list(translator.translate(texts[:20], DecodingOptions(seed=5, n_best=2, sample=True, top_k=20)))
    assert all(len(t.candidates) == 2 for t in drawn)
    again = list(
        translator.translate(iter(texts[:20]), DecodingOptions(seed=5, n_best=2, sample=True, top_k=20, batch_tokens=1))
    )
    assert [[c.ids for c in t.candidates] for t in drawn] == [[c.ids for c in t.candidates] for t in again]
    other = list(translator.translate(texts[:20], DecodingOptions(seed=6, n_best=2, sample=True, top_k=20)))
    assert [t.ids for t in other] != [t.ids for t in drawn]
    same_text = list(translator.translate([texts[0]] * 10, DecodingOptions(sample=True)))
    assert len({t.ids for t in same_text}) > 1


def test_bfloat16_is_close(run: Path, texts: list[str]) -> None:
    full, half = (Translator.load(run, device="cpu", precision=p) for p in ("float32", "bfloat16"))
    assert half.model.output_weight.dtype == torch.bfloat16
    exact = full.score(texts, ["Ein Hund schläft."] * len(texts))
    near = half.score(texts, ["Ein Hund schläft."] * len(texts))
    worst = max(abs(a.log_prob - b.log_prob) / abs(a.log_prob) for a, b in zip(exact, near, strict=True))
    assert 0 < worst < 0.05
    assert len(half.translate(texts[:5])) == 5


def test_a_bad_device_and_a_missing_folder_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="device = 'gpu'"):
        Translator.load(run, device="gpu")
    with pytest.raises(RunFolderError):
        Translator.load(tmp_path / "nothing")


# --- batches


def test_chunks() -> None:
    lines = ["a" * n for n in (1, 2, 3, 50, 1, 1, 1)]
    assert list(chunks(lines, n_lines=3, n_characters=40)) == [lines[:3], lines[3:4], lines[4:]]
    assert list(chunks([], n_lines=3, n_characters=40)) == []
    for wrong in (b"a dog", 1, None):
        with pytest.raises(TypeError, match=f"texts must be of type str, not {type(wrong).__name__}"):
            list(chunks(iter(["a", wrong])))


def test_make_batches() -> None:
    made = make_batches([3, 9, 1, 9, 4, 30, 2], budget=20, most=3, width=int)
    assert [[place for place, _ in batch] for batch in made] == [[5], [1, 3], [4, 0, 6], [2]]
    assert made[1] == [(1, 9), (3, 9)]
    assert make_batches([], budget=20, most=3, width=len) == []


def test_loading_a_model_does_not_import_the_compiler(make_run: Callable[..., Path]) -> None:
    """It would cost every command 1 to 2 seconds and 77 MB."""
    code = (
        "import sys; from transduce import Translator; [Translator.load(run) for run in sys.argv[1:]];"
        "print('torch._dynamo' in sys.modules)"
    )
    runs = [str(make_run(positions=scheme)) for scheme in ("sinusoidal", "learned", "rotary", "t5", "shaw")]
    done = subprocess.run([sys.executable, "-c", code, *runs], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def sentences(texts: list[str]) -> list[str]:
    return [text for text in texts if len(split_sentences(text, "en")) == 1][:3]


def test_sentences_of_a_line_are_translated_one_by_one(translator: Translator, sentences: list[str]) -> None:
    options = DecodingOptions(beam=3, n_best=3)
    alone = translator.translate(sentences, options)
    (line,) = translator.translate(["2) {} ({}) {}".format(*sentences)], options)
    assert len(line.candidates) == 3
    brackets = translator.translate([f"({sentences[1]})"], options)[0]
    for rank, joined in enumerate(line.candidates):
        parts = [one.candidates[rank] for one in (alone[0], brackets, alone[2])]
        assert joined.text == "2) " + " ".join(part.text for part in parts)
        assert joined.ids == sum((part.ids for part in parts), ())
        assert joined.log_prob == pytest.approx(sum(part.log_prob for part in parts))
        assert joined.score == pytest.approx(sum(part.score for part in parts) / 3)
        assert joined.finished == all(part.finished for part in parts)
    scores = [one.score for one in line.candidates]
    assert scores == sorted(scores, reverse=True)


def test_a_single_sentence_is_translated_as_it_is(translator: Translator, sentences: list[str]) -> None:
    lines = [*sentences, f"  {sentences[0]} ", "", " "]
    for options in (DecodingOptions(), DecodingOptions(sample=True, n_best=2, seed=4)):
        whole = options.model_copy(update={"split": False})
        assert translator.translate(lines, options) == translator.translate(lines, whole)


@pytest.mark.parametrize("options", [DecodingOptions(), DecodingOptions(split=False)])
def test_spaces_around_a_text_stay_and_cells_are_translated_one_by_one(
    translator: Translator, sentences: list[str], options: DecodingOptions
) -> None:
    one, two = translator.translate(sentences[:2], options)
    for before, behind in (("  ", " "), ("\t", "\u00a0"), ("\u3000", "\r\n")):
        spaced = translator.translate(f"{before}{sentences[0]}{behind}", options)
        assert (spaced.text, spaced.ids, spaced.note) == (f"{before}{one.text}{behind}", one.ids, one.note)
    row = translator.translate(f"{sentences[0]}\t{sentences[1]}", options)
    assert row.text == f"{one.text}\t{two.text}"


def test_runs_of_spaces_that_the_vocabulary_joins_are_noted(translator: Translator) -> None:
    one, two = translator.translate(["a man reads .", "a  man reads ."])
    assert one.text == two.text and "spaces" in two.note and "spaces" not in one.note


def test_splitting_can_be_switched_off_by_the_run_and_by_the_call(translator: Translator, sentences: list[str]) -> None:
    line = " ".join(sentences)
    (whole,) = translator.translate([line], DecodingOptions(split=False))
    assert not whole.sentences and whole.text != translator.translate([line])[0].text
    settings = translator.settings.model_copy(update={"split": False})
    paragraphs = Translator(translator.engine, translator.tokenizers, settings=settings, data=translator.data)
    assert paragraphs.translate([line]) == [whole]
    assert paragraphs.translate([line], DecodingOptions(split=True)) == translator.translate([line])
    (lines,) = paragraphs.translate([f"{line}\n\n{line}"])
    assert lines.text == f"{whole.text}\n\n{whole.text}"


def test_samples_of_sentences_depend_on_their_line_only(translator: Translator, sentences: list[str]) -> None:
    options, line = DecodingOptions(sample=True, seed=7), " ".join(sentences)
    together = translator.translate([line, line, sentences[0]], options)
    assert together[0].text != together[1].text
    assert translator.translate(["", line, ""], options)[1] == together[1]
    assert list(translator.translate_lines([line], options, first=1)) == [together[1]]


def test_the_first_sentence_has_the_prefix(translator: Translator, sentences: list[str]) -> None:
    (line,) = translator.translate(["- " + " ".join(sentences)], prefixes=["- Ein Hund"])
    alone = [translator.translate(sentences[:1], prefixes=["Ein Hund"])[0], *translator.translate(sentences[1:])]
    assert line.text == "- " + " ".join(one.text for one in alone)


def test_cuts_of_sentences_are_noted(translator: Translator, sentences: list[str]) -> None:
    (line,) = translator.translate([" ".join(sentences)], DecodingOptions(max_length=1))
    assert not line.finished and line.note == "output cut off at 1 tokens"


def test_links_of_sentences_are_those_of_the_line(translator: Translator, sentences: list[str]) -> None:
    line = "- " + " ".join(sentences)
    (translation,) = translator.translate([line])
    (links,) = translator.align([line], [translation])
    for sentence, alone in zip(translation.sentences, sentences, strict=True):
        (expected,) = translator.align([alone], [sentence.translation])
        src, tgt = sentence.src_start, sentence.tgt_start
        assert line[src:].startswith(alone) and translation.text[tgt:].startswith(sentence.translation.text)
        assert {(a + src, b + src, c + tgt, d + tgt) for a, b, c, d in expected} <= set(links)

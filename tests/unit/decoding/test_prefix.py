"""Prefixes: what every output of a sentence starts with. test_search.py compares forced ones with a search on lists."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from native_engines import engine_for, needs_library
from oracle.stand_in import EOS, PAD, untrained
from transduce.cli.app import app
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.data.store import Example
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.prefix import spell_last_word
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.text.special import SPACE
from transduce.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("unchecked")
SETTINGS = Settings.from_mapping(
    {"model": {"d_model": 32, "d_ff": 48, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 2}}
)
MODEL = untrained(SETTINGS, n_src=90, n_tgt=90)


def sources(n: int) -> list[DecodingInput]:
    pick = random.Random(1)
    return [
        DecodingInput((i,), [pick.randrange(4, 90) for _ in range(9)], 12, tuple(pick.choices(range(4, 90), k=i % 13)))
        for i in range(n)
    ]


@needs_library
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_both_engines_force_the_same_and_count_the_prefix_in_the_score(beam: int) -> None:
    native, pytorch = engine_for(MODEL, SETTINGS, n_threads=2), TorchEngine(MODEL)
    asked, options = sources(30), DecodingOptions(beam=beam, n_best=beam)
    ours, theirs = native.translate(asked, options), pytorch.translate(asked, options)
    for source, one, other in zip(asked, ours, theirs, strict=True):
        assert [h.ids for h in one] == [h.ids for h in other]
        assert [h.log_prob for h in one] == pytest.approx([h.log_prob for h in other], abs=1e-4)
        assert all(h.ids[: len(source.prefix)] == source.prefix for h in one)
        assert native.translate([source], options) == [one], "the same bits alone"
    best = [(source, one[0]) for source, one in zip(asked, ours, strict=True)]
    scores = pytorch.score([Example(list(source.ids), list(h.ids)) for source, h in best])
    for (_, h), known in zip(best, scores, strict=True):
        assert h.log_prob == pytest.approx(sum(known[: len(h.ids) + h.finished]), abs=1e-3)
    if beam == 1:
        fast = native.translate(asked, DecodingOptions(beam=1, scores=False))
        assert [h[0].ids for h in fast] == [h[0].ids for h in ours]


def spelled(n: int) -> list[DecodingInput]:
    """Sources with random steps behind a prefix."""
    pick = random.Random(2)
    asked = []
    for source in sources(n):
        n_states = pick.randrange(4)
        tokens = [sorted(pick.sample(range(EOS, 90), pick.choice([1, 3, 40]))) for _ in range(n_states)]
        steps = [
            (s, token, pick.randrange(s + 1, n_states + 1)) for s, of_state in enumerate(tokens) for token in of_state
        ]
        asked.append(replace(source, prefix=source.prefix[:5], spelling=tuple(steps)))
    return asked


def obeys(source: DecodingInput, h: Hypothesis) -> bool:
    """Whether a hypothesis takes only the steps that there are."""
    steps, state = {(state, token): after for state, token, after in source.spelling}, 0
    for token in (*h.ids, *[EOS] * h.finished)[len(source.prefix) :]:
        if not any(state == one for one, _ in steps):
            return True
        if (state, token) not in steps:
            return False
        state = steps[state, token]
    return True


@needs_library
@pytest.mark.parametrize(
    "options",
    [
        *(DecodingOptions(beam=beam, n_best=beam, no_repeat_ngram=ngram) for beam in (1, 4) for ngram in (0, 1)),
        *(DecodingOptions(sample=True, n_best=2, top_k=k) for k in (0, 3)),
    ],
)
def test_both_engines_take_the_steps_of_a_spelling(options: DecodingOptions) -> None:
    native, pytorch, asked = engine_for(MODEL, SETTINGS, n_threads=2), TorchEngine(MODEL), spelled(40)
    ours, theirs = native.translate(asked, options), pytorch.translate(asked, options)
    for source, one, other in zip(asked, ours, theirs, strict=True):
        assert [h.ids for h in one] == [h.ids for h in other]
        assert [h.log_prob for h in one] == pytest.approx([h.log_prob for h in other], abs=1e-4)
        assert all(h.ids[: len(source.prefix)] == source.prefix and obeys(source, h) for h in one)
        assert native.translate([source], options) == [one], "the same bits alone"
    for source, other in [*zip(asked, theirs, strict=True)][::4]:
        assert [[h.ids for h in alone] for alone in pytorch.translate([source], options)] == [[h.ids for h in other]]
    best = [(source, h) for source, one in zip(asked, ours, strict=True) for h in one[:1]]
    scores = pytorch.score([Example(list(source.ids), list(h.ids)) for source, h in best])
    for (_, h), known in zip(best, scores, strict=True):
        assert h.log_prob == pytest.approx(sum(known[: len(h.ids) + h.finished]), abs=1e-3)
    if options.beam == 1 and not options.sample:
        fast = native.translate(asked, options.model_copy(update={"scores": False}))
        assert [h[0].ids for h in fast] == [h[0].ids for h in ours]


@needs_library
@pytest.mark.parametrize(
    "steps", [[(1, 5, 1)], [(0, 90, 1)], [(0, -1, 1)], [(0, PAD, 1)], [(0, 5, 1), (0, 5, 2)], [(-1, 5, 1)]]
)
def test_steps_that_cannot_be_are_refused(steps: list[tuple[int, int, int]]) -> None:
    with pytest.raises(SettingsError, match="spellings"):
        engine_for(MODEL, SETTINGS).translate([DecodingInput((0,), [5], 9, spelling=tuple(steps))], DecodingOptions())


@pytest.mark.parametrize(
    "make", [TorchEngine, pytest.param(lambda model: engine_for(model, SETTINGS), marks=needs_library)]
)
def test_samples_start_with_the_prefix(make: Callable[..., Engine]) -> None:
    found = make(MODEL).translate(sources(13), DecodingOptions(sample=True, temperature=2.0, n_best=3))
    for source, drawn in zip(sources(13), found, strict=True):
        assert all(h.ids[: len(source.prefix)] == source.prefix for h in drawn)
    assert len({h.ids for h in found[3]}) == 3, "and differ after it"


def test_translations_start_with_prefixes(translator: Translator, texts: list[str]) -> None:
    start = "ein Mann"
    ids = tuple(translator.tokenizers.tgt.encode(start))
    first, second, third, empty = translator.translate([*[texts[0]] * 3, ""], prefixes=[start, "", start, start])
    assert first == third and first.candidates[0].ids[: len(ids)] == ids
    assert [second] == translator.translate([texts[0]]) and empty.text == ""
    with pytest.raises(DataError, match="2 texts but 1 prefixes"):
        translator.translate(texts[:2], prefixes=[start])
    with pytest.raises(DataError, match=r"line 2: a prefix of .* tokens; its output may have 3"):
        translator.translate(texts[:2], DecodingOptions(max_length=3), prefixes=["", start * 9])


@pytest.mark.parametrize(
    "options", [DecodingOptions(beam=1), DecodingOptions(beam=4, n_best=4), DecodingOptions(sample=True, n_best=2)]
)
def test_outputs_begin_with_unfinished_words(
    translator: Translator, texts: list[str], options: DecodingOptions
) -> None:
    whole = [one.text for one in translator.translate(texts[:20], options)]
    starts = [text[: random.Random(text).randrange(len(text) // 2 + 1)].rstrip() for text in whole]
    again = translator.translate(texts[:20], options, prefixes=starts)
    for start, one in zip(starts, again, strict=True):
        assert all(candidate.text.startswith(start) for candidate in one.candidates)
    pytorch = Translator(TorchEngine(translator.model), translator.tokenizers, settings=translator.settings)
    theirs = pytorch.translate(texts[:20], options, prefixes=starts)
    assert [[c.text for c in one.candidates] for one in theirs] == [[c.text for c in one.candidates] for one in again]


def test_words_are_spelled_by_all_pieces_that_the_vocabulary_has(translator: Translator) -> None:
    tgt = translator.tokenizers.tgt
    assert isinstance(tgt, Tokenizer)
    for prefix in ("ein Mann", "ei", "ein M", "ein Mann. Ein", "zwei-ein"):
        ids, spelling = spell_last_word(tgt.encode(prefix), prefix, tgt, limit=99, may_end=True)
        rest = "".join(tgt.pieces(tgt.encode(prefix))[len(ids) :]).replace(SPACE, " ")
        steps = {(state, tgt.pieces([i])[0].replace(SPACE, " ")): after for state, i, after in spelling}
        texts = {(0, "")}
        while any(state < len(rest) for state, _ in texts):
            texts = {
                (after, text + piece)
                for state, text in texts
                for (at, piece), after in steps.items()
                if at == state and state < len(rest)
            } | {one for one in texts if one[0] == len(rest)}
        assert {text[: len(rest)] for _, text in texts} == {rest}, prefix
        assert rest.lstrip() and not any(sign in rest for sign in ".-")
    for finished in ("ein.", "ein-", "zwei "):
        ids, spelling = spell_last_word(tgt.encode(finished), finished, tgt, limit=99, may_end=False)
        assert ids == tgt.encode(finished)
        assert bool(spelling) == finished.endswith(" ") and EOS not in [token for _, token, _ in spelling]
    assert not spell_last_word(tgt.encode("ein Mann"), "ein Mann", tgt, limit=3, may_end=True)[1], "too little room"


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("ein  Mann", "character 4, U\\+0020, would become nothing"),
        (" ein", "character 1, U\\+0020"),
        (" ", "U\\+0020"),
    ],
)
def test_an_error_names_what_cannot_be_written(
    translator: Translator, texts: list[str], prefix: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        translator.translate(texts[:1], prefixes=[prefix])


def test_a_text_that_is_not_translated_takes_no_other_prefix(translator: Translator) -> None:
    assert translator.translate(["***"], prefixes=["**"])[0].text == "***"
    assert translator.translate(["", " "], prefixes=["ein", "ein"])[0].text == ""
    for text in ("***", "\u201c", "1. "):
        with pytest.raises(DataError, match=r"prefix 'ein': nothing in .* is translated"):
            translator.translate(["a", text], prefixes=["", "ein"])


def test_prefixes_from_a_file(run: Path, texts: list[str], tmp_path: Path) -> None:
    src, prefix, out = tmp_path / "in.en", tmp_path / "starts.de", tmp_path / "out.de"
    src.write_text("\n".join(texts[:3]) + "\n")
    command = ["translate", str(run), str(src), "--prefix", str(prefix), "--device", "cpu", "-o", str(out)]
    prefix.write_text("ein\n\nzwei\n")
    assert CliRunner().invoke(app, command).exit_code == 0
    lines = out.read_text().splitlines()
    assert lines[0].startswith("ein") and lines[2].startswith("zwei")
    for content, message in (("ein\n", "line 2: there is no prefix"), ("a\n" * 4, "more lines than the text")):
        prefix.write_text(content)
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, DataError) and message in str(error)
    error = CliRunner().invoke(app, [*command[:-2], "--output-dir", str(tmp_path / "out")]).exception
    assert isinstance(error, SettingsError) and "--prefix" in str(error)

"""Shortlists: the tokens of a list alone have a probability, in both engines, whatever else is decoded."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fuzz.cases import update_checksum
from fuzz.mutations import BYTES, TENSORS
from native_engines import engine_for, instruction_sets, needs_library
from oracle.stand_in import BOS, EOS, PAD, StandIn, untrained
from transduce import Translator
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.decoding.engine import DecodingInput, Hypothesis
from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.decoding.search import beam_search
from transduce.decoding.shortlist import FILE, MOST_TOKENS, Shortlist, load_shortlist
from transduce.decoding.torch_engine import TorchEngine
from transduce.errors import RunFolderError, SettingsError
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import save_tensors
from transduce.text.special import UNK
from transduce.text.tokenizer import load_tokenizers

SETTINGS = Settings.from_mapping(
    {"model": {"d_model": 40, "d_ff": 48, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1}}
)
N_FILES = int(os.environ.get("TRANSDUCE_NATIVE_FUZZ", "300"))
N = 900
MODEL = untrained(SETTINGS, n_src=N, n_tgt=N)
UNTIED = Settings.from_mapping(
    {"model": SETTINGS.model.model_dump(exclude_unset=True) | {"tie": "none", "decoder_self": "ssru"}}
)


def sources(n: int, *, most: int = 700) -> list[DecodingInput]:
    """Lists of many sizes, also without one, and of a few tokens."""
    pick, found = random.Random(1), []
    for i in range(n):
        prefix = tuple(pick.choices(range(4, N), k=max(0, i % 9 - 5)))
        tokens = {EOS, UNK, *prefix, *pick.sample(range(4, N), [0, 1, 9, 62, 70, 200, most][i % 7])}
        allowed = None if i % 6 == 5 else np.array(sorted(tokens), np.int32)
        ids = [pick.randrange(4, N) for _ in range(1 + i % 11)]
        found.append(DecodingInput((i,), ids, 12, prefix, allowed))
    return found


def check_alike(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    assert [h.ids for h in ours] == [h.ids for h in theirs]
    assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], abs=1e-4)


@pytest.mark.parametrize("beam", [1, 4])
def test_search_with_lists_equals_search_in_a_model_without_the_other_tokens(beam: int) -> None:
    class Masked(StandIn):
        allowed: tuple[int, ...] = ()

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            others = [i for i in range(30) if i not in self.allowed]
            return super().logits(hidden).index_fill(-1, torch.tensor(others), -torch.inf)

    pick = random.Random(beam)
    srcs = torch.tensor([[*pick.choices(range(4, 30), k=3), EOS] for _ in range(6)])
    lists = [np.array(sorted({EOS, *pick.sample(range(4, 30), k)}), np.int32) for k in (1, 3, 5, 9, 20, 26)]
    together = beam_search(
        StandIn(30, seed=beam), srcs, DecodingOptions(beam=beam, n_best=beam), max_length=7, allowed=lists
    )
    for src, allowed, found in zip(srcs, lists, together, strict=True):
        masked = Masked(30, seed=beam)
        masked.allowed = tuple(allowed.tolist())
        (alone,) = beam_search(masked, src[None], DecodingOptions(beam=beam, n_best=beam), max_length=7)
        check_alike(found, alone)
        assert all({*h.ids} <= {*masked.allowed} for h in found)


@needs_library
@pytest.mark.parametrize("settings", [SETTINGS, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_both_engines_find_the_same(settings: Settings, beam: int) -> None:
    model = MODEL if settings is SETTINGS else untrained(settings, n_src=N, n_tgt=N)
    native, pytorch = engine_for(model, settings), TorchEngine(model)
    asked, options = sources(42), DecodingOptions(beam=beam, n_best=beam)
    ours = native.translate(asked, options)
    for source, one, other in zip(asked, ours, pytorch.translate(asked, options), strict=True):
        check_alike(one, other)
        assert source.allowed is None or all({*h.ids} <= {*source.allowed.tolist()} for h in one)
    if beam == 1:
        fast = native.translate(asked, DecodingOptions(beam=1, scores=False))
        assert [h[0].ids for h in fast] == [h[0].ids for h in ours]


@needs_library
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("beam", [1, 5])
def test_company_and_threads_change_no_bit(precision: NativePrecision, beam: int) -> None:
    options, asked = DecodingOptions(beam=beam, n_best=beam), sources(84)
    one, two = (engine_for(MODEL, SETTINGS, precision=precision, n_threads=n) for n in (1, 2))
    together = one.translate(asked, options)
    assert [one.translate([source], options)[0] for source in asked] == together
    order = random.Random(3).sample(range(len(asked)), len(asked))
    shuffled = two.translate([asked[i] for i in order], options)
    assert [shuffled[order.index(i)] for i in range(len(asked))] == together


@needs_library
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_list_of_all_tokens_gives_the_tokens_of_the_whole_vocabulary(precision: NativePrecision) -> None:
    native, options = engine_for(MODEL, SETTINGS, precision=precision), DecodingOptions(beam=3)
    ids, everything = [[5, 6, 7], [8]], np.array([i for i in range(N) if i not in (PAD, BOS)], np.int32)
    plain, listed = (
        native.translate([DecodingInput((i,), one, 9, (), tokens) for i, one in enumerate(ids)], options)
        for tokens in (None, everything)
    )
    assert [h[0].ids for h in plain] == [h[0].ids for h in listed]


@needs_library
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_other_instruction_sets(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in instruction_sets():
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("TRANSDUCE_NATIVE_ISA", isa)
    test_both_engines_find_the_same(SETTINGS, 2)
    for precision in PRECISIONS:
        test_company_and_threads_change_no_bit(precision, 5)


@needs_library
@pytest.mark.parametrize("allowed", [[2, 2, 3], [9, 3], [-1, 3], [3, N], [PAD, 3], [BOS, 3], [3, 8]], ids=str)
def test_the_library_refuses_lists_that_cannot_be(allowed: list[int]) -> None:
    source = DecodingInput((0,), [5], 9, (7,), np.array(allowed, np.int32))
    with pytest.raises(SettingsError, match="allowed"):
        engine_for(MODEL, SETTINGS).translate([source], DecodingOptions())


@needs_library
def test_ids_of_more_than_32_bits_do_not_wrap_around() -> None:
    engine, options = engine_for(MODEL, SETTINGS), DecodingOptions()
    with pytest.raises(SettingsError, match="token id 4294967301"):
        engine.translate([DecodingInput((0,), [5], 9, allowed=np.array([EOS, 2**32 + 5]))], options)
    narrow, wide = (
        engine.translate([DecodingInput((0,), [5], 9, allowed=np.array([EOS, 5, 6], dtype))], options)
        for dtype in (np.int32, np.int64)
    )
    assert narrow == wide


def test_a_list_has_the_candidates_of_its_tokens_and_the_prefix() -> None:
    candidates = np.full((10, 2), EOS, np.int32)
    candidates[4], candidates[5] = (40, 41), (40, 50)
    shortlist = Shortlist(candidates, np.array([60], np.int32), n_tgt=99)
    found = shortlist.tokens([4, 5, 5, 6], [70, 41])
    assert found is not None and found.dtype == np.int32
    assert found.tolist() == sorted({EOS, UNK, 40, 41, 50, 60, 70})
    assert Shortlist(candidates, np.array([60], np.int32), n_tgt=70).tokens([4], range(30, 65)) is None
    many = np.arange(4, 4 + MOST_TOKENS, dtype=np.int32)
    assert Shortlist(candidates, many, n_tgt=1 << 16).tokens([4]) is None


@pytest.fixture
def listed(make_run: Callable[..., Path]) -> Path:
    """A run with a shortlist: each token may become any of the ten before it."""
    path = make_run()
    folder = RunFolder.open(path)
    n = load_tokenizers(folder).n_tgt
    candidates = np.clip(np.arange(n)[:, None] - np.arange(10), EOS, n - 1).astype(np.int32)
    write(path, candidates, np.arange(20, 40, dtype=np.int32), folder.vocabularies_digest())
    return path


def write(path: Path, candidates: np.ndarray, frequent: np.ndarray, digest: str) -> None:
    tensors = {"candidates": torch.from_numpy(candidates), "frequent": torch.from_numpy(frequent)}
    save_tensors(path / FILE, tensors, {"vocabularies": digest})


def test_translations_use_the_shortlist_of_the_run(listed: Path, texts: list[str]) -> None:
    translator, options = Translator.load(listed, device="cpu"), DecodingOptions(shortlist=True, beam=2)
    tokenizer, found = translator.tokenizers, translator.translate([*texts[:30], ""], options)
    for text, one in zip(texts, found[:30], strict=False):
        allowed = translator.shortlist().tokens(tokenizer.src.encode(text))
        assert allowed is None or {*one.candidates[0].ids} <= {*allowed.tolist()}
    assert found != translator.translate([*texts[:30], ""], DecodingOptions(beam=2))
    (prefixed,) = translator.translate(texts[:1], options, prefixes=["zwei"])
    assert prefixed.text.startswith("zwei")


def test_shortlists_that_cannot_be_used_are_refused(run: Path, listed: Path, tmp_path: Path, texts: list[str]) -> None:
    options = DecodingOptions(shortlist=True)
    with pytest.raises(SettingsError, match="has no shortlist; make one with `transduce shortlist"):
        Translator.load(run, device="cpu").translate(texts[:1], options)
    with pytest.raises(SettingsError, match="sample"):
        DecodingOptions(shortlist=True, sample=True)
    folder = RunFolder.open(listed)
    tokenizers, digest = load_tokenizers(folder), folder.vocabularies_digest()
    good, frequent = load_shortlist(folder, tokenizers).candidates, np.array([5], np.int32)
    write(listed, good, frequent, "0" * 64)
    with pytest.raises(SettingsError, match="other vocabularies"):
        load_shortlist(folder, tokenizers)
    for bad in (good[1:], good.astype(np.int64), good + 1000, good - 9, np.full_like(good, PAD), good[:, 0]):
        write(listed, bad, frequent, digest)
        with pytest.raises(RunFolderError, match="damaged"):
            load_shortlist(folder, tokenizers)
    write(listed, good, frequent, digest)
    content = bytearray((listed / FILE).read_bytes())
    for at in range(0, len(content), max(1, len(content) // 60)):
        damaged = bytes(content[:at]) + bytes([content[at] ^ 0x55]) + bytes(content[at + 1 :])
        (listed / FILE).write_bytes(damaged)
        with pytest.raises((RunFolderError, SettingsError)):
            load_shortlist(folder, tokenizers)


def write_odd(path: Path, pick: random.Random, n: int, digest: str) -> None:
    """A shortlist of a plausible form with random ids, a few of them odd."""
    draw = np.random.default_rng(pick.randrange(1 << 30))
    rows = pick.choice([n] * 8 + [n - 1, n + 1, 0])
    candidates = draw.integers(EOS, n, (rows, pick.choice([0, 1, 7, 300])), dtype=np.int32)
    frequent = draw.integers(EOS, n, pick.choice([0, 1, 50, 3000]), dtype=np.int32)
    for ids in (candidates, frequent):
        if ids.size and pick.random() < 0.2:
            ids.flat[pick.randrange(ids.size)] = pick.choice([PAD, UNK, BOS, -1, n, 1 << 30, -(1 << 31)])
    write(path, candidates, frequent, digest)


@needs_library
def test_damaged_shortlists_are_refused_or_work(listed: Path, texts: list[str]) -> None:
    """From the file to the tokens of the native library; TRANSDUCE_NATIVE_FUZZ sets the number of files."""
    pick, n_refused, path = random.Random(8), 0, listed / FILE
    folder, translator, whole = RunFolder.open(listed), Translator.load(listed, device="cpu"), path.read_bytes()
    tokenizers, digest = translator.tokenizers, folder.vocabularies_digest()
    for number in range(N_FILES):
        if number % 3:
            damages = pick.choice([BYTES, TENSORS])
            path.write_bytes(damages[pick.choice(sorted(damages))](whole, pick))
            if pick.random() < 0.8:
                update_checksum(path)
        else:
            write_odd(listed, pick, tokenizers.n_tgt, digest)
        try:
            shortlist = load_shortlist(folder, tokenizers)
        except (RunFolderError, SettingsError):
            n_refused += 1
            continue
        some, beam = pick.sample(texts, 3), pick.choice([1, 1, 3])
        options = DecodingOptions(shortlist=True, beam=beam, max_length=9, scores=pick.random() < 0.5)
        loaded = Translator(translator.engine, tokenizers, shortlist=lambda found=shortlist: found)  # type: ignore[misc]
        for ids, one in zip(tokenizers.src.encode_batch(some), loaded.translate(some, options), strict=True):
            allowed = shortlist.tokens(ids)
            assert allowed is None or {*one.candidates[0].ids} <= {*allowed.tolist()}
    assert N_FILES / 3 < n_refused < 0.9 * N_FILES

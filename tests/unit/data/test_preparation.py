import json
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kills
from transduce.config.settings import Settings
from transduce.data.clean import CleanPairs, PairChunk, unpack_pairs
from transduce.data.leaks import comparable
from transduce.data.pairs import Pair
from transduce.data.preparation import PairTexts
from transduce.data.reading import Source, Sources, memory_source
from transduce.data.workers import Workplace
from transduce.errors import DataError, SettingsError
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.base import find_prepared
from transduce.tasks.resolve import learn_vocabulary
from transduce.tasks.translation import TranslationTask, _read_scored

QUIET = Log(quiet=True)
TASK = TranslationTask()


def read_texts(asked: Settings, sources: Sources[Pair] | None = None, *, place: Workplace | None = None) -> PairTexts:
    return TASK.form.read_texts(asked, QUIET, sources, workplace=place)


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def corpus(folder: Path, name: str, n: int, *, first: int = 0) -> dict[str, str]:
    numbers = range(first, first + n)
    src = write(folder / f"{name}.en", [f"the number {i} and {i * 7} again" for i in numbers])
    tgt = write(folder / f"{name}.de", [f"die Zahl {i} und {i * 7} nochmals" for i in numbers])
    return {"src": str(src), "tgt": str(tgt)}


def settings(**sections: Any) -> Settings:
    base = {"tokenizer": {"vocab_size": 60}, "model": {"d_model": 16, "n_heads": 2}, "training": {"batch_tokens": 100}}
    return Settings.from_mapping(
        {key: base.get(key, {}) | sections.get(key, {}) for key in base.keys() | sections.keys()}
    )


def test_a_chunk_whose_pairs_are_all_dropped_has_no_pairs() -> None:
    blank = [Pair("", "x", "file", 1), Pair("x", " ", "file", 2)]
    record = CleanPairs(Settings().data, seed=None)(PairChunk(0, blank))
    assert unpack_pairs(record) == []


def test_a_part_is_held_out_and_in_no_training_stream(tmp_path: Path) -> None:
    asked = settings(data={"train": [corpus(tmp_path, "a", 700), corpus(tmp_path, "b", 300, first=400)]})
    texts = read_texts(asked)
    held = {comparable(pair.src) for pair in texts.valid.read()}
    trained = [comparable(pair.src) for pair in texts.train.read()]
    assert len(held) == texts.valid.size == 66
    assert not held & set(trained)
    assert (
        texts.train.size
        == len(trained)
        == sum(1 for i in [*range(700), *range(400, 700)])
        - sum(1 + (400 <= int(source.split()[2]) < 700) for source in held)
    )
    again = read_texts(asked)
    assert list(again.valid.read()) == list(texts.valid.read())
    other = read_texts(asked.with_values("training", seed=2))
    assert {pair.src for pair in other.valid.read()} != {pair.src for pair in texts.valid.read()}


def test_nothing_is_held_out_if_validation_text_is_given(tmp_path: Path) -> None:
    asked = settings(data={"train": [corpus(tmp_path, "a", 50)], "valid": [corpus(tmp_path, "v", 5, first=90)]})
    texts = read_texts(asked)
    assert (texts.train.size, texts.valid.size, texts.tests) == (50, 5, ())


def test_test_sets_are_named_after_their_files_and_not_cleaned(tmp_path: Path) -> None:
    one, two = corpus(tmp_path, "newstest", 3), corpus(tmp_path, "flickr", 4)
    write(Path(one["tgt"]), ["", "b", "c"])
    asked = settings(data={"train": [corpus(tmp_path, "a", 50)], "test": [one, two, two]})
    tests = read_texts(asked).tests
    assert [(held.name, held.size) for held in tests] == [("newstest", 3), ("flickr", 4), ("flickr.3", 4)]
    write(Path(two["tgt"]), [])
    write(Path(two["src"]), [])
    with pytest.raises(DataError, match="flickr"):
        read_texts(asked)


def test_the_built_in_corpus_has_both_test_sets_and_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.demo.corpus.HELD_OUT", 30)
    texts = read_texts(settings(data={"demo": 300}))
    trained = {pair.src for pair in texts.train.read()}
    assert texts.train.size == 300
    assert [held.name for held in texts.tests] == ["test", "held_out_combinations"]
    for held in (texts.valid, *texts.tests):
        assert not trained & {pair.src for pair in held.read()}


def prepared_run(tmp_path: Path, asked: Settings, *, log: Log = QUIET) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", asked, "")
    texts = read_texts(asked)
    tokenizers = learn_vocabulary(texts.lines, asked, QUIET, may_grow=False)
    folder.write_settings(asked)
    TASK.prepare(folder, texts, tokenizers, log)
    return folder


def test_prepared_text_is_found_again_with_its_weights(tmp_path: Path) -> None:
    corpora = [corpus(tmp_path, "a", 60), corpus(tmp_path, "b", 40, first=100) | {"weight": 2.0}]
    asked = settings(data={"train": corpora, "valid": [corpus(tmp_path, "v", 5, first=900)]})
    with prepared_run(tmp_path, asked) as folder:
        found = find_prepared(TASK, folder, QUIET)
        assert found is not None and len(found.train) == 100 and len(found.valid) == 5
        weights = TASK.batches(found, asked, torch.device("cpu")).weights
        assert weights is not None and np.array_equal(weights, [1.0] * 60 + [2.0] * 40)
        (scored,) = _read_scored(found.tokens / "scored_pairs.json", 3)
        assert scored.pairs[0] == ("the number 900 and 6300 again", "die Zahl 900 und 6300 nochmals")
        assert len(scored.pairs) == 3
        src_ids, tgt_ids = found.train[0]
        assert found.tokenizers.src.decode(src_ids.tolist()) == "the number 0 and 0 again"
        assert found.tokenizers.tgt.decode(tgt_ids.tolist()) == "die Zahl 0 und 0 nochmals"
        data = json.loads((folder.path / "data.json").read_text())
        assert [described["pairs"] for described in data["sets"]] == [100, 5] and len(data["fingerprint"]) == 64


def test_an_interrupted_preparation_is_not_used(tmp_path: Path) -> None:
    asked = settings(data={"train": [corpus(tmp_path, "a", 60)]})
    with prepared_run(tmp_path, asked) as folder:
        (folder.path / "data.json").unlink()
        assert find_prepared(TASK, folder, QUIET) is None


def test_dropped_pairs_are_reported_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = corpus(tmp_path, "a", 60)
    with open(sides["src"], "a") as src, open(sides["tgt"], "a") as tgt:
        src.write("a lonely source\n")
        tgt.write("\n")
    asked = settings(data={"train": [sides], "valid": [corpus(tmp_path, "v", 5, first=90)]})
    with prepared_run(tmp_path, asked, log=Log()) as folder:
        lines = capsys.readouterr().err.splitlines()
        at = lines.index("cleaning: 61 pairs read, 60 kept")
        for part in ("dropped 1: empty", f"{sides['src']}:61", "'a lonely source' | ''"):
            assert part in lines[at + 1]
        assert f"{folder.path}/data.json" in lines[at + 2]


def test_tokens_are_estimated_from_the_first_pairs(tmp_path: Path) -> None:
    asked = settings(data={"train": [corpus(tmp_path, "a", 60)]})
    texts = read_texts(asked)
    tokenizers = learn_vocabulary(texts.lines, asked, QUIET, may_grow=False)
    pairs = [pair for pair in texts.train.read()]
    exact = sum(1 + max(len(tokenizers.src.encode(p.src)), len(tokenizers.tgt.encode(p.tgt))) for p in pairs)
    assert texts.count_tokens(tokenizers) == exact


def test_only_a_default_vocabulary_size_grows_with_the_characters(tmp_path: Path) -> None:
    signs = [chr(0x4E00 + i) * 2 for i in range(200)]
    sides = {
        "src": str(write(tmp_path / "a.zh", signs)),
        "tgt": str(write(tmp_path / "a.en", [f"sign {i}" for i in range(200)])),
    }
    asked = settings(data={"train": [sides], "valid": [sides]}, tokenizer={"vocab_size": 50})
    texts = read_texts(asked)
    with pytest.raises(SettingsError, match=r"tokenizer\.vocab_size = 50"):
        learn_vocabulary(texts.lines, asked, QUIET, may_grow=False)
    assert learn_vocabulary(texts.lines, asked, QUIET, may_grow=True).n_src > 200


class Counted(Source[Pair]):
    """A source that counts how often it is read."""

    def __init__(self, name: str, n: int, *, first: int = 0) -> None:
        pairs = [Pair(f"the number {i}", f"die Zahl {i}", name, i) for i in range(first, first + n)]
        reads: list[int] = []

        def read() -> Iterator[Pair]:
            reads.append(1)
            return iter(pairs)

        super().__init__(name, read, (name,))
        object.__setattr__(self, "reads", reads)


@pytest.mark.parametrize("validation", [False, True])
def test_each_source_is_read_once(tmp_path: Path, validation: bool) -> None:
    train, test = (Counted("a", 300), Counted("b", 200, first=300)), Counted("t", 9, first=900)
    valid = (Counted("v", 9, first=950),) if validation else ()
    asked = settings(data={"deduplicate": True})
    with RunFolder.create(tmp_path / "run", asked, "") as folder:
        texts = read_texts(asked, Sources(train, valid, (test,)), place=Workplace(tmp_path))
        tokenizers = learn_vocabulary(texts.lines, asked, QUIET, may_grow=False)
        texts.count_tokens(tokenizers)
        folder.write_settings(asked)
        prepared = TASK.prepare(folder, texts, tokenizers, QUIET)
    assert [len(source.reads) for source in (*train, *valid, test)] == [1] * (3 + validation)
    assert len(prepared.train) == sum(prepared.train.facts["sizes"]) == 500 - 33 * (not validation)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_held_out_pairs_are_counted_in_the_report_of_the_cleaning() -> None:
    texts = read_texts(settings(), Sources((Counted("a", 400),)))
    report = texts.report.to_json()
    assert (report["read"], report["kept"], report["held_out"]) == (400, 374, 26) and texts.train.size == 374
    assert len(texts.sample) == 374


@pytest.mark.parametrize(("n", "held_out"), [(2, 1), (150, 10), (3000, 200), (30_000, 300), (200_000, 1000)])
def test_at_least_200_of_3000_pairs_are_held_out(n: int, held_out: int) -> None:
    assert read_texts(settings(), Sources((Counted("a", n),))).valid.size == held_out


def test_frequent_sources_are_not_held_out_together() -> None:
    pairs = [Pair(f"the number {i % 3}", f"die Zahl {i % 3}", "a", i) for i in range(60)]
    texts = read_texts(settings(), Sources((memory_source("a", pairs),)))
    assert (texts.train.size, texts.valid.size) == (40, 1)


def test_a_sample_in_memory_is_reported_under_its_own_places(tmp_path: Path) -> None:
    pairs = [Pair(f"the number {i}", f"die Zahl {i}" if i else "", "big.en", 1000 + i) for i in range(50)]
    asked = settings()
    texts = read_texts(asked, Sources((memory_source("big.en", pairs),), (memory_source("v", pairs[1:3]),)))
    assert texts.report.dropped["empty"].samples[0]["place"] == "big.en:1000"
    assert next(texts.train.read()).where == "big.en:1001"


def prepared_files(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_preparation_resumes_and_leaves_no_temporary_file_behind(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    corpus(tmp_path, "a", 3000)  # 8 chunks

    def start(run: str, when: str, number: int) -> tuple[int, int, int]:
        process = processes.Process(target=kills.preparing_child, args=(tmp_path, tmp_path / run, when, number))
        process.start()
        process.join()
        calls = (tmp_path / run).with_suffix(".calls").read_text().split()
        return process.exitcode, calls.count("clean"), calls.count("encode")

    killed = -signal.SIGKILL
    assert start("whole", "", 0) == (0, 8, 9)  # the validation set is a chunk
    assert start("run", "clean", 3) == (killed, 3, 0)
    (cleaned,) = (tmp_path / "run" / "preparation").glob("cleaned-*")
    with cleaned.open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)  # the third is damaged
    assert start("run", "encode", 5) == (killed, 6, 5)
    assert start("run", "close", 0) == (killed, 0, 3)
    assert start("run", "", 0) == (0, 0, 1)
    assert prepared_files(tmp_path / "run") == prepared_files(tmp_path / "whole")


def test_pairs_with_one_source_cannot_be_split() -> None:
    pairs = [Pair("always the same", f"Nummer {i}", "a", i) for i in range(5)]
    with pytest.raises(DataError, match="5 sentence pairs have the same source"):
        read_texts(settings(), Sources((memory_source("a", pairs),)))

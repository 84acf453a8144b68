"""Bulk translation: the output of a file, its journal, and what is refused. Kills of real processes: tests/system."""

import gzip
import json
import lzma
import os
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import transduce
from native_engines import instruction_sets
from transduce.bulk import translate as bulk
from transduce.bulk.translate import Chunk, ChunkTranslator, OutputFile, Translated, translate_to_folder
from transduce.config.decoding import DecodingOptions
from transduce.data.lines import zstd
from transduce.decoding.results import format_rows
from transduce.decoding.translator import Translator
from transduce.errors import DataError, Interrupted, RunFolderError, SettingsError
from transduce.runs.lock import locked_folder

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".xz": lzma.compress,
    ".zst": zstd.compress,
}  # fmt: skip
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress,
    ".zst": zstd.decompress,
}  # fmt: skip


class Crash(BaseException):
    """The process was killed, or the machine lost power."""


class Numbering(ChunkTranslator):
    """Writes the number of every line before it, so that a lost or doubled line shows."""

    def __init__(self, **how: Any) -> None:
        self.how, self.notes, self.n_translated = {"run": "a", "beam": 1, **how}, [], 0

    def __call__(self, chunk: Chunk) -> Translated:
        self.n_translated += len(chunk.lines)
        return [f"{chunk.first + i}:{line}" for i, line in enumerate(chunk.lines)], []


def translate_shard(translator: ChunkTranslator, source: Path, output_dir: Path) -> Path:
    """Translate one file in this process."""
    file = OutputFile(source, output_dir, translator.how)
    bulk._translate([file], translator, bulk.Log(quiet=True), lambda: None)
    return file.output


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_LINES", 4)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out" / ".transduce").mkdir(parents=True)
    return tmp_path / "out"


def write_source(folder: Path, n: int, suffix: str = "") -> Path:
    path = folder / f"a.en{suffix}"
    path.write_bytes(COMPRESS[suffix]("".join(f"line {i}\n" for i in range(n)).encode()))
    return path


def numbered(n: int) -> str:
    return "".join(f"{i}:line {i}\n" for i in range(n))


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Crash before the `step`-th of the calls that write to the disk or rename."""
    left = step

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return function(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(os, "replace", counted(os.replace))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_crash_at_any_step_changes_nothing(
    suffix: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path, 18, suffix)
    (tmp_path / "whole" / ".transduce").mkdir(parents=True)
    whole = translate_shard(Numbering(), source, tmp_path / "whole").read_bytes()
    assert DECOMPRESS[suffix](whole).decode() == numbered(18)
    for step in range(100):
        with monkeypatch.context() as patch:
            crash_at(patch, step)
            try:
                translate_shard(Numbering(), source, out)
            except Crash:
                # what is not synced may be lost or torn
                assert not (out / source.name).exists() or (out / source.name).read_bytes() == whole
            else:
                break
        resumed = Numbering()
        assert translate_shard(resumed, source, out).read_bytes() == whole, f"a crash at step {step}"
        assert resumed.n_translated <= 18
        (out / source.name).unlink()
    assert 10 < step < 100, "no crash happened"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_many_crashes_of_one_file_change_nothing(
    suffix: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt gets a little further than a chunk before it crashes, and no chunk is translated in vain."""
    source, n_crashes, translated = write_source(tmp_path, 43, suffix), 0, 0
    while not (out / source.name).exists():
        translator = Numbering()
        with monkeypatch.context() as patch:
            crash_at(patch, 5 if n_crashes else 9)  # the first attempt also writes the header
            try:
                translate_shard(translator, source, out)
            except Crash:
                n_crashes += 1
        translated += translator.n_translated
        assert n_crashes < 30
    assert n_crashes > 3 and translated <= 43 + 4 * n_crashes
    assert DECOMPRESS[suffix]((out / source.name).read_bytes()).decode() == numbered(43)


@pytest.fixture
def interrupted(tmp_path: Path, out: Path) -> Path:
    """A file of 18 lines of which 12 are translated; returns its journal."""

    class Crashing(Numbering):
        def __call__(self, chunk: Chunk) -> Translated:
            if chunk.first == 12:
                raise Crash
            return super().__call__(chunk)

    with pytest.raises(Crash):
        translate_shard(Crashing(), write_source(tmp_path, 18), out)
    return out / ".transduce" / "a.en.journal"


def test_a_journal_cut_off_anywhere_resumes(interrupted: Path, tmp_path: Path, out: Path) -> None:
    journal, partial = interrupted.read_bytes(), (out / ".transduce" / "a.en.partial").read_bytes()
    left = []
    ends = [i for i, byte in enumerate(journal) if byte == ord("\n")]
    for n in sorted({*range(0, len(journal), 25), *(end + i for end in ends for i in (0, 1, 2)), len(journal)}):
        interrupted.write_bytes(journal[:n])
        (out / ".transduce" / "a.en.partial").write_bytes(partial + b"torn")
        translator = Numbering()
        done = translate_shard(translator, tmp_path / "a.en", out)
        assert done.read_text() == numbered(18), n
        left.append(translator.n_translated)
        done.unlink()
    assert left == sorted(left, reverse=True) and set(left) == {18, 14, 10, 6}


@pytest.mark.parametrize("junk", [b"\0" * 100, b"[1]\n", b'{"lines": 1}\n', b"[" * 100_000 + b"\n", b"\xff\xfe\n"])
def test_junk_after_the_journal_is_dropped(junk: bytes, interrupted: Path, tmp_path: Path, out: Path) -> None:
    interrupted.write_bytes(interrupted.read_bytes() + junk)
    translator = Numbering()
    assert translate_shard(translator, tmp_path / "a.en", out).read_text() == numbered(18)
    assert translator.n_translated == 6


def test_what_follows_the_last_chunk_is_not_in_the_output(tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path, 4)
    file = OutputFile(source, out, Numbering().how)
    file.append(numbered(4).splitlines(), n_lines=4, read=file.size)
    partial = out / ".transduce" / "a.en.partial"
    partial.write_bytes(partial.read_bytes() + b"torn")
    translator = Numbering()
    assert translate_shard(translator, source, out).read_text() == numbered(4)
    assert translator.n_translated == 0


def test_a_partial_output_shorter_than_its_journal_says_loses_chunks_only(
    interrupted: Path, tmp_path: Path, out: Path
) -> None:
    os.truncate(out / ".transduce" / "a.en.partial", 50)
    translator = Numbering()
    assert translate_shard(translator, tmp_path / "a.en", out).read_text() == numbered(18)
    assert translator.n_translated == 14


def test_a_finished_file_is_not_translated_again(tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path, 9)
    done = translate_shard(Numbering(), source, out)
    stat, again = done.stat(), Numbering()
    translate_shard(again, source, out)
    assert again.n_translated == 0 and (done.stat().st_mtime_ns, done.stat().st_ino) == (stat.st_mtime_ns, stat.st_ino)
    assert sorted(p.name for p in (out / ".transduce").iterdir()) == ["a.en.journal"]


def test_a_changed_input_is_refused_until_its_journal_is_removed(interrupted: Path, tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path, 19)
    with pytest.raises(DataError, match=rf"a\.en was begun with another version of {source}.* remove {interrupted}"):
        translate_shard(Numbering(), source, out)
    interrupted.unlink()
    assert translate_shard(Numbering(), source, out).read_text() == numbered(19)


def test_a_changed_time_of_the_input_is_refused_too(interrupted: Path, tmp_path: Path, out: Path) -> None:
    os.utime(tmp_path / "a.en", ns=(1, 1))
    with pytest.raises(DataError, match="another version of"):
        translate_shard(Numbering(), tmp_path / "a.en", out)


def test_an_input_that_changes_while_it_is_translated_is_refused(tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path, 9)

    class Touching(Numbering):
        def __call__(self, chunk: Chunk) -> Translated:
            os.utime(source, ns=(chunk.first, chunk.first))
            return super().__call__(chunk)

    with pytest.raises(DataError, match=f"{source} was changed"):
        translate_shard(Touching(), source, out)
    assert not (out / "a.en").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [({"run": "b"}, "another model"), ({"beam": 5}, "beam = 1 and not 5"), ({"new": 2}, "new = None and not 2")],
)
def test_another_model_or_option_is_refused_for_partial_and_finished_files(
    how: dict[str, Any], message: str, interrupted: Path, tmp_path: Path, out: Path
) -> None:
    with pytest.raises(DataError, match=rf"begun with {message}.*output_dir.*remove {interrupted}"):
        translate_shard(Numbering(**how), tmp_path / "a.en", out)
    done = translate_shard(Numbering(), tmp_path / "a.en", out)
    with pytest.raises(DataError, match=rf"made with {message}.*output_dir.*remove {done}"):
        translate_shard(Numbering(**how), tmp_path / "a.en", out)
    done.unlink()
    translator = Numbering(**how)
    assert translate_shard(translator, tmp_path / "a.en", out).read_text() == numbered(18)
    assert translator.n_translated == 18


def test_int8_on_another_instruction_set_is_refused(
    run: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of int8 differ between instruction sets in some sentences; those of float32 do not."""
    hows = []
    for isa in instruction_sets()[-2:]:
        monkeypatch.setattr(bulk, "instruction_set", lambda isa=isa: isa)
        hows.append(
            [ChunkTranslator(run, DecodingOptions(), device="cpu", precision=p).how for p in ("float32", "int8")]
        )
    (float32, int8), (float32_there, int8_there) = hows
    assert float32 == float32_there
    if int8["precision"] == "int8":
        source = tmp_path / "in"
        source.write_text("A dog.\n", encoding="utf-8")
        translate_shard(Numbering(**int8), source, out)
        with pytest.raises(DataError, match="instruction set"):
            translate_shard(Numbering(**int8_there), source, out)


def test_a_file_that_is_not_ours_is_never_replaced(tmp_path: Path, out: Path) -> None:
    (out / "a.en").write_text("precious")
    with pytest.raises(DataError, match=f"{out / 'a.en'} exists.*remove it"):
        translate_shard(Numbering(), write_source(tmp_path, 3), out)
    assert (out / "a.en").read_text() == "precious"


@pytest.mark.parametrize("content", ["precious", numbered(9) + "more\n"])
def test_a_file_that_replaced_a_finished_one_is_not_ours(content: str, tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path, 9)
    translate_shard(Numbering(), source, out).write_text(content)
    with pytest.raises(DataError, match=f"{out / 'a.en'} exists.*remove it"):
        translate_shard(Numbering(), source, out)
    assert (out / "a.en").read_text() == content


def test_a_file_that_appears_while_its_input_is_translated_is_reported(tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path, 9)

    class Interfering(Numbering):
        def __call__(self, chunk: Chunk) -> Translated:
            (out / "a.en").write_text("precious")
            return super().__call__(chunk)

    for translator in (Interfering(), Numbering()):
        with pytest.raises(DataError, match=f"{out / 'a.en'} exists.*remove it"):
            translate_shard(translator, source, out)
    assert (out / "a.en").read_text() == "precious"
    (out / "a.en").unlink()
    assert translate_shard(Numbering(), source, out).read_text() == numbered(9)


def test_memory_is_bounded_by_a_chunk(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_LINES", 500)
    source, peaks = tmp_path / "a.en", []
    translate_shard(Numbering(), write_source(tmp_path, 10), out).unlink()  # imports
    for n in (5_000, 50_000):
        source.write_text("a line of some length\n" * n)
        tracemalloc.start()
        translate_shard(Numbering(), source, out).unlink()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 2 << 20, peaks


# -- with a model

TEXT = "\ufeffA dog runs.\r\n\n \nThe old man sleeps.\u2028He does.\n\n\nA woman reads a book.\nA dog runs."


@pytest.fixture
def sources(tmp_path: Path, texts: list[str]) -> list[Path]:
    """Line ends of Windows, blank lines, no line end at the end; nothing; every compression."""
    found = [(f"hard.en{suffix}", TEXT) for suffix in COMPRESS] + [(f"empty{suffix}", "") for suffix in COMPRESS]
    found.append(("many.en", "".join(f"{text}\n" for text in texts[:30])))
    for name, text in found:
        (tmp_path / name).write_bytes(COMPRESS[Path(name).suffix.replace(".en", "")](text.encode()))
    return [tmp_path / name for name, _ in found]


def test_the_output_is_that_of_the_translator(
    sources: list[Path], run: Path, translator: Translator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = translate_to_folder(run, sources, tmp_path / "new" / "out", device="cpu")
    assert found == [tmp_path / "new" / "out" / source.name for source in sources]
    for source, done in zip(sources, found, strict=True):
        suffix = source.suffix.replace(".en", "")
        text = DECOMPRESS[suffix](source.read_bytes()).decode("utf-8-sig").replace("\r\n", "\n")
        lines = text.removesuffix("\n").split("\n") if text else []
        expected = "".join(f"{one.text}\n" for one in translator.translate(lines))
        assert DECOMPRESS[suffix](done.read_bytes()).decode() == expected, source
    assert "62 lines translated in 9 files" in capsys.readouterr().err
    assert transduce.translate_to_folder is translate_to_folder
    before = {path: path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()}
    translate_to_folder(run, sources, tmp_path / "new" / "out", device="cpu")
    assert {path: path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()} == before
    assert "9 of 9 files are finished" in capsys.readouterr().err


@pytest.mark.parametrize("style", ["nbest", "scores", "json"])
def test_styles_and_samples_are_those_of_one_call(
    style: Any, sources: list[Path], run: Path, translator: Translator, tmp_path: Path, texts: list[str]
) -> None:
    n_best = 3 if style == "nbest" else 1
    options = DecodingOptions(n_best=n_best)
    if style == "json":
        options = DecodingOptions(sample=True, temperature=0.9, top_k=20, seed=5)
    (done,) = translate_to_folder(run, sources[-1:], tmp_path / "out", options, style=style, device="cpu")
    rows = [
        row
        for number, (src, one) in enumerate(zip(texts[:30], translator.translate(texts[:30], options), strict=True), 1)
        for row in format_rows(style, number, src, one, n_best=n_best)
    ]
    assert len(rows) == 30 * n_best
    if style == "json":
        found = [json.loads(row) for row in done.read_text(encoding="utf-8").splitlines()]
        assert [one["text"] for one in found] == [json.loads(row)["text"] for row in rows]
        assert [one["line"] for one in found] == [*range(1, 31)]
    else:
        assert done.read_text(encoding="utf-8").splitlines() == rows


def test_a_signal_stops_at_once_and_the_same_call_resumes(
    sources: list[Path], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate, calls = ChunkTranslator.__call__, 0

    def signalled(self: ChunkTranslator, chunk: Chunk) -> Translated:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return translate(self, chunk)

    whole = translate_to_folder(run, sources[-1:], tmp_path / "whole", device="cpu")[0].read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(ChunkTranslator, "__call__", signalled)
        with pytest.raises(Interrupted, match="SIGTERM; the same command resumes") as caught:
            translate_to_folder(run, sources[-1:], tmp_path / "out", device="cpu")
    assert caught.value.exit_code == 143 and calls == 4
    partial = tmp_path / "out" / ".transduce" / "many.en.partial"
    assert partial.read_bytes() and whole.startswith(partial.read_bytes())
    assert not (partial.parent / ".lock").exists()
    assert translate_to_folder(run, sources[-1:], tmp_path / "out", device="cpu")[0].read_bytes() == whole


def test_damaged_text_names_the_line_and_keeps_finished_files(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A dog.\n")
    (tmp_path / "b").write_bytes(b"A dog.\n" * 5 + b"\xff\n")
    with pytest.raises(DataError, match=rf"{tmp_path / 'b'}, line 6: not valid UTF-8"):
        translate_to_folder(run, [tmp_path / "a", tmp_path / "b"], tmp_path / "out", device="cpu")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_file()] == ["a"]


def test_many_notes_become_a_few_and_a_count(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("A dog runs in the park.\n" * 12)
    translate_to_folder(run, [tmp_path / "a"], tmp_path / "out", DecodingOptions(max_length=1), device="cpu")
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(err) == 6 and f"{tmp_path / 'a'}, line 5: output cut off" in err[4] and "12 of 12 lines" in err[5]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Path]:
    for name in ("a.en", "sub/a.en", "out/b.en"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("A dog.\n")
    yield tmp_path
    assert not (tmp_path / "out" / ".transduce").exists(), "something was written"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.en", "sub/a.en"], r"sub/a\.en have the same name"),
        (["a.en", "a.en"], "the same name"),
        (["a.en", "out/b.en"], r"out/b\.en is inside output_dir"),
        (["sub"], "is a folder"),
        (["none.en"], r"there is no file .*none\.en"),
        ([], "needs the names of files"),
    ],
)
def test_files_that_cannot_be_translated_are_refused_before_anything_is_written(
    names: list[str], message: str, places: Path
) -> None:
    with pytest.raises((DataError, SettingsError), match=message):
        translate_to_folder(places / "no-run", [places / name for name in names], places / "out")


def test_standard_input_is_refused(places: Path) -> None:
    with pytest.raises(SettingsError, match="standard input"):
        translate_to_folder(places / "no-run", ["-"], places / "out")


def test_a_folder_is_used_by_one_process_at_a_time(run: Path, tmp_path: Path, out: Path) -> None:
    other = locked_folder(out / bulk.FOLDER, use="translating into it")
    with other, pytest.raises(RunFolderError, match=r"is translating into it.*another folder"):
        translate_to_folder(run, [write_source(tmp_path, 3)], out, device="cpu")


def test_a_folder_that_cannot_be_made_is_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=f"cannot write {tmp_path / 'file'}"):
        translate_to_folder(run, [write_source(tmp_path, 3)], tmp_path / "file", device="cpu")


def test_the_identity_of_a_model_moves_with_its_folder(
    run: Path, tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    options = DecodingOptions(beam=2, batch_tokens=100)
    how, copied = (ChunkTranslator(path, options, device="cpu").how for path in (run, tmp_path / "copy"))
    assert how == copied and how["beam"] == 2 and "batch_tokens" not in how
    other = ChunkTranslator(make_run(d_ff=56), options, device="cpu")
    assert other.how["run"] != how["run"]

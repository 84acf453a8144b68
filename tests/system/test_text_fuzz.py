"""Random text in training, translation, scoring and evaluation: as many lines out as in, or a one-line error.

`TRANSDUCE_FUZZ=20 pytest tests/system/test_text_fuzz.py` tries twenty times as many texts, and a million lines.
"""

# ruff: noqa: E501  (long tables of strange values)
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import marians
from system.commands import assert_refused, small, succeed, transduce

MORE = int(os.environ.get("TRANSDUCE_FUZZ", "1"))
SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r\u001f\u180e\u200b\u2060"
STRANGE = (
    "", " ", "\t", "\u00a0", "\u3000", "\x00", "a\x00b", "\ufeff", "\ufeffa", "a\ufeff", *SEPARATORS, f"a{SEPARATORS}b", "a\rb", "a\r",
    "\u05e9\u05dc\u05d5\u05dd", "\u202eevil\u202c", "e\u0301\u0301\u0301", "\u0301", "👩‍👩‍👧‍👦", "🏴\U000e0067\U000e007f", "\U0010ffff", "\ufffe", "ﷺ" * 20,
    "▁", "▁a", "<unk>", "<s>", "</s>", "<pad>", "<0x0A>", ">>deu<<", ">>", "<mask>", "a\tb", "\\n", "%s", "{}", "null", "-1", "--help", "ß" * 300,
)  # fmt: skip
CHARACTERS = st.characters(blacklist_categories=("Cs",), blacklist_characters="\n")  # all characters of UTF-8
LINE = st.one_of(st.sampled_from(STRANGE), st.text(CHARACTERS, max_size=30), st.sampled_from(marians.LINES))
LINES = st.lists(LINE, max_size=12)
QUICKLY = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=MORE == 1)


def examples(n: int) -> settings:
    return settings(QUICKLY, max_examples=n * MORE)


def content_of(lines: list[str], *, crlf: bool = False, last: bool = True) -> bytes:
    end = "\r\n" if crlf else "\n"
    text = end.join(lines) + (end if last and lines else "")
    return text.encode("utf-8")


def n_lines(content: bytes) -> int:
    """The count of `wc -l`, plus one for a last line without a line end."""
    return content.count(b"\n") + (bool(content) and not content.endswith(b"\n"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator with random weights."""
    return marians.make_run(tmp_path_factory.mktemp("fuzz") / "run")


@examples(8)
@given(lines=LINES, crlf=st.booleans(), last=st.booleans())
@example(lines=list(STRANGE), crlf=False, last=True)
@example(lines=["a", "", "", "b"], crlf=True, last=False)
def test_as_many_lines_out_as_in(
    run: Path, tmp_path_factory: pytest.TempPathFactory, lines: list[str], crlf: bool, last: bool
) -> None:
    folder = tmp_path_factory.mktemp("text")
    content = content_of(lines, crlf=crlf, last=last)
    n = n_lines(content)
    (folder / "in").write_bytes(content)
    short = [folder / "in", "--max-length", "4"]
    done = transduce("translate", run, *short, "--beam", "2")
    assert done.code == 0 and done.out.count("\n") == n, done
    as_json = transduce("translate", run, *short, "--beam", "1", "--json")
    objects = [json.loads(line) for line in as_json.out.split("\n")[:-1]]
    assert [one["line"] for one in objects] == list(range(1, n + 1))
    best = transduce("translate", run, *short, "--nbest", "2").out.split("\n")[:-1]
    assert [line.split("\t")[0] for line in best] == [str(i) for i in range(1, n + 1) for _ in range(2)]
    (folder / "out").write_text(done.out, encoding="utf-8", newline="\n")
    scored = transduce("score", run, "--src", folder / "in", "--tgt", folder / "out")
    judged = transduce(
        "evaluate", run, "--src", folder / "in", "--ref", folder / "out", "--hyp", folder / "out", "--json"
    )
    if not n:
        assert_refused(scored)
        assert_refused(judged)
        return
    assert scored.code == 0 and scored.out.count("\n") == n, scored
    assert judged.code == 0 and json.loads(judged.out), judged


def test_standard_input_and_output_keep_lines_too(run: Path, tmp_path: Path) -> None:
    content = content_of(list(STRANGE))
    done = transduce("translate", run, "--beam", "1", "--max-length", "3", stdin=content.decode())
    assert done.out.count("\n") == len(STRANGE)
    (tmp_path / "in").write_bytes(content)
    to_file = transduce("translate", run, tmp_path / "in", "-o", tmp_path / "out", "--beam", "1", "--max-length", "3")
    assert to_file.code == 0 and (tmp_path / "out").read_bytes().decode("utf-8") == done.out


@pytest.mark.parametrize(
    ("command", "bad"),
    [
        *(("translate", bad) for bad in (b"\xed\xa0\x80", b"\xff", b"\xc3")),
        *(("score", b"\xf4\x90\x80\x80"), ("evaluate", b"\xc0\x80"), ("train", b"a\xed\xbf\xbfb")),
    ],
)
def test_invalid_utf8_is_refused_with_file_and_line(run: Path, tmp_path: Path, command: str, bad: bytes) -> None:
    good, broken = tmp_path / "good", tmp_path / "broken"
    good.write_bytes(b"a\n" * 9)
    broken.write_bytes(b"a\n" * 6 + bad + b"\n" + b"a\n" * 2)
    arguments = {
        "translate": [run, broken],
        "score": [run, "--src", good, "--tgt", broken],
        "evaluate": [run, "--src", broken, "--ref", good],
        "train": ["--src", good, "--tgt", broken, "--run", tmp_path / "run"],
    }[command]
    done = transduce(command, *arguments)
    assert_refused(done)
    assert f"{broken}, line 7: not valid UTF-8" in done.err and not (tmp_path / "run").exists()


@examples(2)
@given(src=st.lists(LINE, min_size=0, max_size=12), shift=st.integers(0, 5), kind=st.sampled_from(["unigram", "bpe", "char"]),
       normalization=st.sampled_from(["nmt_nfkc", "identity"]))  # fmt: skip
@example(src=list(STRANGE), shift=1, kind="unigram", normalization="identity")
@example(src=["\u2028", "a\u2028b"] * 6, shift=0, kind="char", normalization="identity")
@example(src=[""] * 9, shift=0, kind="char", normalization="nmt_nfkc")
def test_training_on_any_text_works_or_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, src: list[str], shift: int, kind: str, normalization: str
) -> None:
    folder = tmp_path_factory.mktemp("train")
    (folder / "a").write_bytes(content_of(src))
    (folder / "b").write_bytes(content_of(src[shift:] + src[:shift]))
    sets = small("tokenizer.vocab_size=120", f"tokenizer.kind={kind}", f"tokenizer.normalization={normalization}",
                 "training.max_updates=1", "model.d_model=8", "model.d_ff=8")  # fmt: skip
    done = transduce("train", "--src", folder / "a", "--tgt", folder / "b", "--run", folder / "run", "--quiet", *sets)
    if done.code != 0:
        assert_refused(done)
        assert not (folder / "run").exists()
        return
    found = transduce("translate", folder / "run", folder / "a", "--beam", "2", "--max-length", "6")
    assert found.code == 0 and found.out.count("\n") == len(src), found


def test_a_line_of_a_megabyte_does_not_shift_the_other_lines(run: Path, tmp_path: Path) -> None:
    lines = [
        "a man reads books .",
        "x" * (1 << 20),
        "a man reads books .",
        "ein Hund " * (1 << 17),
        "a man reads books .",
    ]
    (tmp_path / "in").write_bytes(content_of(lines))
    done = transduce("translate", run, tmp_path / "in", "--no-split", "--beam", "1", "--max-length", "5")
    found = done.out.split("\n")
    assert done.code == 0 and len(found) == 6 and found[0] == found[2] == found[4] and found[3] == ""
    assert "line 4: not translated" in done.err
    scored = transduce("score", run, "--src", tmp_path / "in", "--tgt", tmp_path / "in")
    assert_refused(scored)
    assert "line 4" in scored.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [10_000, pytest.param(1_000_000, marks=pytest.mark.skipif(MORE == 1, reason="only with TRANSDUCE_FUZZ"))]
)
def test_thousands_of_identical_lines(run: Path, tmp_path: Path, n: int) -> None:
    (tmp_path / "in").write_bytes(b"a man reads books .\n" * n)
    out = succeed("translate", run, tmp_path / "in", "--beam", "1", "--max-length", "3").out
    assert out.count("\n") == n and len(set(out.splitlines())) == 1
    sets = small("tokenizer.vocab_size=120", "training.max_updates=1", "model.d_model=8")
    sides = ["--src", tmp_path / "in", "--tgt", tmp_path / "in", "--run", tmp_path / "run"]
    few = tmp_path / "few"
    few.write_bytes(b"a man reads books .\n" * 2_000)  # each occurs in the training text n times
    trained = transduce("train", *sides, "--valid-src", few, "--valid-tgt", few, *sets)
    assert trained.code in (0, 2) and "Traceback" not in trained.err, trained.err


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "fuzz.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("n", "seed"), [(60, 2), pytest.param(90, 1, marks=pytest.mark.slow)])
def test_damaged_files_are_loaded_or_refused_in_one_line(run: Path, n: int, seed: int) -> None:
    done = fuzz("--quick", "--count", n, "--seed", seed, "--limit", 600, "--folder", run.parent)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{n} cases" in done.stdout and "bad: 0" in done.stdout
    total = next(line for line in done.stdout.splitlines() if line.startswith("| all |"))
    loaded, refused = (int(number) for number in total.split("|")[2:4])
    assert refused > n / 3 and loaded > n / 15  # some mutations are harmless

"""The commands in README.md work: they run in order, at small sizes, on the built-in corpus, in this process."""

from __future__ import annotations

import contextlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from system.commands import SMALL, succeed, write_corpus
from transduce.config.settings import Settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FEW = "--set training.max_updates=3 " + " ".join(f"--set {value}" for value in SMALL if value.startswith("model."))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def at_small_size(command: str) -> str:
    """Return the command with a shorter training and a vocabulary that fits the small text."""
    if not command.startswith(("transduce train", "transduce doctor")) or "--dry-run" in command:
        return command
    command = re.sub(r" --set (training\.max_minutes|model\.preset)=\S+", "", command)
    few = FEW.replace("--set model.n_encoder_layers=1", "") if "--text" in command else FEW  # decoder-only
    return command if "recipe.toml" in command else f"{command} {few}"


def run_line(line: str) -> None:
    """Run a command, perhaps with the output of `echo` as its input or with its output in a file."""
    words, text = shlex.split(line, comments=True), ""
    if words[0] == "echo":
        assert words[2] == "|", line
        text, words = f"{words[1]}\n", words[3:]
    out = None
    if ">" in words:
        words, (out,) = words[: words.index(">")], words[words.index(">") + 1 :]
    assert words[0] == "transduce", line
    done = succeed(*words[1:], stdin=text)
    if out is not None:
        Path(out).write_text(done.out, encoding="utf-8")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    write_corpus(folder, "train", 200)
    write_corpus(folder, "valid", 10, split="valid")
    write_corpus(folder, "test", 10, split="test")
    (folder / "book.txt").write_bytes((folder / "train.en").read_bytes())
    (folder / "other.txt").write_bytes((folder / "test.en").read_bytes())
    with contextlib.chdir(folder):
        for line in "".join(blocks("bash")).splitlines():
            run_line(at_small_size(line))
    return folder


def test_the_commands_run(workshop: Path) -> None:
    for run in ("mine", "small", "tested", "again"):
        assert (workshop / "runs" / run / "model.safetensors").exists()
    assert not (workshop / "runs" / "planned").exists()
    assert (workshop / "test.out").read_text(encoding="utf-8").count("\n") == 10
    assert (workshop / "test.nbest.jsonl").read_text(encoding="utf-8").count("\n") == 10
    assert (workshop / "test.scores").read_text().count("\n") == 10
    assert (workshop / "dog.html").exists()


def test_the_python_runs(workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(workshop)
    for block in blocks("py"):
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") == 3


def test_the_recipe_is_valid() -> None:
    for block in blocks("toml"):
        settings = Settings.from_mapping(tomllib.loads(block))
        assert settings.data.train and settings.data.test


def test_make_targets_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

"""A positional scheme of a researcher's own file trains, translates and moves with its run, with --allow-code only."""

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import toys
from system.commands import small, write_corpus

CODE = '''
from pathlib import Path

import torch

from transduce.nn.positions import POSITIONS, Positions


class Backward(Positions):
    """A bias that grows with the distance."""

    def score_bias(self, queries, keys):
        distance = (queries[:, None] - keys[None, :]).abs().to(torch.float32)
        return (-0.5 * distance).expand(self.n_heads, -1, -1)


POSITIONS["backward"] = Backward
Path("RAN").touch()
'''
RECIPE = """
extensions = ["my.py"]
[data]
train = [{ src = "train.en", tgt = "train.de" }]
[model]
positions = "backward"
"""


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def transduce(tmp_path: Path, processes: ForkServerContext) -> Run:
    """Run a command in a process of its own, which loads the extension; return its exit code and its stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        errors = tmp_path / "errors"
        process = processes.Process(target=toys.command, args=([*map(str, arguments)], errors, {}))
        process.start()
        process.join(120)
        return process.exitcode, errors.read_text()

    return run


def test_an_extension_runs_with_allow_code_only(tmp_path: Path, transduce: Run) -> None:
    src, tgt = write_corpus(tmp_path, "train", 60)
    ran, run, moved = tmp_path / "ran", tmp_path / "run", tmp_path / "moved"
    code = CODE.replace("RAN", str(ran))
    (tmp_path / "my.py").write_text(code, encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    training = ["train", tmp_path / "recipe.toml", "--run", run, *small()]
    status, error = transduce(*training)
    assert status == 2 and "--allow-code" in error and error.count("\n") == 1
    assert not ran.exists() and not run.exists()
    status, error = transduce(*training, "--allow-code")
    assert status == 0, error

    (tmp_path / "my.py").unlink()  # the run has a copy, also elsewhere
    run.rename(moved)
    ran.unlink()
    translate = ["translate", moved, "A dog.", "-o", tmp_path / "out"]
    status, error = transduce(*translate)
    assert status == 2 and "--allow-code" in error and not ran.exists()
    status, error = transduce("--allow-code", *translate)
    assert status == 0 and (tmp_path / "out").read_text().count("\n") == 1, error

    tuned = ["train", "--from", moved, "--src", src, "--tgt", tgt, "--run", tmp_path / "tuned", *small()[-2:]]
    status, error = transduce(*tuned, "--allow-code")
    assert status == 0 and (tmp_path / "tuned" / "extension_1_my.py").exists(), error

    (moved / "extension_1_my.py").write_text(f"{code}\nraise RuntimeError\n", encoding="utf-8")
    status, error = transduce("--allow-code", *translate)
    assert status != 0 and "extension_1_my.py" in error


@pytest.mark.parametrize(("content", "problem"), [("1 /", "SyntaxError"), (None, "No such file")])
def test_a_damaged_extension_is_one_line(tmp_path: Path, transduce: Run, content: str | None, problem: str) -> None:
    write_corpus(tmp_path, "train", 20)
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    if content is not None:
        (tmp_path / "my.py").write_text(content, encoding="utf-8")
    status, error = transduce("train", tmp_path / "recipe.toml", "--run", tmp_path / "run", "--allow-code")
    assert status == 2 and problem in error and error.count("\n") == 1, error

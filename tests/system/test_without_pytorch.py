"""Commands without PyTorch, which `pip install transduce` does not install."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import marians
from native_engines import needs_library
from servers import Server

MISSING = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
NEEDED = "PyTorch, which is not installed: pip install 'transduce[train]'"


@pytest.fixture(autouse=True)
def no_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find a `torch` that cannot be imported; nor can packages that import it by themselves."""
    (tmp_path / "modules" / "torch").mkdir(parents=True)
    (tmp_path / "modules" / "torch" / "__init__.py").write_text(MISSING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def transduce(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transduce", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)


def test_pytorch_is_an_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not any("torch" in line for line in project["dependencies"])
    assert any(line.startswith("torch>=") for line in project["optional-dependencies"]["train"])


@needs_library
def test_translation_scores_and_alignment(toy: Path, tmp_path: Path) -> None:
    src, tgt = tmp_path / "src.txt", tmp_path / "tgt.txt"
    src.write_text("".join(f"{line}\n" for line in marians.LINES))
    translated = transduce("translate", toy, src, "--output", tgt)
    assert translated.returncode == 0, translated.stderr
    for command in ("score", "align"):
        done = transduce(command, toy, "--src", src, "--tgt", tgt)
        assert done.returncode == 0 and done.stdout.count("\n") == len(marians.LINES), done.stderr


def test_files_are_verified(toy: Path) -> None:
    done = transduce("verify", toy)
    assert done.returncode == 0, done.stderr


def test_publication_is_prepared(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    done = transduce("push", shutil.copytree(toy, tmp_path / "run"), "some-one/a-model", "--dry-run")
    assert done.returncode == 0 and "model.safetensors: " in done.stdout, done.stderr


@needs_library
def test_generation(gpt: Path) -> None:
    done = transduce("generate", gpt, "--prompt", "a man", "--max-length", "3")
    assert done.returncode == 0 and done.stdout.startswith("a man"), done.stderr


@needs_library
@pytest.mark.loopback
def test_the_service(toy: Path) -> None:
    server = Server(toy)
    status, answer = server.request("/v1/translate", {"text": marians.LINES[0]})
    assert status == 200 and answer["translations"][0]["text"]
    assert server.stop() == 0


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--src", __file__, "--tgt", __file__, "--run", "r"],
        ["serve", "RUN", "--inspect"],
        ["inspect", "RUN", "a man"],
    ],
    ids=lambda command: command[0],
)
def test_other_commands_name_the_extra(command: list[str], toy: Path) -> None:
    done = transduce(*(toy if word == "RUN" else word for word in command))
    assert done.returncode == 2 and done.stderr == f"transduce: error: this command needs {NEEDED}\n"


def test_a_model_that_the_library_cannot_run_names_the_extra(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSDUCE_NATIVE_LIBRARY", "missing")
    done = transduce("translate", toy, "a man")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and NEEDED in done.stderr

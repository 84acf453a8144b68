"""The command line itself: help, exit codes, one-line errors. What the commands do is tested in tests/system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import transduce as package
from native_engines import library_missing
from transduce.__main__ import main
from transduce.cli import app as cli
from transduce.cli.request import with_flags
from transduce.errors import Interrupted, SettingsError, TrainingError
from transduce.native.library import instruction_set

COMMANDS = list(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
Result = tuple[int, str, str]


@pytest.fixture
def transduce(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


def test_help_lists_the_commands(transduce: Callable[..., Result]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        code, out, err = transduce(*arguments)
        assert (code, err) == (0, "")
        assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_in_80_columns(command: str, transduce: Callable[..., Result]) -> None:
    code, out, _ = transduce(command, "--help")
    assert code == 0
    assert f" transduce {command}" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_every_option_has_help() -> None:
    for command in COMMANDS:
        for parameter in typer.main.get_command(cli.app).commands[command].params:  # type: ignore[attr-defined]
            assert getattr(parameter, "help", None), parameter.name


def test_version_with_the_engine(transduce: Callable[..., Result]) -> None:
    expected = f"transduce {package.__version__}\ndecoding on CPUs: "
    if isa := instruction_set():
        assert transduce("--version") == (0, f"{expected}native library, {isa}\n", "")
    with library_missing():
        code, out, _ = transduce("--version")
    assert code == 0 and out.startswith(f"{expected}PyTorch, ") and "TRANSDUCE_NATIVE_LIBRARY = /no: there is no" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train", "--sorce", "x"], "No such option: --sorce"),
        (["translate"], "Missing argument 'RUN'"),
        (["translate", "x", "--nbest", "0"], "n_best = 0: "),
        (["train"], "no training text: give --src and --tgt, or --path, or --text, or a recipe"),
        (["train", "no.toml"], "cannot read recipe no.toml: No such file or directory"),
        (["train", "--src", "no.en", "--tgt", "no.de", "--run", "r"], "there is no file"),
        (["train", "--src", "a", "--run", "r"], "the number of --src is 1 and of --tgt 0"),
        (
            ["doctor", "--src", "a", "--tgt", "b", "--nodes", "2", "--gpu", "a100"],
            "--nodes, --gpu: only for the forecast of --gpus N; add --gpus N, or leave it out",
        ),
        (["doctor", "--gpu", "h100"], "error: --gpu: only for the forecast of --gpus N; add --gpus N, or leave it out"),
        (["inspect", "r", "--ablate-heads", "heads"], "--ablate-heads needs --src and --ref"),
        (["serve", "r", "--inspect", "--api-key-file", "k"], "leave out --api-key-file, or --inspect"),
        (["prepare", "--text", __file__, "--run", "r", "--ray", "auto"], "--ray with task = 'causal': "),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(
    arguments: list[str],
    message: str,
    transduce: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = transduce(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("transduce: error: ") and err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("a\nb"), 2),
        (TrainingError("x"), 1),
        (Interrupted("saved", signal=2), 130),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device", "/x"), 2),
        (MemoryError(), 1),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, transduce: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.delenv("TRANSDUCE_DEBUG", raising=False)
    monkeypatch.setattr("transduce.cli.request.Request.settings", fail)
    found, _, err = transduce("train")
    assert found == code
    assert err.count("\n") == 1 and err.startswith("transduce: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "error", "advice"),
    [
        ("train", "data.train: empty", " (data.train: --src and --tgt, --path, or --text)"),
        ("distill", "data.train: empty", ""),
        ("compare", "training.start: gone", ""),
        ("translate", "n_best = 3: too many", " (n_best: --nbest)"),
        ("generate", "n_best = 3: too many", " (n_best: --samples)"),
        ("shortlist", "n_best = 3: too many", " (n_best: --n-best)"),
    ],
)
def test_errors_name_only_options_of_the_command(command: str, error: str, advice: str) -> None:
    assert with_flags(error, cli.options_of(["--quiet", command, "train"])) == error + advice


def test_debug_prints_a_traceback(transduce: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in transduce("train", "no.toml", "--debug")[2]
    monkeypatch.setenv("TRANSDUCE_DEBUG", "1")
    assert "Traceback" in transduce("train", "no.toml")[2]


def test_internal_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("transduce.cli.request.Request.settings", fail)
    with pytest.raises(AssertionError, match="ours"):
        main(["train"])


def test_a_closed_pipe_is_no_error() -> None:
    code = "import transduce.cli.output as o\ntry: o.print_lines(map(str, range(10**6)))\nexcept o.typer.Exit: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (0, b"")


def test_help_imports_no_heavy_module() -> None:
    """It takes 0.2 s of processor time including Python's start-up."""
    code = (
        "import sys\nfrom transduce.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "numpy", "sentencepiece", "sacrebleu", "matplotlib"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "RUN", "--prompt", "a \udcff b"],
        ["generate", "RUN", "--prompt", "a", "-p", "a \udcff b", "--json"],
        ["inspect", "RUN", "a \udcff b"],
        ["inspect", "RUN", "a", "--target", "a \udcff b"],
        ["fill", "RUN", "<mask>", "a \udcff b"],
        ["train", "--set", "a \udcff b"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]),
)
def test_text_that_is_not_utf8_is_refused(arguments: list[str], transduce: Callable[..., Result]) -> None:
    code, out, err = transduce(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "argument 'a \\xff b': not valid UTF-8 (at character 3)" in err


def test_a_path_may_contain_any_bytes(transduce: Callable[..., Result]) -> None:
    code, _, err = transduce("generate", "no\udcffrun", "--prompt", "a")
    assert code == 2 and "UTF-8" not in err

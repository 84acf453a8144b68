"""The command line itself: help, exit codes, one-line errors, output. tests/system has the commands' work."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import transduce as package
from native_engines import library_missing
from transduce.__main__ import main
from transduce.cli import app as cli
from transduce.cli.options import print_lines
from transduce.config.decoding import DecodingOptions
from transduce.config.section import traits_of
from transduce.config.settings import Settings
from transduce.errors import Interrupted, SettingsError, TrainingError, UserError
from transduce.kernels.library import instruction_set

COMMANDS = list(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
Result = tuple[int, str, str]


def command_of(name: str) -> Any:
    return typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]


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
        for parameter in command_of(command).params:
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
        (["serve", "r", "--inspect", "--api-key-file", "k"], "leave out --api-key-file, or --inspect"),
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
    monkeypatch.setattr("transduce.cli.train.Request.settings", fail)
    found, _, err = transduce("train")
    assert found == code
    assert err.count("\n") == 1 and err.startswith("transduce: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "names", "advice"),
    [
        ("train", ["data.train"], " (data.train: --src and --tgt, --path, or --text)"),
        ("train", ["training.start", "run"], " (training.start: --from; run: --run FOLDER)"),
        ("train", ["training.lr"], ""),
        ("distill", ["data.train"], ""),
        ("compare", ["training.start"], ""),
        ("translate", ["n_best"], " (n_best: --nbest)"),
        ("generate", ["n_best"], " (n_best: --samples)"),
    ],
)
def test_errors_name_only_options_of_the_command(command: str, names: list[str], advice: str) -> None:
    assert command_of(command).describe_options(names) == advice


def test_an_error_names_the_option_of_a_setting(transduce: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n")
    files = ["--src", str(tmp_path / "a"), "--tgt", str(tmp_path / "a"), "--run", str(tmp_path / "run")]
    code, _, err = transduce("train", *files, "--extend-vocabulary", "5")
    assert code == 2 and "tokenizer.extend = 5: " in err
    assert err.endswith(" (training.start: --from; tokenizer.extend: --extend-vocabulary)\n")
    code, _, err = transduce("translate", str(tmp_path), "--nbest", "3", "--beam", "2")
    assert code == 2 and err.endswith("n_best = 3: more than beam = 2; raise the beam (n_best: --nbest)\n")


def options_for(task: str, kind: str) -> list[str]:
    """The decoding options that have an effect on a kind of decoding in a task."""
    traits = {name: traits_of(field) for name, field in DecodingOptions.model_fields.items()}
    return [name for name, its in traits.items() if task in (its.tasks or (task,)) and (its.decoding or kind) == kind]


@pytest.mark.parametrize(
    ("command", "names", "without"),
    [
        ("translate", DecodingOptions.model_fields, {"scores"}),
        ("evaluate", options_for("translation", "search"), {"sample", "n_best", "scores"}),
        ("generate", options_for("causal", "samples"), {"sample", "scores", "batch_tokens"}),
    ],
)
def test_every_decoding_option_is_an_option_of_the_commands(
    command: str, names: Collection[str], without: set[str]
) -> None:
    options = {parameter.name: parameter for parameter in command_of(command).params}
    for name in set(names) - without:
        description = str(DecodingOptions.model_fields[name].description).removesuffix(".")
        assert options[name].help.startswith(description) or name == "batch_tokens"
    assert not options.keys() & (DecodingOptions.model_fields.keys() - set(names) | without)


def test_debug_prints_a_traceback(transduce: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in transduce("train", "no.toml", "--debug")[2]
    monkeypatch.setenv("TRANSDUCE_DEBUG", "1")
    assert "Traceback" in transduce("train", "no.toml")[2]


def test_internal_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("transduce.cli.train.Request.settings", fail)
    with pytest.raises(AssertionError, match="ours"):
        main(["train"])


def test_a_closed_pipe_is_no_error() -> None:
    code = "import transduce.cli.options as o\ntry: o.print_lines(map(str, range(10**6)))\nexcept o.typer.Exit: pass"
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


class Closed(io.StringIO):
    """A pipe whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_pipe_stops_the_producer_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def lines() -> Iterator[str]:
        try:
            for i in range(5):
                made.append(i)
                yield str(i)
        finally:
            made.append("end")  # type: ignore[arg-type]

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(typer.Exit):
        print_lines(lines())
    assert made == [0, "end"]


def test_model_output_is_escaped_on_a_terminal_and_byte_exact_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, shown in ((True, r"a\u001b[2Jb"), (False, "a\x1b[2Jb")):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdout", stream)
        print_lines(["a\x1b[2Jb"])
        assert stream.getvalue() == f"{shown}\n"


@pytest.mark.parametrize("options, updates", [([], 2000), (["--updates", "70"], 70)])
def test_demo_stops_after_a_number_of_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], updates: int
) -> None:
    seen: list[Settings] = []

    def train(settings: Settings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise UserError("far enough")

    monkeypatch.setattr("transduce.pipeline.train", train)
    with pytest.raises(SystemExit):
        main(["demo", "--run", str(tmp_path / "demo"), *options])
    training = seen[0].training
    assert (training.max_updates, training.max_minutes, training.max_epochs) == (updates, None, None)
    assert (training.precision, training.optimizer, training.micro_batch_tokens) == ("auto", "muon", 2048)

"""The native library from the command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import marians
import text_runs
from native_engines import library_missing
from system.commands import transduce
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import RunFolderError
from transduce.kernels.calls import precisions
from transduce.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marians.make_run(tmp_path_factory.mktemp("native") / "run")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("\n".join(marians.LINES[:8]), encoding="utf-8")
    return path


def test_the_library_is_built_and_used_at_every_precision(run: Path, text: Path) -> None:
    for precision in ("float32", "float32-fast", "int8"):
        translator = Translator.load(run, device="cpu", precision=precision)  # type: ignore[arg-type]
        assert isinstance(translator.engine, NativeEngine) and translator.choice.slow_because == ""
        done = transduce("translate", run, text, "--device", "cpu", "--precision", precision, "--beam", "2")
        assert done.code == 0 and "PyTorch" not in done.err
        assert len(done.out.splitlines()) == 8


@pytest.mark.parametrize("task", ["translation", "causal"])
def test_without_the_library_pytorch_decodes_the_same_and_says_so(
    task: str, run: Path, text: Path, tmp_path: Path
) -> None:
    command: list[object] = ["translate", run, text, "--device", "cpu"]
    if task == "causal":
        gpt = text_runs.make_run(tmp_path / "gpt", **text_runs.GPT)
        command = ["generate", gpt, "--prompt", "A", "--max-length", "9", "--device", "cpu"]
    native = transduce(*command)
    with library_missing():
        slow = transduce(*command)
    assert (native.code, slow.code) == (0, 0) and native.out == slow.out and "PyTorch" not in native.err
    (line,) = (line for line in slow.err.splitlines() if "PyTorch" in line)
    assert "TRANSDUCE_NATIVE_LIBRARY = /no: there is no such file" in line


def test_commands_with_the_library_do_not_import_pytorch(run: Path, text: Path, tmp_path: Path) -> None:
    """It would take two seconds and 200 MB."""
    folder = tmp_path / "folder"
    code = "import sys; from transduce.__main__ import main; main(sys.argv[1:])"
    watched = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {code}"
    for command in (
        ["translate", run, text, "-o", tmp_path / "out", "--scores"],
        ["translate", run, text, "--output-dir", folder],
        ["score", run, "--src", text, "--tgt", folder / "text"],
        ["generate", text_runs.make_run(tmp_path / "gpt", **text_runs.GPT), "--prompt", "A", "--max-length", "9"],
    ):
        words = [sys.executable, "-c", watched, *map(str, command), "--device", "cpu"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stderr.splitlines()[-1] == "False"


def test_weights_of_any_floating_point_type_are_read_without_pytorch(run: Path, tmp_path: Path) -> None:
    tensors = RunFolder.open(run).load_model()
    for name, kind in (("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        shutil.copytree(run, tmp_path / name)
        folder = RunFolder.open(tmp_path / name)
        folder.save_model({name: tensor.to(kind) for name, tensor in tensors.items()})
        translator = Translator.load(folder.path, device="cpu")
        assert isinstance(translator.engine, NativeEngine)
        reference = Translator(TorchEngine(translator.model), translator.tokenizers, settings=translator.settings)
        found = translator.translate(marians.LINES[:6]), reference.translate(marians.LINES[:6])
        assert [one.ids for one in found[0]] == [one.ids for one in found[1]]


def test_weights_that_do_not_fit_are_reported_as_by_pytorch(run: Path, tmp_path: Path) -> None:
    tensors = RunFolder.open(run).load_model()
    name, embedding = "decoder.blocks.0.feed_forward.expand.weight", "tgt_embedding.table.weight"
    for number, change in enumerate(
        [
            {name: tensors[name][:-1]},
            {name: tensors[name].long()},
            {name: tensors[name][0, 0]},
            {embedding: tensors[embedding][:-1].clone()},
            {"decoder.unknown": tensors[name]},
        ]
    ):
        shutil.copytree(run, tmp_path / str(number))
        folder = RunFolder.open(tmp_path / str(number))
        folder.save_model(tensors | change)
        with pytest.raises(RunFolderError, match=f"does not fit the settings: {next(iter(change))}"):
            Translator.load(folder.path, device="cpu")


def test_pytorch_takes_the_same_weights_or_none(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads them when it is first needed; the run may have changed by then."""
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    one, other = (Translator.load("run", device="cpu") for _ in range(2))

    monkeypatch.chdir(run)
    model = one.model
    folder = RunFolder.open(tmp_path / "run")
    folder.save_model({name: tensor * 2 for name, tensor in folder.load_model().items()})
    with pytest.raises(RunFolderError, match="was changed while its model was in use"):
        _ = other.model
    assert one.model is model


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_native_without_a_compiler_succeeds_and_says_so() -> None:
    command = ["make", "native", "CXX=no-such-compiler"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "no C++ compiler" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not precisions(), reason="this CPU has no kernels of training")
@pytest.mark.parametrize("emulated", ["AVX512", "AVX512 TILES"])
def test_kernels_of_training_for_other_cpus_in_plain_cpp(tmp_path: Path, emulated: str) -> None:
    """On every CPU, whatever it has itself: else a change is tested on some only."""
    required = {"TRANSDUCE_NATIVE_REQUIRED": "1"} | {f"TRANSDUCE_EMULATED_{part}": "1" for part in emulated.split()}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, **required}, check=True)
    library = tmp_path / "transduce/kernels/libtransduce_native.so"
    used = {"TRANSDUCE_NATIVE_LIBRARY": str(library), "OMP_NUM_THREADS": "1"}
    only = ("-k", "bfloat16 and not whole_models")  # kernels in float32 are not emulated; whole models take long
    tests = [sys.executable, "-m", "pytest", "-n", "0", *only, "tests/unit/training/test_stacks.py"]
    done = subprocess.run(tests, cwd=ROOT, env={**os.environ, **used}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout and "skipped" not in done.stdout

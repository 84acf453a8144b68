"""Open the model of a run folder: choose its engine, or load it with PyTorch."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from transduce.config.architectures import resolve_preset
from transduce.decoding.alignment import guided_head
from transduce.decoding.engine import Engine
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_model import (
    LONGEST_TEXT,
    PRECISIONS,
    NativeModel,
    NativePrecision,
    NativeSettings,
    why_not,
)
from transduce.errors import NEEDS_PYTORCH, RunFolderError, SettingsError, check_known
from transduce.kernels.library import load_library
from transduce.machine import find_device, is_cpu
from transduce.runs.folder import RunFolder
from transduce.runs.hub import find_run
from transduce.text.languages import are_different
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers, load_tokenizers

if TYPE_CHECKING:
    import torch

TorchPrecision = Literal["float32", "bfloat16"]
"""Types of PyTorch weights."""
AnyPrecision = TorchPrecision | NativePrecision
RunPaths = str | Path | Sequence[str | Path]
"""One run folder, or several for an ensemble. A string may name a model on the Hub; see `find_run`."""

DecoderT = TypeVar("DecoderT", bound="EngineModel")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The precision of the chosen engine, and the reason why PyTorch decodes on a CPU (empty if it does not)."""

    precision: str = "float32"
    slow_because: str = ""

    def notes(self) -> list[str]:
        """Lines for the log, with the reason if decoding is slow."""
        return [f"decoding with PyTorch, which is slower: {self.slow_because}"] if self.slow_because else []


GIVEN = EngineChoice()
"""The `choice` for an engine that the caller created."""


class EngineModel(ABC):
    """A model and its engine: base of `Translator` and `Generator`."""

    task: ClassVar[str]

    def __init__(self, engine: Engine, choice: EngineChoice) -> None:
        self.engine, self.choice = engine, choice

    @property
    def model(self) -> Any:
        """The PyTorch model, loaded on first use."""
        return self.engine.pytorch_model()

    @property
    def device(self) -> str:
        """The device of the engine, by PyTorch's names: cpu, cuda:0."""
        return self.engine.device


def open_folder(path: str | Path, *, task: str) -> RunFolder:
    """Open the folder of a finished training or of an import; see `find_run`. Raises the errors of `open_model`."""
    folder = RunFolder.open(find_run(path))
    if folder.settings.task != task:
        raise SettingsError(
            f"{path} is a run of task '{folder.settings.task[:40]}', not '{task}'; its README.md shows the command "
            "for it"
        )
    return folder


def open_engine(
    paths: RunPaths,
    *,
    task: str,
    device: str,
    precision: AnyPrecision,
    memory: int | None = None,
    trainable: bool = False,
) -> tuple[list[RunFolder], Tokenizers, Engine, EngineChoice]:
    """Open runs: return their folders, the first run's vocabularies, the fastest engine, and the engine's precision.

    `Translator.load` and `Generator.load` describe the arguments.
    """
    path, *ensemble = list_runs(paths)
    on_cpu = is_cpu(device)
    check_precision(precision, on_cpu=on_cpu)
    folder = open_folder(path, task=task)
    tokenizers = load_tokenizers(folder)
    if memory is not None:
        folder = _with_memory(folder, memory)
    others = [_open_member(other, folder, tokenizers) for other in ensemble]
    of_weights: TorchPrecision = "bfloat16" if precision == "bfloat16" else "float32"
    load, slow_because = _pytorch_model(folder, tokenizers, device, of_weights), ""
    if on_cpu and precision != "bfloat16" and not trainable:
        engine: NativeEngine | str = "the native library does not support ensembles"
        if not others:
            engine = _native_engine(folder, tokenizers, precision=precision, pytorch_model=load)
        if not isinstance(engine, str):
            return [folder], tokenizers, engine, EngineChoice(precision)
        slow_because = engine
        if find_spec("torch") is None:
            raise SettingsError(f"{path}: {slow_because}; the model needs {NEEDS_PYTORCH}")
    # Imported late: importing torch takes longer than starting the native library.
    from transduce.decoding.torch_engine import Ensemble, TorchEngine

    model = load()
    if others:
        model = Ensemble([model, *(_pytorch_model(other, tokenizers, device, of_weights)() for other in others)]).eval()
    choice = EngineChoice(of_weights, slow_because)
    return [folder, *others], tokenizers, TorchEngine(model.requires_grad_(trainable)), choice


def list_runs(paths: RunPaths) -> list[Path]:
    """Find the run folders of an ensemble, or a single one; see `find_run`. Raises `SettingsError` for no runs."""
    runs = [find_run(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not runs:
        raise SettingsError("an ensemble of no runs; name run folders")
    return runs


def identity_of(paths: RunPaths) -> str:
    """A digest of the models in run folders, which changes when a model is replaced.

    Raises `RunFolderError` for a folder without a model.
    """
    return "+".join(RunFolder.open(run).model_digest() for run in list_runs(paths))


def _open_member(path: Path, first: RunFolder, tokenizers: Tokenizers) -> RunFolder:
    """Open the folder of a further model of an ensemble.

    Raises `SettingsError` if it has other languages or vocabularies than the first run, which has `tokenizers`.
    """
    folder = open_folder(path, task=first.settings.task)
    theirs, own = load_tokenizers(folder), first.settings.data.named_languages
    if not tokenizers.src.framing.ids:
        for expected, language in zip(own, folder.settings.data.named_languages, strict=True):
            if are_different(expected, language):
                raise SettingsError(
                    f"ensemble: {path} is a model for '{language}', and {first.path} for '{expected}'; name runs of "
                    "the same languages"
                )
    for side, ours, other in (("source", tokenizers.src, theirs.src), ("target", tokenizers.tgt, theirs.tgt)):
        if difference := _difference(ours, other):
            raise SettingsError(
                f"ensemble: {path} has another {side} vocabulary than {first.path} ({difference}); name runs with the "
                f"same vocabularies: tokenizer.start = '{first.path}' trains such a run"
            )
    return folder


def _difference(ours: Vocabulary, theirs: Vocabulary) -> str:
    """Describe the difference between two vocabularies; empty if their ids have the same meanings."""
    if (type(ours), ours.vocab_size) != (type(theirs), theirs.vocab_size):
        sizes = (f"{type(vocabulary).__name__} of {vocabulary.vocab_size:,}" for vocabulary in (theirs, ours))
        return ", not ".join(sizes)
    if ours.framing != theirs.framing:
        return "other language tokens"
    ids = range(ours.vocab_size if ours.reads_text else 0)
    pieces = enumerate(zip(theirs.pieces(ids), ours.pieces(ids), strict=True))
    return next((f"token {i} is {other!r}, not {own!r}" for i, (other, own) in pieces if other != own), "")


def _native_engine(
    folder: RunFolder, tokenizers: Tokenizers, *, precision: NativePrecision, pytorch_model: Callable[[], Any]
) -> NativeEngine | str:
    """Return an engine for the model of a run, or the reason why the library cannot run it.

    `pytorch_model`: see `NativeEngine`. Raises `RunFolderError` if the weights are damaged.
    """
    library, settings = load_library(), resolve_preset(folder.settings.model)
    if isinstance(library, str):
        return library
    if not isinstance(settings, NativeSettings):
        return f"the native library does not support model.kind = '{settings.kind}'"
    if reason := why_not(settings):
        return f"the native library does not support {reason}"
    if (context := folder.settings.data.context or 0) > LONGEST_TEXT:
        return f"the native library does not support data.context = {context}"
    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        with folder.open_weights() as weights:
            native = NativeModel(
                weights,
                settings,
                precision=precision,
                guided_head=guided_head(folder.settings),
                placeholders=tokenizers.tgt.has_placeholders,
                **sizes,
            )
    except SettingsError as error:  # PyTorch may know more
        return f"the native library cannot use these weights: {error}"
    return NativeEngine(native, pytorch_model=pytorch_model)


def check_precision(precision: str, *, on_cpu: bool) -> None:
    """Raise `SettingsError` if the precision is unknown or not supported by the device."""
    check_known("precision", precision, (*PRECISIONS, "bfloat16"))
    if not on_cpu and precision not in ("float32", "bfloat16"):
        raise SettingsError(
            f"precision = {precision!r}: only on a CPU; use float32 or bfloat16, or device = 'cpu' if that is a choice"
        )


def _with_memory(folder: RunFolder, memory: int) -> RunFolder:
    """Return the run folder with settings whose model remembers `memory` tokens."""
    if folder.settings.model.remembered is None:
        kind = folder.settings.model.kind
        raise SettingsError(f"memory = {memory}: {folder.path} has a model without a memory ('{kind}'); leave it out")
    settings = folder.settings.with_values("model", eval_memory_length=memory)
    return RunFolder(folder.path, settings, folder.manifest)


def _pytorch_model(
    folder: RunFolder, tokenizers: Tokenizers, device: str, precision: TorchPrecision
) -> Callable[[], torch.nn.Module]:
    """Return a function that loads the run's current weights into PyTorch."""
    folder = RunFolder(folder.path.absolute(), folder.settings, folder.manifest)  # the working directory may change
    path = folder.path / "model.safetensors"
    weights = folder.weights_digest()

    def load() -> torch.nn.Module:
        model = _ready_model(folder, tokenizers, device=device, precision=precision)
        if folder.weights_digest() != weights:
            raise RunFolderError(f"{path} was changed while its model was in use; load it again")
        return model

    return load


def open_model(path: str | Path, *, task: str, device: str) -> tuple[RunFolder, torch.nn.Module, Tokenizers]:
    """Open a run: return its folder, its model on the device in eval mode, and its vocabularies.

    Raises:
        RunFolderError: The folder is missing or damaged.
        SettingsError: The run is of another task, or there is no such device.
    """
    folder = open_folder(path, task=task)
    tokenizers = load_tokenizers(folder)
    return folder, _ready_model(folder, tokenizers, device=device, precision="float32"), tokenizers


def _ready_model(
    folder: RunFolder, tokenizers: Tokenizers, *, device: str, precision: TorchPrecision
) -> torch.nn.Module:
    """Load the model of a run folder to a device, in eval mode, with decoding kernels."""
    import torch

    from transduce.kernels.accelerate import accelerate

    target, dtype = find_device(device), getattr(torch, precision)
    model = load_model(folder, tokenizers).to(device=target, dtype=dtype)
    accelerate(model, device=target, precision=dtype, purpose="decoding")
    return model.eval().requires_grad_(False)


def load_model(folder: RunFolder, tokenizers: Tokenizers) -> torch.nn.Module:
    """Load the model of a run folder, on the CPU in float32.

    Raises `RunFolderError` if settings and weights disagree.
    """
    from transduce.models.registry import build_from  # imports torch, which translation can do without

    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        origin = folder.path / "model.safetensors"
        with folder.open_weights() as weights:
            return build_from(folder.settings.model, weights, **sizes, origin=origin)
    except SettingsError as error:
        raise RunFolderError(f"{folder.path / 'config.json'} describes no model: {error}") from error

"""Open the model of a run folder for use."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from transduce.decoding.engine import Engine
from transduce.decoding.native_engine import native_engine
from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.errors import RunFolderError, SettingsError
from transduce.machine import find_device, is_cpu
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers, load_tokenizers

if TYPE_CHECKING:
    import torch

TorchPrecision = Literal["float32", "bfloat16"]
"""Of weights in PyTorch."""
AnyPrecision = TorchPrecision | NativePrecision

DecoderT = TypeVar("DecoderT", bound="EngineModel")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine decodes, and why.

    Attributes:
        precision: That of the engine.
        slow_because: Why PyTorch decodes on the CPU and not the native library; empty if the library does.
    """

    precision: str = "float32"
    slow_because: str = ""

    def notes(self) -> list[str]:
        """Lines for the log: why decoding is slower than it could be."""
        return [f"decoding with PyTorch, which is slower: {self.slow_because}"] if self.slow_because else []


GIVEN = EngineChoice()
"""Of an engine that the caller has made."""


class EngineModel(ABC):
    """A model and its engine: what `Translator` and `Generator` share."""

    task: ClassVar[str]

    def __init__(self, engine: Engine, choice: EngineChoice) -> None:
        self.engine, self.choice = engine, choice

    @property
    def model(self) -> Any:
        """The PyTorch model, loaded when it is first asked for."""
        return self.engine.pytorch_model()

    @property
    def device(self) -> str:
        """The device of the engine, by PyTorch's names: cpu, cuda:0."""
        return self.engine.device


def open_folder(path: str | Path, *, task: str) -> RunFolder:
    """The run folder of a finished training, or an import; errors as for `open_model`."""
    folder = RunFolder.open(Path(path))
    if folder.settings.task != task:
        raise SettingsError(
            f"{path} is a run of task '{folder.settings.task[:40]}', not '{task}'; its README.md shows the command "
            "for it"
        )
    return folder


def check_reads_text(folder: RunFolder, use: str) -> None:
    """Refuse a model whose source is vectors. `use`: what needs text."""
    if folder.settings.model.reads_vectors:
        raise SettingsError(f"{folder.path} has model.source = 'vectors'; {use} needs a model whose source is text")


def open_engine(
    path: str | Path, *, task: str, device: str, precision: AnyPrecision, memory: int | None = None
) -> tuple[RunFolder, Tokenizers, Engine, EngineChoice]:
    """The run folder, its vocabularies, and the fastest engine for it; see `Translator.load` and `Generator.load`."""
    on_cpu = is_cpu(device)
    check_precision(precision, on_cpu=on_cpu)
    folder = open_folder(path, task=task)
    tokenizers = load_tokenizers(folder)
    if memory is not None:
        folder = _with_memory(folder, memory)
    of_weights: TorchPrecision = "bfloat16" if precision == "bfloat16" else "float32"
    load, slow_because = _pytorch_model(folder, tokenizers, device, of_weights), ""
    if on_cpu and precision != "bfloat16":
        engine = native_engine(folder, tokenizers, precision=precision, pytorch_model=load)
        if not isinstance(engine, str):
            return folder, tokenizers, engine, EngineChoice(precision)
        slow_because = engine
    # Imports torch, which takes longer than all else that the native library needs to start.
    from transduce.decoding.torch_engine import TorchEngine

    return folder, tokenizers, TorchEngine(load()), EngineChoice(of_weights, slow_because)


def check_precision(precision: str, *, on_cpu: bool) -> None:
    """Raise `SettingsError` unless this is one of `AnyPrecision` that the device has."""
    if precision not in (allowed := (*PRECISIONS, "bfloat16")):
        raise SettingsError(f"precision = {precision!r}: allowed are {', '.join(allowed)}")
    if not on_cpu and precision not in ("float32", "bfloat16"):
        raise SettingsError(
            f"precision = {precision!r}: only on a CPU; use float32 or bfloat16, or device = 'cpu' if that is a choice"
        )


def _with_memory(folder: RunFolder, memory: int) -> RunFolder:
    """The folder with another length of the model's memory."""
    if folder.settings.model.remembered is None:
        kind = folder.settings.model.kind
        raise SettingsError(f"memory = {memory}: {folder.path} has a model without a memory ('{kind}'); leave it out")
    settings = folder.settings.with_values("model", eval_memory_length=memory)
    return RunFolder(folder.path, settings, folder.manifest)


def _pytorch_model(
    folder: RunFolder, tokenizers: Tokenizers, device: str, precision: TorchPrecision
) -> Callable[[], torch.nn.Module]:
    """A function that loads the model with PyTorch, the one that is in the folder now."""
    there = RunFolder(folder.path.absolute(), folder.settings, folder.manifest)  # the working directory may change
    path = there.path / "model.safetensors"
    weights = there.weights_digest()

    def load() -> torch.nn.Module:
        model = _ready_model(there, tokenizers, device=device, precision=precision)
        if there.weights_digest() != weights:
            raise RunFolderError(f"{path} was changed while its model was in use; load it again")
        return model

    return load


def open_model(path: str | Path, *, task: str, device: str) -> tuple[RunFolder, torch.nn.Module, Tokenizers]:
    """The run folder, its model on the device in eval mode, and its vocabularies.

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
    """The model of a run folder on a device, in eval mode."""
    import torch

    model = load_model(folder, tokenizers).to(device=find_device(device), dtype=getattr(torch, precision))
    return model.eval().requires_grad_(False)


def load_model(folder: RunFolder, tokenizers: Tokenizers) -> torch.nn.Module:
    """The model of a run folder, on the CPU in float32.

    Raises `RunFolderError` where settings and weights disagree.
    """
    from transduce.models.registry import build_from  # imports torch, which translation can do without

    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        origin = folder.path / "model.safetensors"
        return build_from(folder.settings.model, folder.load_model(), **sizes, origin=origin)
    except SettingsError as error:
        raise RunFolderError(f"{folder.path / 'config.json'} describes no model: {error}") from error

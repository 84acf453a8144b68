"""Open the model of a run folder for use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transduce.decoding.engine import Engine
from transduce.decoding.native_engine import native_engine
from transduce.decoding.precision import AnyPrecision, TorchPrecision, check_precision
from transduce.errors import RunFolderError, SettingsError
from transduce.machine import find_device, is_cpu
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers, load_tokenizers

if TYPE_CHECKING:
    import torch

ModelT = TypeVar("ModelT", bound="RunModel")
DecoderT = TypeVar("DecoderT", bound="EngineModel")


class RunModel(ABC):
    """A PyTorch model of one task that can be loaded from a run folder."""

    task: ClassVar[str]

    @classmethod
    def load(
        cls: type[ModelT], path: str | Path, *, device: str = "auto", precision: TorchPrecision = "float32"
    ) -> ModelT:
        """Load the model of a run folder.

        Raises:
            RunFolderError: The folder is missing or damaged.
            SettingsError: The run is of another task, or there is no such device.
        """
        return cls._from_run(*open_model(path, task=cls.task, device=device, precision=precision))

    @classmethod
    @abstractmethod
    def _from_run(cls: type[ModelT], folder: RunFolder, model: torch.nn.Module, tokenizers: Tokenizers) -> ModelT: ...


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
    """A model of one task whose engine can be loaded from a run folder: what `Translator` and `Generator` share."""

    task: ClassVar[str]

    def __init__(self, engine: Engine, choice: EngineChoice) -> None:
        self.engine, self.choice = engine, choice

    @classmethod
    def load(
        cls: type[DecoderT], path: str | Path, *, device: str = "auto", precision: AnyPrecision = "float32"
    ) -> DecoderT:
        """Load the model of a run folder.

        On a CPU the native library decodes, where it is built and supports the model; else PyTorch does, and
        `choice.slow_because` has the reason. PyTorch is imported and given the weights when it is first needed.

        Args:
            path: The run folder.
            device: auto, cpu or cuda.
            precision: float32; float32-fast: nearly as exact, with matrix products of pairs of bfloat16 numbers where
                the CPU has AMX; int8: with matrix products of 8-bit integers; bfloat16: the whole model, by PyTorch.
                Without the native library, all but bfloat16 are float32.

        Raises:
            RunFolderError: The folder is missing or damaged.
            SettingsError: The run is of another task, or there is no such device or precision.
        """
        return cls._from_run(*open_engine(path, task=cls.task, device=device, precision=precision))

    @classmethod
    @abstractmethod
    def _from_run(
        cls: type[DecoderT], folder: RunFolder, tokenizers: Tokenizers, engine: Engine, choice: EngineChoice
    ) -> DecoderT: ...

    @property
    def model(self) -> Any:
        """The PyTorch model, loaded when it is first asked for."""
        return self.engine.pytorch_model()

    @property
    def device(self) -> str:
        """Where the engine computes, by PyTorch's names: cpu, cuda:0."""
        return self.engine.device


def open_folder(path: str | Path, *, task: str) -> RunFolder:
    """The run folder of a finished training, or an import; errors as for `RunModel.load`."""
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
    """The run folder, its vocabularies, and the fastest engine for it; see `EngineModel.load` and `Generator.load`."""
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


def open_model(
    path: str | Path, *, task: str, device: str, precision: TorchPrecision
) -> tuple[RunFolder, torch.nn.Module, Tokenizers]:
    """The run folder, its model on the device in eval mode, and its vocabularies; errors as for `RunModel.load`."""
    folder = open_folder(path, task=task)
    tokenizers = load_tokenizers(folder)
    return folder, _ready_model(folder, tokenizers, device=device, precision=precision), tokenizers


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

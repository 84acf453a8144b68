"""Open the model of a run folder for use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.errors import RunFolderError, SettingsError
from transduce.machine import find_device
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers, load_tokenizers

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "bfloat16"]
"""Of weights in PyTorch."""
ModelT = TypeVar("ModelT", bound="RunModel")


class RunModel(ABC):
    """A PyTorch model of one task that can be loaded from a run folder."""

    task: ClassVar[str]

    @classmethod
    def load(cls: type[ModelT], path: str | Path, *, device: str = "auto", precision: Precision = "float32") -> ModelT:
        """Load the model of a run folder.

        Raises:
            RunFolderError: The folder is missing or damaged.
            SettingsError: The run is of another task, or there is no such device.
        """
        return cls._from_run(*open_model(path, task=cls.task, device=device, precision=precision))

    @classmethod
    @abstractmethod
    def _from_run(cls: type[ModelT], folder: RunFolder, model: torch.nn.Module, tokenizers: Tokenizers) -> ModelT: ...


def check_precision(precision: str, *others: str) -> None:
    """Raise `SettingsError` unless this is a precision of the native library or of PyTorch, or one of `others`."""
    if precision not in (allowed := (*others, *PRECISIONS, "bfloat16")):
        raise SettingsError(f"precision = {precision!r}: allowed are {', '.join(allowed)}")


def precision_of_weights(precision: Precision | NativePrecision, *, on_cpu: bool) -> Precision:
    """The precision in which PyTorch has the weights. Raises `SettingsError` for one that the device does not have."""
    check_precision(precision)
    if not on_cpu and precision not in ("float32", "bfloat16"):
        raise SettingsError(f"precision = {precision!r} needs device = 'cpu'; or use float32 or bfloat16")
    return "bfloat16" if precision == "bfloat16" else "float32"


def open_model(
    path: str | Path, *, task: str, device: str, precision: Precision
) -> tuple[RunFolder, torch.nn.Module, Tokenizers]:
    """The run folder, its model on the device in eval mode, and its vocabularies; errors as for `RunModel.load`."""
    folder, tokenizers = open_run(path, task=task)
    return folder, ready_model(folder, tokenizers, device=device, precision=precision), tokenizers


def open_run(path: str | Path, *, task: str) -> tuple[RunFolder, Tokenizers]:
    """The run folder and its vocabularies, without the model; errors as for `RunModel.load`."""
    folder = RunFolder.open(Path(path))
    if folder.settings.task != task:
        raise SettingsError(
            f"{path} is a run of task '{folder.settings.task[:40]}', not '{task}'; its README.md shows the command "
            "for it"
        )
    return folder, load_tokenizers(folder)


def ready_model(folder: RunFolder, tokenizers: Tokenizers, *, device: str, precision: Precision) -> torch.nn.Module:
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

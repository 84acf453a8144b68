"""Open the model of a run folder for use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from torch import nn

from transduce.errors import RunFolderError, SettingsError
from transduce.machine import find_device
from transduce.models.registry import build_from
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers, load_tokenizers

Precision = Literal["float32", "bfloat16"]
ModelT = TypeVar("ModelT", bound="RunModel")


class RunModel(ABC):
    """A model of one task that can be loaded from a run folder."""

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
    def _from_run(cls: type[ModelT], folder: RunFolder, model: nn.Module, tokenizers: Tokenizers) -> ModelT: ...


def open_model(
    path: str | Path, *, task: str, device: str, precision: Precision
) -> tuple[RunFolder, nn.Module, Tokenizers]:
    """The run folder, its model on the device in eval mode, and its vocabularies; errors as for `RunModel.load`."""
    folder = RunFolder.open(Path(path))
    if folder.settings.task != task:
        raise SettingsError(
            f"{path} is a run of task '{folder.settings.task[:40]}', not '{task}'; its README.md shows the command "
            "for it"
        )
    model, tokenizers = load_model(folder)
    model = model.to(device=find_device(device), dtype=getattr(torch, precision))
    return folder, model.eval().requires_grad_(False), tokenizers


def load_model(folder: RunFolder) -> tuple[nn.Module, Tokenizers]:
    """The model of a run folder, on the CPU in float32, and its vocabularies.

    Raises `RunFolderError` where settings and weights disagree.
    """
    tokenizers = load_tokenizers(folder)
    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        origin = folder.path / "model.safetensors"
        model = build_from(folder.settings.model, folder.load_model(), **sizes, origin=origin)
    except SettingsError as error:
        raise RunFolderError(f"{folder.path / 'config.json'} describes no model: {error}") from error
    return model, tokenizers

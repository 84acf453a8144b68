"""Open the model of a run folder for use."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from transduce.errors import RunFolderError, SettingsError
from transduce.models.registry import build_from
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers, load_tokenizers

Precision = Literal["float32", "bfloat16"]


def open_model(
    path: str | Path, *, task: str, device: str, precision: Precision
) -> tuple[RunFolder, nn.Module, Tokenizers]:
    """The run folder, its model on the device in eval mode, and its vocabularies.

    Raises:
        RunFolderError: The folder is missing or damaged.
        SettingsError: The run is not of `task`, or there is no such device.
    """
    folder = RunFolder.open(Path(path))
    settings, tokenizers = folder.settings, load_tokenizers(folder)
    if settings.task != task:
        raise SettingsError(
            f"{path} is a run of task '{settings.task[:40]}', not '{task}'; its README.md shows the command for it"
        )
    model = load_model(folder)
    model = model.to(device=find_device(device), dtype=getattr(torch, precision)).eval().requires_grad_(False)
    return folder, model, tokenizers


def find_device(name: str) -> torch.device:
    """The device called auto, cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device = {name!r}: allowed are auto, cpu and cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device = 'cuda': PyTorch finds no CUDA device; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(folder: RunFolder) -> nn.Module:
    """The model of a run folder, on the CPU in float32. Raises `RunFolderError` where settings and weights disagree."""
    tokenizers = load_tokenizers(folder)
    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        return build_from(folder.settings.model, folder.load_model(), **sizes, origin=folder.path / "model.safetensors")
    except SettingsError as error:
        raise RunFolderError(f"{folder.path / 'config.json'} describes no model: {error}") from error

"""Small translation runs, and the same in the format of transformers' Marian, written without transformers."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from oracle.adapter import fitting, randomize
from transduce.config.settings import Settings, TokenizerSettings
from transduce.convert import parity
from transduce.convert.exporting import export_run
from transduce.models.registry import build_model
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizer, train_tokenizers

LINES = [
    f"{who} {does} {what} ."
    for who in ("a man", "two women", "ein Hund", "die Kinder", "une fille", "猫")
    for does in ("reads", "schläft", "plays with")
    for what in ("the ball", "einen Ball", "books", "près du lac")
]
MODEL: dict[str, Any] = {
    "d_model": 16, "d_ff": 24, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 1, "max_positions": 64,
}  # fmt: skip


@cache
def tokenizers(*, joint: bool = True, placeholders: int = 0) -> Tokenizers:
    if placeholders:
        chosen = TokenizerSettings(joint=joint, placeholders=placeholders)
        return train_tokenizers(LINES, LINES[9:], chosen, vocab_size=90)
    src, tgt = (train_tokenizer(LINES[i:], TokenizerSettings(), vocab_size=n) for i, n in ((0, 90), (9, 80)))
    return Tokenizers(src, src if joint else tgt)


def make_run(
    path: Path,
    *,
    joint: bool = True,
    placeholders: int = 0,
    seed: int = 1,
    decoding: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Create a run folder whose weights are all random and non-zero."""
    vocabularies = tokenizers(joint=joint, placeholders=placeholders)
    model = fitting(**{**MODEL, **options}).model_dump(exclude_unset=True)
    return write_run(path, {"name": "toy", "model": model, "decoding": decoding or {}}, vocabularies, seed=seed)


def write_run(path: Path, values: Mapping[str, Any], vocabularies: Tokenizers, *, seed: int) -> Path:
    """Create the run folder of these settings. All weights are random and non-zero."""
    settings = Settings.from_mapping(values)
    model = build_model(settings.model, n_src=vocabularies.n_src, n_tgt=vocabularies.n_tgt)
    randomize(model, seed=seed)
    with RunFolder.create(path, settings, "") as folder:
        folder.save_tokenizers(vocabularies.save)
        folder.save_model(model.state_dict())
    return path


def make_folder(path: Path, run: Path) -> Path:
    """Export the run in Marian's format, without the usual comparison."""
    with mock.patch.object(parity, "compare_with_transformers", return_value="not asked"):
        list(export_run(run, "huggingface", path))
    return path


def state_of(run: Path) -> dict[str, torch.Tensor]:
    return RunFolder.open(run).load_model()


def change(path: Path, **values: Any) -> None:
    """Set values of a JSON file, or remove them (`...`)."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

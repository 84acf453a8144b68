"""Adapters of encoder-decoders in the format of PEFT: adapter_config.json and adapter_model.safetensors.

One of our layers may pack several matrices of transformers, and has an adapter for each of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.config.settings import Settings, TrainingSettings
from transduce.convert import seq2seq, t5, weight_map
from transduce.convert.folder import Imported, Outgoing, read_object
from transduce.convert.weight_map import Entry, Rows
from transduce.errors import RunFolderError, SettingsError, UserError, listed
from transduce.runs.atomic import write_json
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors, write_tensors
from transduce.text.tokenizer import Tokenizers, load_tokenizers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None,),
}
"""Supported values for keys of adapter_config.json."""


def _entries(settings: Settings, tokenizers: Tokenizers) -> list[Entry]:
    """Return the weight map of the model that the adapters adapt."""
    s = settings.model
    assert isinstance(s, TransformerSettings)
    src, tgt = Rows.of_size(tokenizers.n_src), Rows.of_size(tokenizers.n_tgt)
    if s.positions == "t5":
        return t5.entries(s, rows=tgt)
    return seq2seq.entries(s, src=src, tgt=tgt)


def _reordered(a: Tensor, b: Tensor, entry: Entry, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Reorder columns or rows of low-rank matrices A, B along the residual stream, if the file has another order."""
    if order is None or entry.stream is None:
        return a, b
    return (a, b.index_select(0, order)) if entry.stream == 0 else (a.index_select(1, order), b)


def export_peft(out: Path, run: Outgoing) -> list[str]:
    """Write the adapters of a run into the folder `out`; return lines on the result.

    Raises `UserError` if the run does not store adapters.
    """
    s, lora = run.settings.model, run.settings.training.lora
    assert isinstance(s, TransformerSettings)
    if lora is None or not run.adapters:
        raise UserError(
            "the run has no adapters: train it with training.lora.merge = false, or export it to huggingface"
        )
    tensors, modules, order = dict[str, Tensor](), set[str](), seq2seq.column_order(s)
    for entry in _entries(run.settings, run.tokenizers):
        layer = f"{entry.ours.removesuffix('.weight')}.adapters"
        for number, theirs in enumerate(entry.theirs if f"{layer}.0.b" in run.adapters else ()):
            a, b = (run.adapters[f"{layer}.{number}.{part}"] for part in "ab")
            name = theirs.removesuffix(".weight")
            modules.add(name.rpartition(".")[2])
            a, b = _reordered(a, b, entry, order)
            b = b if number else b / entry.factor
            tensors |= {f"{_PREFIX}{name}.lora_{part}.weight": x.contiguous() for part, x in (("A", a), ("B", b))}
    alpha = lora.scale * lora.rank
    config = {
        **{key: values[-1] for key, values in _SUPPORTED.items()},
        "task_type": "SEQ_2_SEQ_LM",
        "base_model_name_or_path": run.base_name,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    write_json(out / CONFIG, config)
    write_tensors(out / WEIGHTS, tensors)
    return [f"adapters of rank {lora.rank} on {', '.join(sorted(modules))}: {len(tensors) // 2} matrices"]


def import_peft(folder: Path, base: Path | None) -> Imported:
    """Read the adapters in a folder, and merge them into the weights of the run `base`.

    Raises `UserError` if the adapters belong to another model or need more than low-rank products.
    """
    config = read_object(folder / CONFIG)
    if base is None:
        raise SettingsError(
            f"{folder} contains adapters of '{config.get('base_model_name_or_path')}': import that model first, and "
            "name its run",
            "base",
        )
    if wrong := [f"{key} = {config.get(key)!r}" for key, able in _SUPPORTED.items() if config.get(key) not in able]:
        raise UserError(f"{folder / CONFIG}: not supported: {', '.join(wrong)}; merge the adapters with PEFT")
    if not (folder / WEIGHTS).exists():
        raise RunFolderError(f"{folder} has no {WEIGHTS}; model.save_pretrained(FOLDER) of PEFT writes it")
    run = RunFolder.open(base)
    s, tokenizers = run.settings.model, load_tokenizers(run)
    if not isinstance(s, TransformerSettings):
        raise UserError(f"{base} has a model of kind '{s.kind}'; adapters are imported for translators only")
    rank = config.get("r")
    if type(rank) is not int or rank < 1 or not isinstance(alpha := config.get("lora_alpha"), int | float):
        raise RunFolderError(f"{folder / CONFIG} is damaged: r and lora_alpha must be numbers")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs, weights = _pairs_of(load_tensors(folder / WEIGHTS), rank=rank), run.load_model()
    modules, order = set[str](), seq2seq.column_order(s)
    for entry in _entries(run.settings, tokenizers):
        adapted = [layer for name in entry.theirs if (layer := name.removesuffix(".weight")) in pairs]
        if not adapted:
            continue
        if entry.rows is not None:  # vocabularies have another order
            raise UserError(f"{folder}: adapters of an embedding ({listed(adapted)}): merge them with PEFT")
        theirs = weight_map.write({entry.ours: weights[entry.ours]}, [entry], order=order)
        for name in adapted:
            a, b = pairs.pop(name)
            if (b.shape[0], a.shape[1]) != entry.shape or a.shape[0] != b.shape[1]:
                raise UserError(
                    f"{folder}: adapters of another model than {base}: those of {name} are for a matrix "
                    f"{[b.shape[0], a.shape[1]]}, and it is {list(entry.shape)}"
                )
            modules |= {name.rpartition(".")[2]} if bool(b.any()) else set()
            weight = f"{name}.weight"
            theirs[weight] = (theirs[weight].double() + scale * (b.double() @ a.double())).float()
        weights |= weight_map.read(theirs, [entry], origin=folder, order=order)
    if pairs:
        raise UserError(f"{folder}: adapters of another model than {base}, which lacks {listed([*pairs], 5)}")
    notes = [f"found: adapters of rank {rank} on {', '.join(sorted(modules))}, merged into the weights of {base.name}"]
    settings = run.settings.model_copy(update={"training": TrainingSettings()})
    return Imported(settings, tokenizers, weights, tuple(notes))


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.is_floating_point()


def _pairs_of(tensors: Mapping[str, Tensor], *, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the low-rank matrices (A, B) of each adapted layer in the file, all of which must have this rank."""
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        parts[layer or name][part] = tensor
    wrong = [layer for layer, own in parts.items() if {*own} != {"A", "B"} or not all(map(_is_matrix, own.values()))]
    if wrong:
        raise UserError(f"{WEIGHTS}: expected matrices lora_A and lora_B of every layer, unlike {listed(wrong, 5)}")
    if wrong := [layer for layer, own in parts.items() if own["A"].shape[0] != rank]:
        raise UserError(f"{CONFIG} has r = {rank}, and {WEIGHTS} has another rank of {listed(wrong, 5)}")
    return {layer: (own["A"], own["B"]) for layer, own in parts.items()}

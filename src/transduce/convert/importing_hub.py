"""From a folder of transformers' BERT or GPT-2 to settings, vocabulary and weights of ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import DataSettings, Settings, TokenizerSettings
from transduce.convert import bert, gpt2
from transduce.convert.folder import check_model_type, read_object, read_weights
from transduce.convert.hub import ids_of, special_names, tokenizer_file, vocabulary
from transduce.convert.importing import Imported
from transduce.convert.vocabulary import Rows
from transduce.convert.weight_map import check, read
from transduce.errors import UserError
from transduce.text.special import BOS, EOS, PAD
from transduce.text.tokenizer import Tokenizers

_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
            "mask_token": "[MASK]"}  # fmt: skip


_USUAL_END = 50256
_TASKS = {"bert": "masked", "bert-classifier": "classification", "bert-encoder": "encoding"}


def import_bert(folder: Path) -> Imported:
    """Read a folder with config.json, weights, and tokenizer.json or vocab.txt.

    Raises `UserError`: something is missing, damaged, contradictory or not supported; all of it where there is more.
    """
    config = read_object(folder / "config.json")
    check_model_type(folder, config, bert.ARCHITECTURES)
    tensors = read_weights(folder)
    prefix = bert.prefix_of(tensors)
    for name in bert.buffers(prefix):
        tensors.pop(name, None)
    model = bert.model_settings(config, names=tensors.keys(), origin=folder)
    unused, head = bert.unused(model, prefix=prefix), bert.labels_head(tensors)
    table = partial(
        bert.lines, model, prefix=prefix, labels=head or "classifier", pooler=bert.has_pooler(tensors)
    )  # of the rows of the vocabulary
    check(tensors, table(rows=_sizes_of(config)), origin=folder, known=unused)
    names = special_names(folder, _SPECIAL)
    content = tokenizer_file(folder, names)
    if model.kind != "bert" and names[-1] not in ids_of(content, origin=folder):
        names = names[:-1]  # nothing is masked there
    tokenizer, rows = vocabulary(content, names, n=config["vocab_size"], origin=folder)
    if (pad := config.get("pad_token_id")) not in (None, int(rows.index[PAD])):
        told = f"pad_token_id = {repr(pad)[:40]}, and {names[0]} of the vocabulary is {int(rows.index[PAD])}"
        raise UserError(f"{folder / 'config.json'}: {told}")
    state = read(tensors, table(rows=rows), origin=folder, known=unused)
    state |= {name: state[kept] for name, kept in bert.tied_names(model).items()}
    labels = bert.labels_of(config, names=tensors) if head else None
    settings = Settings(
        name=folder.absolute().name,
        task=_TASKS[model.kind],
        data=DataSettings(max_length=model.max_positions, context=model.max_positions, labels=labels),
        tokenizer=TokenizerSettings(kind="hub", vocab_size=max(tokenizer.vocab_size, 8)),
        model=model,
    )
    notes = [_types(tensors)]
    if left := [name for name in unused if name in tensors]:
        notes.append(f"left out, as nothing uses them: {', '.join(left)}")
    if head is None and any(name in config for name in ("id2label", "num_labels")):
        notes.append("labels in config.json are left out: there is no classifier")
    if model.kind == "bert-encoder" and not bert.has_pooler(tensors):
        state |= _fresh_pooler(model.d_model)
        notes.append("it came without a pooler: a fresh one is there, for training to begin with")
    return Imported(settings, Tokenizers(tokenizer, tokenizer), state, tuple(notes))


def import_gpt2(folder: Path) -> Imported:
    """Read a folder with config.json, weights, and tokenizer.json, or vocab.json and merges.txt.

    Raises `UserError`: something is missing, damaged, contradictory or not supported; all of it where there is more.
    """
    config = read_object(folder / "config.json")
    check_model_type(folder, config, gpt2.ARCHITECTURES)
    model, tensors = gpt2.model_settings(config, origin=folder), read_weights(folder)
    prefix = gpt2.prefix_of(tensors)
    for name in gpt2.buffers(model, prefix=prefix):
        tensors.pop(name, None)
    check(tensors, gpt2.lines(model, rows=_sizes_of(config), prefix=prefix), origin=folder)
    begin, end = special_names(folder, dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>"))
    content = tokenizer_file(folder, list(dict.fromkeys((begin, end))))
    others = _own_pieces(folder, ids_of(content, origin=folder), (begin, end))
    tokenizer, rows = vocabulary(content, [*others, begin, end], n=config["vocab_size"], origin=folder)
    notes = [_types(tensors), *_ends(config, rows, (begin, end), origin=folder)]
    state = read(tensors, gpt2.lines(model, rows=rows, prefix=prefix), origin=folder)
    state |= {name: state[kept] for name, kept in gpt2.tied_names(model).items()}
    never = gpt2.never(rows)
    if any(never):
        state["output_bias"] = torch.tensor(never)
    own = {"output_bias": "fixed" if any(never) else False, "one_end": bool(rows.index[BOS] == rows.index[EOS])}
    model = model.model_copy(update=own)
    settings = Settings(
        name=folder.absolute().name,
        task="causal",
        data=DataSettings(max_length=model.max_positions, context=model.max_positions),
        tokenizer=TokenizerSettings(kind="hub", vocab_size=max(tokenizer.vocab_size, 8), exact=True),
        model=model,
    )
    return Imported(settings, Tokenizers(tokenizer, tokenizer), state, tuple(notes))


def _ends(config: Mapping[str, Any], rows: Rows, names: tuple[str, str], *, origin: Path) -> list[str]:
    """Where config.json names another beginning or end than the vocabulary, whose pieces are taken; `UserError` for
    what is no id. GPT-2's own number stands in files of smaller ones too, as it is the default there.
    """
    notes = []
    for key, name, ours in zip(("bos_token_id", "eos_token_id"), names, (BOS, EOS), strict=True):
        told, there = config.get(key), int(rows.index[ours])
        if told is None or (type(told) is int and told in (there, _USUAL_END)):
            continue
        if type(told) is not int or not 0 <= told < rows.n_theirs:
            raise UserError(
                f"{origin / 'config.json'}: {key} = {repr(told)[:40]} is no id of the vocabulary; its {name} is {there}"
            )
        notes.append(f"{key} = {told} in config.json is not followed: {name} of the vocabulary, {there}, is taken")
    return notes


def _own_pieces(folder: Path, ids: Mapping[str, int], ends: tuple[str, str]) -> list[str | None]:
    """The folder's padding and unknown, each where it is a piece of its own: GPT-2's own have neither."""
    pad, unknown = special_names(folder, {"pad_token": "", "unk_token": ""})
    pad_is, unknown_is = (piece in ids and piece not in ends for piece in (pad, unknown))
    return [pad if pad_is else None, unknown if unknown_is and unknown != pad else None]


def _sizes_of(config: Mapping[str, Any]) -> Rows:
    """Rows for sizes alone: nothing is made of a vocabulary before the weights bear its size out."""
    return Rows(torch.zeros(0, dtype=torch.long), config["vocab_size"])


def _fresh_pooler(d_model: int) -> dict[str, Tensor]:
    """A pooler's weights as BERT's begin, the same every time."""
    weight = torch.randn(d_model, d_model, generator=torch.Generator().manual_seed(1)) * 0.02
    return {"pooler.dense.weight": weight, "pooler.dense.bias": torch.zeros(d_model)}


def _types(tensors: Mapping[str, Tensor]) -> str:
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return f"weights of type {', '.join(kinds)}, kept as float32"

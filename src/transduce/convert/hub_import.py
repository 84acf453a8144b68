"""Import of BERT and GPT-2 from a folder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import BertEncoderSettings, BertSettings, DataSettings, ModelSettings, Settings, TokenizerSettings
from transduce.convert import bert, gpt2
from transduce.convert.base import Imported
from transduce.convert.folder import check_model_type, read_object, read_weights
from transduce.convert.hub_vocabulary import ids_of, read_tokenizer, special_names, vocabulary
from transduce.convert.weight_map import Rows, check, read, type_note
from transduce.errors import UserError
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, PAD
from transduce.text.tokenizer import Tokenizers

_BERT_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_GPT2_END = 50256  # GPT-2's own end, which many smaller models keep in config.json as the default


def import_bert(folder: Path) -> Imported:
    """Read a folder with config.json, weights, and tokenizer.json or vocab.txt.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    config = read_object(folder / "config.json")
    check_model_type(folder, config, bert.ARCHITECTURES)
    tensors = read_weights(folder)
    prefix, pooler = bert.prefix_of(tensors), bert.has_pooler(tensors)
    for name in bert.buffers(prefix):
        tensors.pop(name, None)
    model = bert.model_settings(config, names=tensors.keys(), origin=folder)
    unused, head = bert.unused(model, prefix=prefix), bert.label_head(tensors)
    entries = partial(bert.entries, model, prefix=prefix, labels=head or "classifier", pooler=pooler)
    check(tensors, entries(rows=Rows.of_size(config["vocab_size"])), origin=folder, known=unused)
    tokenizer, rows = _bert_vocabulary(folder, config, needs_mask=isinstance(model, BertSettings))
    state = read(tensors, entries(rows=rows), origin=folder, known=unused)
    state |= {name: state[kept] for name, kept in bert.tied_names(model).items()}
    notes = [type_note(tensors)]
    if left := [name for name in unused if name in tensors]:
        notes.append(f"not used, and left out: {', '.join(left)}")
    if head is None and any(name in config for name in ("id2label", "num_labels")):
        notes.append("labels in config.json are left out: there is no classifier")
    if isinstance(model, BertEncoderSettings) and not pooler:
        weight = torch.randn(model.d_model, model.d_model, generator=torch.Generator().manual_seed(1)) * 0.02
        state |= {"pooler.dense.weight": weight, "pooler.dense.bias": torch.zeros(model.d_model)}
        notes.append("it had no pooler: a randomly initialized one was added, for training to start from")
    labels = bert.labels_of(config, names=tensors) if head else None
    return _imported(folder, model, tokenizer, state, notes, labels=labels)


def _bert_vocabulary(folder: Path, config: Mapping[str, Any], *, needs_mask: bool) -> tuple[HubTokenizer, Rows]:
    names = special_names(folder, _BERT_SPECIAL)
    content = read_tokenizer(folder, names)
    if not needs_mask and names[-1] not in ids_of(content, origin=folder):
        names = names[:-1]
    tokenizer, rows = vocabulary(content, names, n=config["vocab_size"], origin=folder)
    pad = config.get("pad_token_id")
    if pad not in (None, int(rows.index[PAD])):
        problem = f"pad_token_id = {repr(pad)[:40]}, and {names[0]} of the vocabulary is {int(rows.index[PAD])}"
        raise UserError(f"{folder / 'config.json'}: {problem}")
    return tokenizer, rows


def import_gpt2(folder: Path) -> Imported:
    """Read a folder with config.json, weights, and tokenizer.json, or vocab.json and merges.txt.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    config = read_object(folder / "config.json")
    check_model_type(folder, config, gpt2.ARCHITECTURES)
    model, tensors = gpt2.model_settings(config, origin=folder), read_weights(folder)
    prefix = gpt2.prefix_of(tensors)
    for name in gpt2.buffers(model, prefix=prefix):
        tensors.pop(name, None)
    check(tensors, gpt2.entries(model, rows=Rows.of_size(config["vocab_size"]), prefix=prefix), origin=folder)
    begin, end = special_names(folder, dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>"))
    content = read_tokenizer(folder, list(dict.fromkeys((begin, end))))
    others = _pad_and_unknown(folder, ids_of(content, origin=folder), (begin, end))
    tokenizer, rows = vocabulary(content, [*others, begin, end], n=config["vocab_size"], origin=folder)
    notes = [type_note(tensors), *_differing_ends(config, rows, (begin, end), origin=folder)]
    state = read(tensors, gpt2.entries(model, rows=rows, prefix=prefix), origin=folder)
    state |= {name: state[kept] for name, kept in gpt2.tied_names(model).items()}
    bias = gpt2.fixed_bias(rows)
    if bool(bias.any()):
        state["output_bias"] = bias
    same_end = int(rows.index[BOS]) == int(rows.index[EOS])
    changes = {"output_bias": "fixed" if "output_bias" in state else False, "one_end": same_end}
    return _imported(folder, model.model_copy(update=changes), tokenizer, state, notes, exact=True)


def _imported(
    folder: Path,
    model: ModelSettings,
    tokenizer: HubTokenizer,
    state: dict[str, Tensor],
    notes: list[str],
    *,
    labels: tuple[str, ...] | None = None,
    exact: bool = False,
) -> Imported:
    settings = Settings(
        name=folder.absolute().name,
        task=model.task,
        data=DataSettings(max_length=model.max_positions, context=model.max_positions, labels=labels),
        tokenizer=TokenizerSettings(kind="hub", vocab_size=max(tokenizer.vocab_size, 8), exact=exact),
        model=model,
    )
    return Imported(settings, Tokenizers(tokenizer, tokenizer), state, tuple(notes))


def _differing_ends(config: Mapping[str, Any], rows: Rows, names: tuple[str, str], *, origin: Path) -> list[str]:
    """Notes where config.json names other ids for the ends of a text than the vocabulary, which is followed.

    `UserError` for a value that is not an id.
    """
    notes = []
    for key, name, ours in zip(("bos_token_id", "eos_token_id"), names, (BOS, EOS), strict=True):
        value, there = config.get(key), int(rows.index[ours])
        if value is None or (type(value) is int and value in (there, _GPT2_END)):
            continue
        if type(value) is not int or not 0 <= value < rows.n_theirs:
            problem = f"{key} = {repr(value)[:40]} is not an id of the vocabulary; its {name} is {there}"
            raise UserError(f"{origin / 'config.json'}: {problem}")
        notes.append(f"{key} = {value} in config.json is not followed: {name} of the vocabulary, {there}, is used")
    return notes


def _pad_and_unknown(folder: Path, ids: Mapping[str, int], ends: tuple[str, str]) -> list[str | None]:
    """The names of padding and unknown where they are separate pieces: GPT-2 itself has neither."""
    pad, unknown = special_names(folder, {"pad_token": "", "unk_token": ""})
    has_pad, has_unknown = (piece in ids and piece not in ends for piece in (pad, unknown))
    return [pad if has_pad else None, unknown if has_unknown and unknown != pad else None]

"""GPT-2 (Radford et al. 2019) in the format of transformers: config.json, weight map, import and export.

GPT-2's matrices are stored as [in, out].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import GPTSettings
from transduce.convert import format_limits, hub_folder, parity, weight_map
from transduce.convert.folder import Imported, Outgoing, read_object, read_weights
from transduce.convert.format_limits import EXPRESSIBLE_IN_TRANSFORMERS, ConfigFormat, Expressible
from transduce.convert.weight_map import Entry, Layer, Rows, block_layers
from transduce.errors import UserError
from transduce.runs.atomic import write_json
from transduce.text.special import BOS, EOS, PAD, UNK

ARCHITECTURES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model")}

FORMAT = ConfigFormat(
    sizes={
        "n_embd": "d_model",
        "n_head": "n_heads",
        "n_layer": "n_decoder_layers",
        "n_positions": "max_positions",
        "vocab_size": None,
    },
    values={
        "resid_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "norm_eps",
    },
    activation="activation_function",
    defaults={  # GPT2Config's defaults
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    equal=(("embd_pdrop", "resid_pdrop"),),
)


EXPRESSIBLE: Expressible = {
    **EXPRESSIBLE_IN_TRANSFORMERS,
    "residual": ("pre",),
    "embedding_norm": (False,),
}

BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Ends of tensor names in older files that hold causal masks instead of weights."""

BLOCK = block_layers(
    self_attention=("attn.c_attn", "attn.c_proj", "ln_1"), feed_forward=("mlp.c_fc", "mlp.c_proj", "ln_2")
)

_DEFAULT_END = 50256  # GPT-2's own end id, which many smaller models still have in config.json


# -- config.json and weights


def model_settings(config: Mapping[str, Any], *, origin: Path) -> GPTSettings:
    """Convert a config.json to our settings; `UserError` lists everything that is not supported."""
    config = {**FORMAT.defaults, **config}
    FORMAT.check(config, origin=origin, optional_sizes=("n_inner",))
    values = FORMAT.read(config) | {
        "kind": "gpt",
        "d_ff": config.get("n_inner") or 4 * config["n_embd"],
        "residual": "pre",
        "positions": "learned",
        "scale_embeddings": False,
        "tie": "three_way" if config["tie_word_embeddings"] else "none",
        "output_bias": True,
    }
    return format_limits.model_from(GPTSettings, values, origin=origin)


def entries(s: GPTSettings, *, rows: Rows, names: Collection[str] | None = None) -> list[Entry]:
    """Return the weight map for these settings, without a bias on the logits, which transformers' GPT-2 lacks.

    `names`: tensor names in the file to read; None for a file to write.
    """
    prefix = "transformer." if names is None or any(name.startswith("transformer.") for name in names) else ""
    positions, words, head = f"{prefix}wpe.weight", f"{prefix}wte.weight", "lm_head.weight"
    tensors = [Entry("embedding.positions.embedding.weight", (positions,), (s.max_positions, s.d_model))]
    tensors += weight_map.embedding_entries(
        ["embedding.table.weight"], [words], head, rows=rows, d_model=s.d_model, tied=s.ties_output
    )
    for number in range(s.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{number}.", f"{prefix}h.{number}."
        tensors += weight_map.layer_entries(BLOCK, s, ours, theirs, transposed=True)
    return [*tensors, *weight_map.layer_entries([Layer("decoder.norm", f"{prefix}ln_f", "stream")], s)]


# -- import


def import_gpt2(folder: Path) -> Imported:
    """Read a folder with config.json, weights, and tokenizer.json, or vocab.json and merges.txt.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    config = read_object(folder / "config.json")
    model = model_settings(config, origin=folder / "config.json")
    tensors = read_weights(folder, without=BUFFERS)
    weight_map.check(tensors, entries(model, rows=Rows.of_size(config["vocab_size"]), names=tensors), origin=folder)
    begin, end = hub_folder.special_names(folder, dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>"))
    content = hub_folder.read_tokenizer(folder, list(dict.fromkeys((begin, end))))
    ids = hub_folder.ids_of(content, origin=folder)
    pad, unknown = hub_folder.special_names(folder, {"pad_token": "", "unk_token": ""})  # GPT-2 itself has neither
    pad_and_unknown = [piece if piece in ids and piece not in (begin, end) else None for piece in (pad, unknown)]
    if unknown == pad:
        pad_and_unknown[1] = None
    tokenizer, rows = hub_folder.make_vocabulary(
        content, ids, [*pad_and_unknown, begin, end], n=config["vocab_size"], origin=folder
    )
    notes = [weight_map.type_note(tensors), *_differing_ends(config, rows, (begin, end))]
    state = weight_map.read(tensors, entries(model, rows=rows, names=tensors), origin=folder)
    same_end = int(rows.index[BOS]) == int(rows.index[EOS])
    changes = {"output_bias": weight_map.complete_output_bias(state, rows), "one_end": same_end}
    return hub_folder.make_imported(model.model_copy(update=changes), tokenizer, state, notes, exact=True)


def _differing_ends(config: Mapping[str, Any], rows: Rows, names: tuple[str, str]) -> list[str]:
    """Return notes if config.json and the vocabulary name different ids for BOS and EOS; the vocabulary's are used."""
    notes = []
    for key, name, ours in zip(("bos_token_id", "eos_token_id"), names, (BOS, EOS), strict=True):
        value, there = config.get(key), int(rows.index[ours])
        if value not in (None, there, _DEFAULT_END):
            notes.append(
                f"{key} = {repr(value)[:40]} in config.json is not followed: {name} of the vocabulary, {there}, is used"
            )
    return notes


# -- export


def export_gpt2(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for GPT2LMHeadModel, compare it if transformers is installed, and return lines on the result.

    Raises `UserError` if GPT-2 does not support a setting, `TransduceError` if the outputs differ.
    """
    s = run.settings.model
    assert isinstance(s, GPTSettings)
    format_limits.check_expressible(s, EXPRESSIBLE, "transformers' GPT-2")
    rows = hub_folder.their_rows(run)
    tensors = weight_map.without_bias(run.tensors, rows, "transformers' GPT-2")
    if s.one_end:
        if int(rows.index[BOS]) != int(rows.index[EOS]):
            raise UserError("transformers' GPT-2 cannot express model.one_end = true with two pieces")
        tensors = weight_map.with_one_end(tensors)
    model, tensors = format_limits.normalize(s, tensors)
    begin, end = int(rows.index[BOS]), int(rows.index[EOS])
    generation: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    if never := [i for i in (int(rows.index[PAD]), begin) if i >= 0 and i != end]:
        generation["suppress_tokens"] = never
    write_json(out / "generation_config.json", generation)
    config = FORMAT.write(model) | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": rows.n_theirs,
        "n_inner": s.d_ff,
        "layer_norm_epsilon": s.epsilon,
        "bos_token_id": begin,
        "eos_token_id": end,
        "tie_word_embeddings": model.tie != "none",
        "dtype": "float32",
    }
    special = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
    frame = {} if run.settings.data.documents == "file" else {"single": "<s> $A", "pair": "<s> $A $B:1"}
    theirs = weight_map.write(tensors, entries(model, rows=rows))
    hub_folder.write_folder(out, run, config, theirs, special=special, frame=frame, longest=s.max_positions)
    vocabularies = {"text": (run.tokenizers.tgt, rows)}
    return [parity.compare_with_transformers(out, "GPT2LMHeadModel", vocabularies, partial(_outputs, run, rows, s))]


def _outputs(run: Outgoing, rows: Rows, s: GPTSettings, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pair of logits (transformers' model, our model)."""
    longest = min(parity.MAX_TOKENS, s.max_positions - 1)
    ids, known = parity.examples(8, run.tokenizers.n_tgt, longest=longest).tgt_in, rows.index >= 0
    ids = ids.where(known[ids], EOS)  # an imported vocabulary may lack some ids
    mask = (ids != PAD) | ~known[PAD]
    logits = theirs(input_ids=rows.index[ids], attention_mask=mask.long()).logits
    last = {row: i for i, row in enumerate(rows.index.tolist())}  # if several ids share a row, the last one is exported
    compared = torch.tensor([i for row, i in last.items() if row >= 0])
    yield logits[..., rows.index[compared]][mask], parity.logits_of(run.model, ids)[..., compared][mask]

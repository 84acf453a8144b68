"""From a folder of transformers' Marian to settings, vocabularies and weights of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import DataSettings, DecodingSettings, Settings, TokenizerSettings
from transduce.convert import marian
from transduce.convert.folder import check_model_type, read_object, read_weights
from transduce.convert.limits import check_padding, read_bytes
from transduce.convert.vocabulary import Rows, from_theirs
from transduce.convert.weight_map import check, read
from transduce.errors import RunFolderError, UserError
from transduce.text.pieces import PieceTokenizer
from transduce.text.special import BOS, EOS, PAD, UNK
from transduce.text.tokenizer import Tokenizers

OWN = "transduce"
"""The key in an exported config.json that tells what else the model was here."""


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A model from elsewhere, as a run folder needs it; `notes` for its card."""

    settings: Settings
    tokenizers: Tokenizers
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


def import_marian(folder: Path) -> Imported:
    """Read a folder with config.json, weights, source.spm, target.spm and vocab.json.

    Raises `UserError`: something is missing, damaged, contradictory or not supported; all of it where there is more.
    """
    config = read_object(folder / "config.json")
    check_model_type(folder, config, marian.ARCHITECTURES)
    model = marian.model_settings(config, origin=folder)
    told = read_object(folder / "tokenizer_config.json", optional=True)
    tensors = read_weights(folder)
    empty = torch.zeros(0, dtype=torch.long)  # sizes first: nothing is made of them before the weights bear them out
    sizes = (Rows(empty, n) for n in (config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]))
    src, tgt = sizes
    check(tensors, marian.lines(model, src=src, tgt=tgt), origin=folder, known=marian.POSITION_TABLES)
    src, tgt, tokenizers = _vocabularies(folder, config, told, separate=model.tie != "three_way")
    bias = not (src.has_null and tgt.has_null and marian.is_zero(tensors.get("final_logits_bias")))
    own = config.get(OWN)
    if isinstance(own, dict) and own.get("positions") == "sinusoidal":
        model = model.model_copy(update={"positions": "sinusoidal"})
    model = model.model_copy(update={"output_bias": bias})
    lines = marian.lines(model, src=src, tgt=tgt)
    order = marian.column_order(model.d_model) if model.positions == "sinusoidal" else None
    state = read(tensors, lines, origin=folder, known=marian.POSITION_TABLES, order=order)
    if not bias:
        del state["output_bias"]
    marian.check_positions(tensors, model, origin=folder)
    state |= {name: state[kept] for name, kept in marian.tied_names(model).items()}
    generation = read_object(folder / "generation_config.json", optional=True)
    settings = Settings(
        name=folder.absolute().name,
        data=DataSettings(
            src_lang=_language(told.get("source_lang")) or "src",
            tgt_lang=_language(told.get("target_lang")) or "tgt",
            max_length=model.max_positions,
        ),
        tokenizer=TokenizerSettings(kind="marian", vocab_size=max(tokenizers.n_src, 8), joint=model.tie == "three_way"),
        model=model,
        decoding=_decoding(config, generation, model.max_positions),
    )
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    notes = [f"weights of type {', '.join(kinds)}, kept as float32"]
    ruled_out = {config["pad_token_id"], int(tgt.index[PAD])}
    if left := _not_taken({**config, **generation}, ruled_out, end=int(tgt.index[EOS])):
        notes.append(f"not taken over, as the search here has no such rule: {', '.join(left)}")
    return Imported(settings, tokenizers, state, tuple(notes))


def _vocabularies(
    folder: Path, config: Mapping[str, Any], told: Mapping[str, Any], *, separate: bool
) -> tuple[Rows, Rows, Tokenizers]:
    """Rows and tokenizers of both sides."""
    n_src, n_tgt = config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]
    own_tgt = bool(told.get("separate_vocabs"))
    if (n_src != n_tgt or own_tgt) and not (separate and own_tgt):
        raise UserError(
            f"{folder / 'config.json'}: vocab_size {n_src}, decoder_vocab_size {n_tgt}: two vocabularies need "
            "separate_vocabs in tokenizer_config.json, and embeddings that are not shared"
        )
    sides = []
    for name, spm, n in (
        ("vocab.json", "source.spm", n_src),
        ("target_vocab.json" if own_tgt else "vocab.json", "target.spm", n_tgt),
    ):
        ids, path = read_object(folder / name), folder / name
        unk, eos = (str(told.get(key) or usual) for key, usual in (("unk_token", "<unk>"), ("eos_token", "</s>")))
        if unk not in ids or ids.get(eos) != config.get("eos_token_id"):
            raise UserError(
                f"{path}: {unk} must be there, and {eos} be {config.get('eos_token_id')}, as in config.json"
            )
        special = {UNK: ids[unk], BOS: config["pad_token_id"], EOS: ids[eos]}
        pieces, rows = from_theirs(ids, n=n, special=special, origin=path)
        check_padding(max(ids.values()) + 1, n=n, origin=path)
        try:
            sides.append((rows, PieceTokenizer(read_bytes(folder / spm), pieces)))
        except ValueError as error:
            raise RunFolderError(f"{folder / spm} is damaged: {error}") from None
    (src, src_tokenizer), (tgt, tgt_tokenizer) = sides
    return src, tgt, Tokenizers(src_tokenizer, tgt_tokenizer)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _language(told: object) -> str | None:
    """A language code, where what is told is one."""
    return told if isinstance(told, str) and re.fullmatch(r"[\w.-]{1,32}", told) else None


_IDLE: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "do_sample": (None, False),
    "num_beam_groups": (None, 1),
    "suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
}
"""Rules of their search that ours has not, and values that change nothing."""


def _not_taken(asked: Mapping[str, Any], ruled_out: set[int], *, end: int) -> list[str]:
    """Rules that the search here does not follow; `ruled_out`: ids that are never written here either."""
    idle = _IDLE | {"forced_eos_token_id": (None, end)}
    told = [f"{key} = {repr(asked[key])[:40]}" for key, values in idle.items() if asked.get(key) not in values]
    words = asked.get("bad_words_ids") or []
    if not isinstance(words, list) or any(word not in [[i] for i in ruled_out] for word in words):
        told.append(f"bad_words_ids = {repr(words)[:40]}")
    return told


def _decoding(config: Mapping[str, Any], generation: Mapping[str, Any], longest: int) -> DecodingSettings:
    """Their search as far as they say it, ours for the rest. Their length counts the token that starts the decoder."""
    asked = {key: generation.get(key, config.get(key)) for key in ("num_beams", "length_penalty", "max_length")}
    told = [f"{key} = {repr(value)[:40]} is no number" for key, value in asked.items() if not _is_number(value)]
    told += [
        f"{key} = {repr(asked[key])[:40]}; at least 1 is needed"
        for key in ("num_beams", "max_length")
        if not told and asked[key] is not None and not asked[key] >= 1
    ]
    if told:
        raise UserError(f"generation_config.json or config.json: {'; '.join(told)}")
    usual = DecodingSettings()
    values = {
        "beam": asked["num_beams"] or usual.beam,
        "length_penalty": usual.length_penalty if asked["length_penalty"] is None else asked["length_penalty"],
        "max_length": max(1, min(asked["max_length"] or usual.max_length + 1, longest) - 1),
    }
    return Settings.from_mapping({"decoding": values}, origin="generation_config.json").decoding

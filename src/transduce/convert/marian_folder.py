"""Import and export of translators as a folder for transformers' MarianMTModel and MarianTokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.config.decoding import DecodingSettings
from transduce.config.settings import DataSettings, Settings, TokenizerSettings
from transduce.convert import marian, parity
from transduce.convert.folder import Imported, Outgoing, check_model_type, read_bytes, read_object, read_weights
from transduce.convert.format_limits import check_expressible
from transduce.convert.weight_map import NEVER, Rows, check, read, rows_of, type_note, write
from transduce.errors import RunFolderError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.special import BOS, EOS, PAD, SPECIAL_PIECES
from transduce.text.tokenizer import PieceTokenizer, Tokenizers

_OWN = "transduce"
"""The key in an exported config.json for what only we read: the kind of positions."""

_SPECIAL = {"unk_token": "<unk>", "eos_token": "</s>"}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "do_sample": (None, False),
    "num_beam_groups": (None, 1),
    "suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
}
"""Rules of their search that ours does not have, and the values with which they have no effect."""


# -- import


def import_marian(folder: Path) -> Imported:
    """Read a folder with config.json, weights, source.spm, target.spm and vocab.json.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    config = read_object(folder / "config.json")
    check_model_type(folder, config, marian.ARCHITECTURES)
    model = marian.model_settings(config, origin=folder)
    tokenizer_config = read_object(folder / "tokenizer_config.json", optional=True)
    tensors = read_weights(folder, without=marian.BUFFERS)
    n_src, n_tgt = config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]
    sizes = marian.entries(model, src=Rows.of_size(n_src), tgt=Rows.of_size(n_tgt))
    check(tensors, sizes, origin=folder)  # before anything of these sizes is allocated
    src, tgt, tokenizers = _read_vocabularies(folder, config, tokenizer_config, separate=model.tie != "three_way")
    match config.get(_OWN):
        case {"positions": "sinusoidal"}:
            model = model.model_copy(update={"positions": "sinusoidal"})
    order = marian.column_order(model)
    state = read(tensors, marian.entries(model, src=src, tgt=tgt), origin=folder, order=order)
    if min(int(src.index[PAD]), int(tgt.index[PAD])) >= 0 and not bool(tensors["final_logits_bias"].any()):
        del state["output_bias"]
    model = model.model_copy(update={"output_bias": "output_bias" in state})
    generation = read_object(folder / "generation_config.json", optional=True)
    settings = Settings(
        data=DataSettings(
            src_lang=_language(tokenizer_config.get("source_lang")) or "src",
            tgt_lang=_language(tokenizer_config.get("target_lang")) or "tgt",
            max_length=model.max_positions,
        ),
        tokenizer=TokenizerSettings(kind="marian", vocab_size=max(tokenizers.n_src, 8), joint=model.tie == "three_way"),
        model=model,
        decoding=_decoding(config, generation, model.max_positions),
    )
    notes = [type_note(tensors)]
    if ignored := _ignored_rules({**config, **generation}, {config["pad_token_id"], int(tgt.index[PAD])}, tgt):
        notes.append(f"not taken over, as the search here has no such rule: {', '.join(ignored)}")
    return Imported(settings, tokenizers, state, tuple(notes))


def _read_vocabularies(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], *, separate: bool
) -> tuple[Rows, Rows, Tokenizers]:
    """Rows and tokenizers of both sides, from their lists of ids and their SentencePiece models."""
    n_src, n_tgt = config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]
    two = bool(tokenizer_config.get("separate_vocabs"))
    if (n_src != n_tgt or two) and not (separate and two):
        raise UserError(
            f"{folder / 'config.json'}: vocab_size {n_src}, decoder_vocab_size {n_tgt}: two vocabularies need "
            "separate_vocabs in tokenizer_config.json, and embeddings that are not shared"
        )
    unk, eos = (str(tokenizer_config.get(key) or default) for key, default in _SPECIAL.items())
    sides = []
    tgt_name = "target_vocab.json" if two else "vocab.json"
    for name, spm, n in (("vocab.json", "source.spm", n_src), (tgt_name, "target.spm", n_tgt)):
        path, ids, eos_id = folder / name, read_object(folder / name), config.get("eos_token_id")
        if unk not in ids or ids.get(eos) != eos_id:
            raise UserError(f"{path}: needs {unk}, and {eos} with id {eos_id} as in config.json")
        special = ids[unk], config["pad_token_id"], ids[eos]
        if len(set(special)) < len(special) or not all(0 <= i < n for i in special):
            raise UserError(f"{path}: unknown, pad and end of sentence need three ids within 0 .. {n - 1}: {special}")
        rows = rows_of(ids, [ids.get(marian.NULL, -1), *special], n=n, origin=path)
        pieces = {i: piece for piece, i in ids.items()}
        others = [pieces.get(i, f"<unnamed {i}>") for i in rows.index[len(SPECIAL_PIECES) :].tolist()]
        try:
            sides.append((rows, PieceTokenizer(read_bytes(folder / spm), [*SPECIAL_PIECES, *others])))
        except ValueError as error:
            raise RunFolderError(f"{folder / spm} is damaged: {error}") from None
    (src, src_tokenizer), (tgt, tgt_tokenizer) = sides
    return src, tgt, Tokenizers(src_tokenizer, tgt_tokenizer)


def _language(value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[\w.-]{1,32}", value) else None


def _ignored_rules(asked: Mapping[str, Any], never_generated: set[int], tgt: Rows) -> list[str]:
    """Rules of their search that ours does not follow. `never_generated`: ids that ours does not generate either."""
    neutral = _NEUTRAL | {"forced_eos_token_id": (None, int(tgt.index[EOS]))}
    found = [f"{key} = {repr(asked[key])[:40]}" for key, values in neutral.items() if asked.get(key) not in values]
    words = asked.get("bad_words_ids") or []
    if not isinstance(words, list) or any(word not in [[i] for i in never_generated] for word in words):
        found.append(f"bad_words_ids = {repr(words)[:40]}")
    return found


def _decoding(config: Mapping[str, Any], generation: Mapping[str, Any], longest: int) -> DecodingSettings:
    """Their search settings, and our defaults for the rest. Their max_length counts the decoder's start token."""
    keys = {
        "num_beams": "beam",
        "length_penalty": "length_penalty",
        "max_length": "max_length",
        "no_repeat_ngram_size": "no_repeat_ngram",
    }
    found = {}
    for key, ours in keys.items():
        if (value := generation.get(key, config.get(key))) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"generation_config.json or config.json: {key} = {repr(value)[:40]} is not a number")
        if key in ("num_beams", "max_length") and not value >= 1:
            raise UserError(f"generation_config.json or config.json: {key} = {value}; at least 1 is needed")
        found[ours] = value
    found["max_length"] = max(1, min(found.get("max_length", DecodingSettings().max_length + 1), longest) - 1)
    return Settings.from_mapping({"decoding": found}, origin="generation_config.json").decoding


# -- export


def export_marian(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, compare it with the model if transformers is installed, and return lines on the result.

    Raises `UserError` where Marian's architecture lacks one of the settings, `TransduceError` where the models differ.
    """
    settings, s = run.settings, run.settings.model
    assert isinstance(s, TransformerSettings)
    check_expressible(s, marian.EXPRESSIBLE, "transformers' Marian")
    src_pieces, tgt_pieces = (side.pieces(range(side.vocab_size)) for side in (run.tokenizers.src, run.tokenizers.tgt))
    shared, keep_null = src_pieces == tgt_pieces, not _pad_is_unused(run.tensors)
    (src_ids, src), (tgt_ids, tgt) = (
        marian.ids_and_rows(pieces, keep_null=keep_null, pad_last=shared) for pieces in (src_pieces, tgt_pieces)
    )
    pad, null, decoding = int(tgt.index[BOS]), int(tgt.index[PAD]), settings.decoding
    config = marian.config_of(s, n_src=src.n_theirs, n_tgt=tgt.n_theirs, pad=pad) | {_OWN: {"positions": s.positions}}
    generation_config = {
        "decoder_start_token_id": pad,
        "pad_token_id": pad,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "bad_words_ids": [[pad]] if null < 0 else [[pad], [null]],
        "num_beams": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        "max_length": min(decoding.max_length + 1, s.max_positions),  # with the decoder's start token
    }
    tokenizer_config = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": settings.data.src_lang,
        "target_lang": settings.data.tgt_lang,
        "model_max_length": s.max_positions,
        "separate_vocabs": not shared,
        **_SPECIAL,
        "pad_token": "<pad>",
    }
    files = {"config": config, "generation_config": generation_config, "tokenizer_config": tokenizer_config}
    files |= {"vocab": src_ids} | ({} if shared else {"target_vocab": tgt_ids})
    for name, content in files.items():
        write_json(out / f"{name}.json", content)
    theirs = write(run.tensors, marian.entries(s, src=src, tgt=tgt), order=marian.column_order(s))
    write_tensors(out / "model.safetensors", theirs)
    (out / "source.spm").write_bytes(run.tokenizers.src.model)
    (out / "target.spm").write_bytes(run.tokenizers.tgt.model)
    write_text(out / "README.md", _card(settings))
    vocabularies = {"text": (run.tokenizers.src, src), "text_target": (run.tokenizers.tgt, tgt)}
    return [parity.compare_with_transformers(out, "MarianMTModel", vocabularies, partial(_outputs, run, src, tgt))]


def _pad_is_unused(tensors: Mapping[str, Tensor]) -> bool:
    """Whether our PAD has zero vectors and is never generated, so that its row can be left out."""
    bias = tensors.get("output_bias")
    tables = (tensors[f"{name}.weight"] for name in ("src_embedding.table", "tgt_embedding.table", "output_embedding"))
    return bias is not None and float(bias[PAD]) == NEVER and not any(bool(table[PAD].any()) for table in tables)


def _card(settings: Settings) -> str:
    src, tgt = settings.data.src_lang, settings.data.tgt_lang
    return (
        f"# {settings.name or 'A translator'}\n\nFrom `{src}` to `{tgt}`, exported by transduce.\n\n```python\n"
        "from transformers import MarianMTModel, MarianTokenizer\n\n"
        'tokenizer, model = MarianTokenizer.from_pretrained("THIS"), MarianMTModel.from_pretrained("THIS")\n'
        'found = model.generate(**tokenizer(["..."], return_tensors="pt", padding=True))\n'
        "print(tokenizer.batch_decode(found, skip_special_tokens=True))\n```\n\n"
        "The decoder starts from the vector of `<pad>`, which need not be zero. CTranslate2's converter for Marian "
        "models assumes that it is: export the run as a CTranslate2 model instead.\n"
        f"`{marian.NULL}` in the vocabulary is a row that is never generated.\n"
    )


def _outputs(run: Outgoing, src: Rows, tgt: Rows, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits of their model and of ours."""
    longest = min(parity.MAX_TOKENS, theirs.config.max_position_embeddings - 1)
    batch = parity.examples(run.tokenizers.n_src, run.tokenizers.n_tgt, longest=longest)
    pad = int(tgt.index[BOS])

    def their_ids(ids: Tensor, rows: Rows) -> Tensor:
        return rows.index[ids].masked_fill(ids == PAD, pad)

    found = theirs(
        input_ids=their_ids(batch.src, src),
        attention_mask=(batch.src != PAD).long(),
        decoder_input_ids=their_ids(batch.tgt_in, tgt),
    ).logits
    exists, real = tgt.index >= 0, batch.tgt_out != PAD
    yield found[real][:, tgt.index[exists]], parity.logits_of(run.model, batch.src, batch.tgt_in)[real][:, exists]

"""A translator as a folder that transformers' MarianMTModel and MarianTokenizer load, without code of ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import Settings, TransformerSettings
from transduce.convert import marian
from transduce.convert.check import LONGEST, TEXTS, Check, compare, examples, logits_of, settle
from transduce.convert.importing import OWN
from transduce.convert.requirements import inexpressible
from transduce.convert.vocabulary import NEVER, NULL, Rows, to_theirs
from transduce.convert.weight_map import write
from transduce.errors import TransduceError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.special import BOS, PAD, UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A run on its way to another program: `model`, in eval mode, has these settings and tensors."""

    settings: Settings
    tokenizers: Tokenizers
    tensors: Mapping[str, Tensor]
    model: Any  # of any kind that the MODELS table knows
    quantization: str | None = None


def export_marian(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, check it against the model where transformers is there, and tell what was found.

    Raises `UserError` where Marian's architecture lacks one of the settings, `TransduceError` where the check fails.
    """
    settings, tokenizers, tensors = run.settings, run.tokenizers, run.tensors
    s = settings.model
    assert isinstance(s, TransformerSettings)
    if lacking := inexpressible(s, marian.NEEDED):
        raise UserError(
            f"transformers' Marian cannot express {', '.join(lacking)}; --to onnx takes it, --to ctranslate2 most such "
            "models; or train with what is there"
        )
    src_pieces, tgt_pieces = (side.pieces(range(side.vocab_size)) for side in (tokenizers.src, tokenizers.tgt))
    shared = src_pieces == tgt_pieces
    keep_null = not _null_is_idle(tensors)
    (src_ids, src), (tgt_ids, tgt) = (
        to_theirs(pieces, keep_null=keep_null, pad_last=shared) for pieces in (src_pieces, tgt_pieces)
    )
    pad = int(tgt.index[BOS])
    out.mkdir()
    halved = s.positions == "sinusoidal_halves"
    config = marian.config_of(s, n_src=src.n_theirs, n_tgt=tgt.n_theirs, pad=pad) | {OWN: {"positions": s.positions}}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", _generation(settings, pad, int(tgt.index[PAD])))
    own = {name: tensor for name, tensor in tensors.items() if name not in marian.tied_names(s)}
    lines = marian.lines(s, src=src, tgt=tgt, output_bias=bool(s.output_bias))
    theirs = write(own, lines, order=None if halved else marian.column_order(s.d_model))
    theirs.setdefault("final_logits_bias", torch.zeros(1, tgt.n_theirs))
    write_tensors(out / "model.safetensors", theirs)
    _write_tokenizer(out, settings, tokenizers, src_ids, None if shared else tgt_ids)
    write_text(out / "README.md", _card(settings))
    return [_check(out, run.model, tokenizers, src, tgt).line()]


def _null_is_idle(tensors: Mapping[str, Tensor]) -> bool:
    """Whether our PAD has nothing of its own: its rows are zero, and its logit is ruled out."""
    bias = tensors.get("output_bias")
    tables = (tensors[f"{name}.weight"] for name in ("src_embedding.table", "tgt_embedding.table", "output_embedding"))
    return bias is not None and float(bias[PAD]) == NEVER and not any(bool(table[PAD].any()) for table in tables)


def _generation(settings: Settings, pad: int, null: int) -> dict[str, Any]:
    """generation_config.json; a length counts the token that starts the decoder."""
    decoding = settings.decoding
    return {
        "decoder_start_token_id": pad,
        "pad_token_id": pad,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "bad_words_ids": [[pad]] if null < 0 else [[pad], [null]],
        "num_beams": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "max_length": min(decoding.max_length + 1, settings.model.max_positions),
    }


def _write_tokenizer(
    out: Path, settings: Settings, tokenizers: Tokenizers, src_ids: dict[str, int], tgt_ids: dict[str, int] | None
) -> None:
    for name, side in (("source.spm", tokenizers.src), ("target.spm", tokenizers.tgt)):
        (out / name).write_bytes(side.model)
    write_json(out / "vocab.json", src_ids)
    if tgt_ids is not None:
        write_json(out / "target_vocab.json", tgt_ids)
    config = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": settings.data.src_lang,
        "target_lang": settings.data.tgt_lang,
        "model_max_length": settings.model.max_positions,
        "separate_vocabs": tgt_ids is not None,
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    write_json(out / "tokenizer_config.json", config)


def _card(settings: Settings) -> str:
    src, tgt = settings.data.src_lang, settings.data.tgt_lang
    return (
        f"# {settings.name or 'A translator'}\n\nFrom `{src}` to `{tgt}`, exported by transduce.\n\n```python\n"
        "from transformers import MarianMTModel, MarianTokenizer\n\n"
        'tokenizer, model = MarianTokenizer.from_pretrained("THIS"), MarianMTModel.from_pretrained("THIS")\n'
        'found = model.generate(**tokenizer(["..."], return_tensors="pt", padding=True))\n'
        "print(tokenizer.batch_decode(found, skip_special_tokens=True))\n```\n\n"
        "Its decoder starts from the vector of `<pad>`, which need not be zero. CTranslate2's own converter for Marian "
        "takes it for zero: use `transduce export RUN --to ctranslate2 OUT` instead.\n"
        f"`{NULL}` in the vocabulary is a row that is never written.\n"
    )


def _check(out: Path, model: Any, tokenizers: Tokenizers, src: Rows, tgt: Rows) -> Check:
    """Logits and token ids of transformers beside ours."""
    try:
        import transformers
    except ImportError:
        return Check("transformers is not installed; pip install transformers, and export again")
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.MarianMTModel.from_pretrained(out, local_files_only=True).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sacremoses")  # it is loaded there, and never used
        tokenizer = transformers.MarianTokenizer.from_pretrained(out, local_files_only=True)
    for name, side, rows in (("text", tokenizers.src, src), ("text_target", tokenizers.tgt, tgt)):
        _check_tokenizer(tokenizer, name, side, rows)
    longest = theirs.config.max_position_embeddings - 1
    batch = examples(tokenizers.n_src, tokenizers.n_tgt, longest=min(LONGEST, longest))
    pad = int(tgt.index[BOS])

    def moved(ids: Tensor, rows: Rows) -> Tensor:
        return rows.index[ids].masked_fill(ids == PAD, pad)

    with torch.no_grad():
        found = theirs(
            input_ids=moved(batch.src, src),
            attention_mask=(batch.src != PAD).long(),
            decoder_input_ids=moved(batch.tgt_in, tgt),
        ).logits
    there, real = tgt.index >= 0, batch.tgt_out != PAD
    difference = compare(found[real][:, tgt.index[there]], logits_of(model, batch)[real][:, there])
    return settle(f"logits of transformers {transformers.__version__}", difference)


def _check_tokenizer(tokenizer: Any, name: str, side: Vocabulary, rows: Rows) -> None:
    for text in TEXTS:
        given = {"text": None, name: text} if name != "text" else {"text": text}
        found = tokenizer(**given, add_special_tokens=False)["input_ids"]
        if found != rows.index[torch.tensor(side.encode(text), dtype=torch.long)].tolist():
            raise TransduceError(f"the exported tokenizer is not the same: it cuts {text!r} otherwise ({UNK=})")

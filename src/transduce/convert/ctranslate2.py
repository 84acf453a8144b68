"""Export of translators to CTranslate2, through its model specifications.

Its converter for Marian models is not used, as it starts the decoder from a zero vector.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import TransformerSettings
from transduce.convert.base import Outgoing
from transduce.convert.normalize import position_table
from transduce.convert.parity import MAX_TOKENS, compare_all, examples, logits_of, settle
from transduce.convert.requirements import ONE_HEAD_COUNT, Expressible, inexpressible
from transduce.convert.weight_map import NEVER
from transduce.errors import UserError
from transduce.nn.block import norm_eps
from transduce.text.special import BOS, PAD
from transduce.text.tokenizer import Tokenizers

QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")

_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
EXPRESSIBLE: Expressible = {
    "positions": ("sinusoidal", "sinusoidal_halves", "learned", "none"),
    "feed_forward": ("plain", "gated"),
    "activation": tuple(_ACTIVATIONS),
    "projection": ("full",),
    "n_kv_heads": ONE_HEAD_COUNT,
}


def export_ctranslate2(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, compare it with the model, and return lines that report the result.

    The comparison is made in float32. With quantization a second line reports how far the log-probabilities move.
    Raises `UserError` where CTranslate2 is not installed or lacks one of the settings.
    """
    s, tokenizers, tensors, quantization = run.settings.model, run.tokenizers, run.tensors, run.quantization
    assert isinstance(s, TransformerSettings)
    if lacking := inexpressible(s, EXPRESSIBLE):
        raise UserError(f"CTranslate2 cannot express {', '.join(lacking)}")
    try:
        import ctranslate2
    except ImportError:
        raise UserError("ctranslate2 is not installed: pip install ctranslate2") from None
    spec = _spec(s, tokenizers, tensors)
    _save(spec, out, None)
    what = f"log-probabilities of ctranslate2 {ctranslate2.__version__}"
    lines = [settle(f"{what}, float32", compare_all(_log_probs(out, run.model, tokenizers, s))).line()]
    if quantization not in (None, "float32"):
        shutil.rmtree(out)
        _save(_spec(s, tokenizers, tensors), out, quantization)
        found = _log_probs(out, run.model, tokenizers, s)
        moved = torch.cat([(theirs - ours)[ours > NEVER / 2].abs() for theirs, ours in found])
        lines.append(
            f"{quantization} moves log-probabilities by {moved.mean():.4f} on average, {moved.max():.4f} at most"
        )
    for name, side in (("source.spm", tokenizers.src), ("target.spm", tokenizers.tgt)):
        (out / name).write_bytes(side.model)
    return lines


def _save(spec: Any, out: Path, quantization: str | None) -> None:
    out.mkdir()
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(out))


def _spec(s: TransformerSettings, tokenizers: Tokenizers, tensors: Mapping[str, Tensor]) -> Any:
    """The model's specification with its weights."""
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerSpec.from_config(
        (s.n_encoder_layers, s.n_decoder_layers),
        s.n_heads,
        pre_norm=s.residual == "pre",
        activation=getattr(common_spec.Activation, _ACTIVATIONS[s.activation]),
        layernorm_embedding=s.embedding_norm,
        ffn_glu=s.feed_forward == "gated",
        rms_norm=s.norm == "rms",
    )
    # copies, as quantization changes them in place
    arrays = {name: tensor.detach().cpu().float().clone().numpy() for name, tensor in tensors.items()}
    for side, stack, embedding in (
        ("encoder", spec.encoder, spec.encoder.embeddings[0]),
        ("decoder", spec.decoder, spec.decoder.embeddings),
    ):
        name = "src_embedding" if side == "encoder" else "tgt_embedding"
        embedding.weight = arrays[f"{name}.table.weight"]
        stack.scale_embeddings = s.d_model**0.5 if s.scale_embeddings else 1.0
        stack.position_encodings.encodings = _positions(s, tensors, name)
        if s.embedding_norm:
            _norm(stack.layernorm_embedding, arrays, f"{name}.norm")
        if s.residual == "pre":
            _norm(stack.layer_norm, arrays, f"{side}.norm")
        for number, layer in enumerate(stack.layer):
            _layer(layer, arrays, f"{side}.blocks.{number}", gated=s.feed_forward == "gated")
    spec.decoder.projection.weight = arrays["output_embedding.weight"]
    bias = tensors["output_bias"].detach().cpu().float().clone() if s.output_bias else torch.zeros(tokenizers.n_tgt)
    bias[[PAD, BOS]] = NEVER  # never generated
    spec.decoder.projection.bias = bias.numpy()
    _vocabularies(spec, tokenizers, s)
    return spec


def _vocabularies(spec: Any, tokenizers: Tokenizers, s: TransformerSettings) -> None:
    pieces = [side.pieces(range(side.vocab_size)) for side in (tokenizers.src, tokenizers.tgt)]
    if any(len(set(side)) < len(side) for side in pieces):
        raise UserError("the vocabulary contains a piece twice, which CTranslate2 does not support")
    spec.register_source_vocabulary(pieces[0])
    spec.register_target_vocabulary(pieces[1])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = "<unk>", "<s>", "</s>"
    spec.config.decoder_start_token = "<s>"
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = norm_eps(s.norm, s.norm_eps)


def _positions(s: TransformerSettings, tensors: Mapping[str, Tensor], name: str) -> Any:
    if s.positions == "learned":
        return tensors[f"{name}.positions.embedding.weight"].detach().cpu().float().numpy()
    return position_table(s).numpy()


def _layer(layer: Any, arrays: Mapping[str, Any], at: str, *, gated: bool) -> None:
    attention = f"{at}.self_attention"
    _linear(layer.self_attention.linear[0], arrays, f"{attention}.query_key_value")
    _linear(layer.self_attention.linear[1], arrays, f"{attention}.output")
    _norm(layer.self_attention.layer_norm, arrays, f"{attention}_residual.norm")
    if at.startswith("decoder"):
        for place, part in enumerate(("query", "key_value", "output")):
            _linear(layer.attention.linear[place], arrays, f"{at}.cross_attention.{part}")
        _norm(layer.attention.layer_norm, arrays, f"{at}.cross_attention_residual.norm")
    expand = f"{at}.feed_forward.expand"
    if gated:  # the gate's rows come first
        half = len(arrays[f"{expand}.weight"]) // 2
        _linear(layer.ffn.linear_0, arrays, expand, slice(None, half))
        _linear(layer.ffn.linear_0_noact, arrays, expand, slice(half, None))
    else:
        _linear(layer.ffn.linear_0, arrays, expand)
    _linear(layer.ffn.linear_1, arrays, f"{at}.feed_forward.contract")
    _norm(layer.ffn.layer_norm, arrays, f"{at}.feed_forward_residual.norm")


def _linear(spec: Any, arrays: Mapping[str, Any], name: str, rows: slice = slice(None)) -> None:
    spec.weight = arrays[f"{name}.weight"][rows]
    if f"{name}.bias" in arrays:
        spec.bias = arrays[f"{name}.bias"][rows]


def _norm(spec: Any, arrays: Mapping[str, Any], name: str) -> None:
    spec.gamma = arrays[f"{name}.weight"]
    if "beta" in vars(spec):
        spec.beta = arrays.get(f"{name}.bias", 0 * spec.gamma)


def _log_probs(out: Path, model: Any, tokenizers: Tokenizers, s: TransformerSettings) -> list[tuple[Tensor, Tensor]]:
    """Pairs of their and our log-probabilities of each token of random targets, sentence by sentence."""
    import ctranslate2

    engine = ctranslate2.Translator(str(out), device="cpu", compute_type="default", inter_threads=1, intra_threads=1)
    batch = examples(tokenizers.n_src, tokenizers.n_tgt, longest=min(MAX_TOKENS, s.max_positions - 1))
    logits = logits_of(model, batch.src, batch.tgt_in)
    logits[..., [PAD, BOS]] = NEVER
    expected = logits.log_softmax(-1).gather(-1, batch.tgt_out[..., None])[..., 0]
    src = [[i for i in row if i != PAD][:-1] for row in batch.src.tolist()]
    tgt = [[i for i in row if i not in (PAD, BOS)] for row in batch.tgt_in.tolist()]
    found = engine.score_batch([tokenizers.src.pieces(ids) for ids in src], [tokenizers.tgt.pieces(ids) for ids in tgt])
    theirs = [torch.tensor(score.log_probs) for score in found]
    return [(row, ours[: len(row)]) for row, ours in zip(theirs, expected, strict=True)]

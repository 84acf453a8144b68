"""Export of translators to CTranslate2, through its model specifications.

Its converter for Marian models is not used, as it starts the decoder from a zero vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.convert.folder import Outgoing
from transduce.convert.format_limits import Expressible, check_expressible, position_table
from transduce.convert.parity import MAX_TOKENS, compare, examples, logits_of, settle
from transduce.convert.weight_map import NEVER
from transduce.errors import UserError
from transduce.text.special import BOS, PAD
from transduce.text.tokenizer import Tokenizers

QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")

_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
EXPRESSIBLE: Expressible = {
    "positions": ("sinusoidal", "sinusoidal_halves", "learned", "none"),
    "feed_forward": ("plain", "gated"),
    "activation": tuple(_ACTIVATIONS),
}


def export_ctranslate2(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, compare it with the model, and return lines that report the result.

    The comparison is made in float32. With quantization a second line reports how far the log-probabilities move.
    Raises `UserError` where CTranslate2 is not installed or lacks one of the settings.
    """
    s, tokenizers = run.settings.model, run.tokenizers
    assert isinstance(s, TransformerSettings)
    check_expressible(s, EXPRESSIBLE, "CTranslate2")
    try:
        import ctranslate2
    except ImportError:
        raise UserError("ctranslate2 is not installed: pip install ctranslate2") from None

    def log_probs(quantization: str | None) -> list[tuple[Tensor, Tensor]]:
        spec = _spec(s, tokenizers, run.tensors)
        spec.validate()
        spec.optimize(quantization=quantization)
        spec.save(str(out))
        return _log_probs(out, run.model, tokenizers, s)

    what = f"log-probabilities of ctranslate2 {ctranslate2.__version__}"
    lines = [settle(f"{what}, float32", compare(log_probs(None)))]
    if run.quantization not in (None, "float32"):
        moved = torch.cat([(theirs - ours)[ours > NEVER / 2].abs() for theirs, ours in log_probs(run.quantization)])
        lines.append(
            f"{run.quantization} moves log-probabilities by {moved.mean():.4f} on average, {moved.max():.4f} at most"
        )
    for name, side in (("source.spm", tokenizers.src), ("target.spm", tokenizers.tgt)):
        (out / name).write_bytes(side.model)
    return lines


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
    for side, stack, name in (("encoder", spec.encoder, "src_embedding"), ("decoder", spec.decoder, "tgt_embedding")):
        embeddings = stack.embeddings[0] if side == "encoder" else stack.embeddings
        embeddings.weight = arrays[f"{name}.table.weight"]
        stack.scale_embeddings = s.d_model**0.5 if s.scale_embeddings else 1.0
        learned = arrays.get(f"{name}.positions.embedding.weight")
        stack.position_encodings.encodings = position_table(s).numpy() if learned is None else learned
        if s.embedding_norm:
            _fill(stack.layernorm_embedding, arrays, f"{name}.norm")
        if s.residual == "pre":
            _fill(stack.layer_norm, arrays, f"{side}.norm")
        for number, layer in enumerate(stack.layer):
            _fill_layer(layer, arrays, f"{side}.blocks.{number}", gated=s.feed_forward == "gated")
    spec.decoder.projection.weight = arrays["output_embedding.weight"]
    bias = tensors["output_bias"].detach().cpu().float().clone() if s.output_bias else torch.zeros(tokenizers.n_tgt)
    bias[[PAD, BOS]] = NEVER  # never generated
    spec.decoder.projection.bias = bias.numpy()
    pieces = [side.pieces(range(side.vocab_size)) for side in (tokenizers.src, tokenizers.tgt)]
    if any(len(set(side)) < len(side) for side in pieces):
        raise UserError("the vocabulary contains a piece twice, which CTranslate2 does not support")
    spec.register_source_vocabulary(pieces[0])
    spec.register_target_vocabulary(pieces[1])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = "<unk>", "<s>", "</s>"
    spec.config.decoder_start_token = "<s>"
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = s.epsilon
    return spec


def _fill_layer(layer: Any, arrays: Mapping[str, Any], at: str, *, gated: bool) -> None:
    parts = {
        "self_attention.query_key_value": layer.self_attention.linear[0],
        "self_attention.output": layer.self_attention.linear[1],
        "self_attention_residual.norm": layer.self_attention.layer_norm,
        "feed_forward.contract": layer.ffn.linear_1,
        "feed_forward_residual.norm": layer.ffn.layer_norm,
    }
    if at.startswith("decoder"):
        cross = dict(zip(("query", "key_value", "output"), layer.attention.linear, strict=True))
        parts |= {f"cross_attention.{name}": part for name, part in cross.items()}
        parts["cross_attention_residual.norm"] = layer.attention.layer_norm
    for name, part in parts.items():
        _fill(part, arrays, f"{at}.{name}")
    expand = f"{at}.feed_forward.expand"
    half = len(arrays[f"{expand}.weight"]) // 2 if gated else None  # the gate's rows come first
    _fill(layer.ffn.linear_0, arrays, expand, slice(half))
    if gated:
        _fill(layer.ffn.linear_0_noact, arrays, expand, slice(half, None))


def _fill(spec: Any, arrays: Mapping[str, Any], name: str, rows: slice = slice(None)) -> None:
    """Set weight and bias of a linear layer or a norm."""
    weight, bias = arrays[f"{name}.weight"][rows], arrays.get(f"{name}.bias")
    if "gamma" not in vars(spec):
        spec.weight = weight
        if bias is not None:
            spec.bias = bias[rows]
        return
    spec.gamma = weight
    if "beta" in vars(spec):
        spec.beta = 0 * weight if bias is None else bias


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

"""Which parameter of PyTorch's layers corresponds to which of ours."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


def attention_pairs(ours: nn.Module, theirs: nn.MultiheadAttention) -> Iterator[Pair]:
    """(our parameter, the corresponding part of theirs)."""
    if hasattr(ours, "query_key_value"):
        yield ours.query_key_value.weight, theirs.in_proj_weight
        yield ours.query_key_value.bias, theirs.in_proj_bias
    else:
        d_model = theirs.embed_dim
        yield ours.query.weight, theirs.in_proj_weight[:d_model]
        yield ours.query.bias, theirs.in_proj_bias[:d_model]
        yield ours.key_value.weight, theirs.in_proj_weight[d_model:]
        yield ours.key_value.bias, theirs.in_proj_bias[d_model:]
    yield from module_pairs(ours.output, theirs.out_proj)


def module_pairs(ours: nn.Module, theirs: nn.Module) -> Iterator[Pair]:
    """Pairs of two modules with the same parameter names."""
    for (name, mine), (other, yours) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        yield mine, yours


def block_pairs(ours: nn.Module, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Iterator[Pair]:
    """Pairs of an encoder's or a decoder's block."""
    yield from attention_pairs(ours.self_attention, theirs.self_attn)
    yield from module_pairs(ours.self_attention_residual.norm, theirs.norm1)
    last_norm = theirs.norm2
    if isinstance(theirs, nn.TransformerDecoderLayer):
        yield from attention_pairs(ours.cross_attention, theirs.multihead_attn)
        yield from module_pairs(ours.cross_attention_residual.norm, theirs.norm2)
        last_norm = theirs.norm3
    yield from module_pairs(ours.feed_forward_residual.norm, last_norm)
    yield from module_pairs(ours.feed_forward.expand, theirs.linear1)
    yield from module_pairs(ours.feed_forward.contract, theirs.linear2)


def transformer_pairs(ours: nn.Module, theirs: nn.Transformer) -> Iterator[Pair]:
    """Pairs of the two stacks; embeddings are not PyTorch's."""
    for mine, yours in zip(
        [*ours.encoder.blocks, *ours.decoder.blocks], [*theirs.encoder.layers, *theirs.decoder.layers], strict=True
    ):
        yield from block_pairs(mine, yours)
    for mine, yours in ((ours.encoder.norm, theirs.encoder.norm), (ours.decoder.norm, theirs.decoder.norm)):
        if yours is not None:
            yield from module_pairs(mine, yours)


def copy(pairs: Iterator[Pair]) -> None:
    """Copy their weights into ours."""
    with torch.no_grad():
        for mine, yours in pairs:
            yours.copy_(mine)

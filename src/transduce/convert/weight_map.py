"""Weight maps for import and export: for each of our tensors, names and shapes of another program's tensors.

A family of models writes its layers as a table of `Layer`s. No tensor is ignored silently: everything missing,
unexpected, of the wrong shape or contradictory is listed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.config.model import AttentionSettings
from transduce.errors import UserError, listed
from transduce.text.special import BOS, EOS

Shape = tuple[int, ...]

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Supported types of weights. Eight-bit formats need separate scales, which are not read."""


NEVER = -1e4
"""The bias on the logit of an id that exists only in one of two vocabularies."""


BY_PIECE = {
    "embedding.table.weight",
    "src_embedding.table.weight",
    "tgt_embedding.table.weight",
    "output_embedding.weight",
    "output_bias",
}
"""Our tensors that have a row for each piece of a vocabulary."""

TIES = {(True, True): "three_way", (False, True): "two_way", (True, False): "inputs", (False, False): "none"}
"""`model.tie`, by whether source and target share an embedding, and whether the output shares the target's."""

SIDES = {"encoder": "src_embedding", "decoder": "tgt_embedding"}
"""The embedding module of each stack of a translator."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """For each of our ids, the row in another program's embedding (-1: none); and that embedding's number of rows."""

    index: Int[Tensor, " V"]
    n_theirs: int

    @classmethod
    def of_size(cls, n: int) -> Rows:
        """Make `Rows` that only have a size, for checking shapes before the vocabulary is read."""
        return cls(torch.zeros(0, dtype=torch.long), n)


def rows_of(ids: Mapping[str, int], special: Sequence[int], *, n: int, origin: object, spare: int = 0) -> Rows:
    """Map our ids to rows of an imported embedding.

    `ids`: the id of each piece in the imported vocabulary. `special`: the imported id of each of our special pieces, -1
    if the vocabulary has none. n: number of rows of the imported embedding. Rows without a piece are kept; there may be
    at most `spare` of them, or 127 if n is a multiple of 8. Raises `UserError` if there are more, or if ids repeat or
    exceed the embedding.
    """
    if any(type(i) is not int or not 0 <= i < n for i in ids.values()):
        raise UserError(f"{origin}: the vocabulary has ids outside 0 .. {n - 1}, the rows of the embedding")
    if len(set(ids.values())) < len(ids):
        raise UserError(f"{origin}: two pieces have one id")
    n_pieces = max(ids.values(), default=-1) + 1
    if n - n_pieces > spare and (n % 8 or n - n_pieces > 127):
        raise UserError(
            f"{origin}: the vocabulary has {n_pieces:,} pieces, and the embedding has {n:,} rows: it belongs to "
            "another model"
        )
    taken = set(special)
    return Rows(torch.tensor([*special, *(i for i in range(n) if i not in taken)]), n)


def fixed_bias(rows: Rows) -> Tensor:
    """Make a bias for our logits that rules out ids without a row, and the first of two ids that share a row."""
    index = rows.index.tolist()
    ruled_out = [row < 0 or row in index[i + 1 :] for i, row in enumerate(index[: EOS + 1])]
    return torch.tensor([NEVER if out else 0.0 for out in ruled_out] + [0.0] * (len(index) - len(ruled_out)))


def complete_output_bias(state: dict[str, Tensor], rows: Rows) -> bool | str:
    """Rule out ids in an imported model's output bias (see `fixed_bias`); return `model.output_bias` for it.

    A bias without effect is removed.
    """
    fixed = fixed_bias(rows)
    bias = state.pop("output_bias", torch.zeros_like(fixed))
    is_trained = bool(bias[fixed == 0].any())
    if is_trained or bool(fixed.any()):
        state["output_bias"] = bias.where(fixed == 0, fixed)
    return is_trained or ("fixed" if "output_bias" in state else False)


def without_bias(tensors: Mapping[str, Tensor], rows: Rows, program: str) -> dict[str, Tensor]:
    """Remove the bias on the logits, for a program that has none; `UserError` if the bias is trained."""
    bias = tensors.get("output_bias")
    if bias is not None and bool(bias.any()) and not torch.equal(bias, fixed_bias(rows)):
        raise UserError(f"{program} cannot express model.output_bias = true (its numbers are not zero here)")
    return {name: tensor for name, tensor in tensors.items() if name != "output_bias"}


def with_one_end(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which BOS has the rows of EOS, for a model that reads BOS as EOS."""
    changed = dict(tensors)
    for name in BY_PIECE.intersection(tensors):
        changed[name] = changed[name].clone()
        changed[name][BOS] = changed[name][EOS]
    return changed


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of ours and its counterpart in another program.

    `theirs`: names of tensors of this `shape`; our tensor is their concatenation along the first axis. `also`: other
    names of a single tensor. At least one of its names must exist, and tensors of several names must be equal; exports
    write the first. `tied`: other names of our tensor. `rows`: for a vocabulary, the file's row for each of our rows,
    or -1 for none, which is filled with `filler`. `stream`: our axis that lies on the residual stream, whose order may
    differ. `transposed`: the program's matrices are [in, out]. `factor`: the first tensor of `theirs` is multiplied by
    this number on import.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: Shape
    also: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    rows: Int[Tensor, " V"] | None = None
    filler: float = 0.0
    stream: int | None = None
    transposed: bool = False
    factor: float = 1.0


class Layer(NamedTuple):
    """A linear layer or a norm: a row in the table of a family's layers.

    `ours`: name of our layer. `theirs`: names, separated by spaces, of the layers whose outputs are concatenated for
    it. `axes`: output and input width of a linear layer, or the width of a norm: a number, "stream" (residual stream),
    "heads" (all heads together), "inner" (feed-forward network), or a product such as "3*heads".
    """

    ours: str
    theirs: str
    axes: str


_BLOCK = {
    "self_attention": {"query_key_value": (3, "heads stream"), "output": (1, "stream heads")},
    "cross_attention": {"query": (1, "heads stream"), "key_value": (2, "heads stream"), "output": (1, "stream heads")},
    "feed_forward": {"expand": (1, "inner stream"), "contract": (1, "stream inner")},
}
"""The linear layers of each sub-layer: number of packed matrices, and output and input axis."""


def block_layers(**theirs: Sequence[str]) -> tuple[Layer, ...]:
    """Make the layers of a block. For each sub-layer, give the names of its linear layers, then of its norm."""
    layers = []
    for sublayer, (*names, norm) in theirs.items():
        for (part, (n, axes)), name in zip(_BLOCK[sublayer].items(), names, strict=True):
            packed = n // len(name.split())
            layers.append(Layer(f"{sublayer}.{part}", name, f"{packed}*{axes}" if packed > 1 else axes))
        layers.append(Layer(f"{sublayer}_residual.norm", norm, "stream"))
    return tuple(layers)


def layer_entries(
    table: Sequence[Layer],
    s: AttentionSettings,
    ours: str = "",
    theirs: str = "",
    *,
    transposed: bool = False,
    bias: bool = True,
) -> Iterator[Entry]:
    """Yield the entries for weights and biases of layers.

    Args:
        table: The layers.
        s: Settings of the model.
        ours: Prefix of our names.
        theirs: Prefix of the program's names.
        transposed: Whether the program's matrices are [in, out].
        bias: Whether linear layers and norms have biases.
    """
    heads = s.d_model if s.d_key is None else s.n_heads * s.d_key
    widths = {"stream": s.d_model, "heads": heads, "inner": s.d_ff}
    for layer in table:
        names, axes = layer.theirs.split(), layer.axes.split()
        parts = [("weight", "gamma", len(axes)), ("bias", "beta", 1)]
        for part, tensorflow, n_axes in parts if bias else parts[:1]:
            factors = (axis.split("*") for axis in axes[:n_axes])
            shape = tuple(math.prod(widths[name] if name in widths else int(name) for name in axis) for axis in factors)
            yield Entry(
                f"{ours}{layer.ours}.{part}",
                tuple(f"{theirs}{name}.{part}" for name in names),
                shape[::-1] if transposed else shape,
                also=(f"{theirs}{layer.theirs}.{tensorflow}",) if len(axes) == 1 else (),
                stream=axes.index("stream") if "stream" in axes[:n_axes] else None,
                transposed=transposed and n_axes == 2,
            )


def stack_entries(
    s: TransformerSettings,
    stack: str,
    block: str,
    layers: tuple[Sequence[Layer], Sequence[Layer]],
    *,
    norms: tuple[str, str] = ("layernorm_embedding", "layer_norm"),
    positions: str = "",
    n_skipped: int = 0,
    first: int = 0,
    transposed: bool = False,
    bias: bool = True,
) -> Iterator[Entry]:
    """Yield the entries for learned positions, norms and blocks of a translator's stacks.

    `stack`, `block`: prefixes of the program's names, with {} for encoder or decoder, and for the number of a block,
    which starts at `first`. `layers`: the layers of an encoder block and of a decoder block. `norms`: names of the
    norms after an embedding and after a stack. `positions`: name of a table with `n_skipped` rows before the first
    position.
    """
    depths = s.n_encoder_layers, s.n_decoder_layers
    for (side, embedding), table, depth in zip(SIDES.items(), layers, depths, strict=True):
        prefix = stack.format(side)
        if s.positions == "learned":
            rows = torch.arange(n_skipped, n_skipped + s.max_positions)
            shape = (n_skipped + s.max_positions, s.d_model)
            yield Entry(f"{embedding}.positions.embedding.weight", (f"{prefix}{positions}",), shape, rows=rows)
        outer = [Layer(f"{embedding}.norm", norms[0], "stream")] if s.embedding_norm else []
        outer += [Layer(f"{side}.norm", norms[1], "stream")] if s.residual == "pre" else []
        yield from layer_entries(outer, s, "", prefix, transposed=transposed, bias=bias)
        for i in range(depth):
            names = f"{side}.blocks.{i}.", prefix + block.format(first + i)
            yield from layer_entries(table, s, *names, transposed=transposed, bias=bias)


def embedding_entries(
    ours: Sequence[str], theirs: Sequence[str], output: str, *, rows: Rows, d_model: int, tied: bool
) -> Iterator[Entry]:
    """Yield the entries for an embedding, by all its names, and for the output matrix, which is the same if `tied`."""
    shape, our_output = (rows.n_theirs, d_model), "output_embedding.weight"
    ours, theirs = [*ours, *[our_output] * tied], [*theirs, *[output] * tied]
    yield Entry(ours[0], (theirs[0],), shape, tuple(theirs[1:]), tuple(ours[1:]), rows=rows.index, stream=1)
    if not tied:
        yield Entry(our_output, (output,), shape, rows=rows.index, stream=1)


def translator_embedding_entries(
    s: TransformerSettings, theirs: tuple[str, str, str, str], *, src: Rows, tgt: Rows
) -> Iterator[Entry]:
    """Yield the entries for a translator's embeddings and output matrix.

    `theirs`: names of the shared table, the encoder's table, the decoder's table and the output matrix.
    """
    shared, encoder, decoder, output = theirs
    tables, names = ["tgt_embedding.table.weight", "src_embedding.table.weight"], [shared, encoder, decoder]
    if not s.ties_inputs:
        names = [decoder]
        yield Entry(tables.pop(), (encoder,), (src.n_theirs, s.d_model), rows=src.index, stream=1)
    yield from embedding_entries(tables, names, output, rows=tgt, d_model=s.d_model, tied=s.ties_output)


def check(tensors: Mapping[str, Tensor], entries: Sequence[Entry], *, origin: object) -> None:
    """Raise `UserError` with every name and shape that does not match `entries`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    missing, misshapen, expected = [], [], set[str]()
    for entry in entries:
        expected |= {*entry.theirs, *entry.also}
        for name in entry.theirs:
            if name not in shapes and not any(other in shapes for other in entry.also):
                missing.append(f"{name} {list(entry.shape)}")
        for name in (*entry.theirs, *entry.also):
            if name in shapes and shapes[name] != entry.shape:
                misshapen.append(f"{name} is {list(shapes[name])}, should be {list(entry.shape)}")
    unexpected = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in expected]
    lists = (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected))
    if problems := [f"{len(names)} {what}: {listed(names)}" for what, names in lists if names]:
        raise UserError(f"{origin}: the settings and the weights do not fit: {'; '.join(problems)}")


def read(
    tensors: Mapping[str, Tensor],
    entries: Sequence[Entry],
    *,
    origin: object,
    order: Int[Tensor, " D"] | None = None,
) -> dict[str, Tensor]:
    """Convert another program's tensors, which passed `check`, to ours in float32. `UserError` for unusable values.

    `order`: our column for each column of the program's residual stream, if the order differs.
    """
    bad = [name for name, t in tensors.items() if t.dtype not in _TYPES or not bool(t.isfinite().all())]
    if bad:
        raise UserError(f"{origin}: weights that are not finite numbers of 16, 32 or 64 bits: {listed(bad)}")
    inverse = None if order is None else order.argsort()
    ours, differing = dict[str, Tensor](), []
    for entry in entries:
        names = [name for name in (*entry.theirs, *entry.also) if name in tensors]
        if entry.also and any(not torch.equal(tensors[names[0]], tensors[name]) for name in names[1:]):
            differing.append(" and ".join(names))
        parts = [tensors[name] for name in (names[:1] if entry.also else entry.theirs)]
        parts = [part.t() for part in parts] if entry.transposed else parts
        if entry.factor != 1.0:
            parts[0] = parts[0].float() * entry.factor
        ours |= dict.fromkeys((entry.ours, *entry.tied), _to_ours(torch.cat(parts).float(), entry, inverse))
    if differing:
        raise UserError(f"{origin}: these weights are tied by the settings, but differ: {'; '.join(differing)}")
    return ours


def write(
    ours: Mapping[str, Tensor], entries: Sequence[Entry], *, order: Int[Tensor, " D"] | None = None
) -> dict[str, Tensor]:
    """Convert our tensors to another program's in float32: the inverse of `read`. Missing biases become zeros."""
    unknown = ours.keys() - {name for entry in entries for name in (entry.ours, *entry.tied)}
    assert not unknown, f"no entry for {sorted(unknown)}"
    theirs: dict[str, Tensor] = {}
    for entry in entries:
        if entry.ours not in ours and entry.ours.endswith("bias"):
            theirs |= {name: torch.zeros(entry.shape) for name in entry.theirs}
            continue
        value = ours[entry.ours].detach().cpu().float()
        if entry.stream is not None and order is not None:
            value = value.index_select(entry.stream, order)
        if entry.rows is not None:
            exists = entry.rows >= 0
            moved = value.new_zeros(entry.shape[0], *value.shape[1:])
            moved[entry.rows[exists]] = value[exists]
            value = moved
        for i, (name, part) in enumerate(zip(entry.theirs, value.chunk(len(entry.theirs)), strict=True)):
            part = part / entry.factor if i == 0 and entry.factor != 1.0 else part
            theirs[name] = (part.t() if entry.transposed else part).contiguous()
    return theirs


def type_note(tensors: Mapping[str, Tensor]) -> str:
    """Return a line on the types of the weights, for the model card."""
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return f"weights of type {', '.join(types)}, kept as float32"


def _to_ours(value: Tensor, entry: Entry, inverse: Tensor | None) -> Tensor:
    if entry.rows is not None:
        exists = entry.rows >= 0
        moved = value.new_full((len(entry.rows), *value.shape[1:]), entry.filler)
        moved[exists] = value[entry.rows[exists]]
        value = moved
    if entry.stream is not None and inverse is not None:
        value = value.index_select(entry.stream, inverse)
    return value.contiguous()

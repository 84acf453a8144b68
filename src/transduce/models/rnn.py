"""Recurrent encoder-decoders (Sutskever et al. 2014; Bahdanau et al. 2015; Luong et al. 2015)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from transduce.config.architectures import RecurrentSettings
from transduce.models.parts import EncoderDecoder, initialize, is_changed
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.masks import pad_memory, padding_mask
from transduce.nn.positions import Positions
from transduce.nn.recurrent import (
    BRIDGES,
    CELLS,
    DIRECTIONS,
    SCORES,
    BahdanauDecoder,
    Cell,
    DecoderSizes,
    InputFeedingDecoder,
    LuongDecoder,
    PlainDecoder,
    RecurrentDecoder,
    RecurrentEncoder,
    initialize_cell,
)
from transduce.nn.state import RowState


def _luong(sizes: DecoderSizes, settings: RecurrentSettings) -> RecurrentDecoder:
    attention = SCORES[settings.attention](sizes.d_hidden)
    return (InputFeedingDecoder if settings.input_feeding else LuongDecoder)(sizes, attention)


ATTENTIONS: dict[str, Callable[[DecoderSizes, RecurrentSettings], RecurrentDecoder]] = {
    **dict.fromkeys(SCORES, _luong),
    "bahdanau": lambda sizes, settings: BahdanauDecoder(sizes),
    "none": lambda sizes, settings: PlainDecoder(sizes),
}
RECURRENT_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cell": CELLS,
    "attention": ATTENTIONS,
    "direction": DIRECTIONS,
    "bridge": BRIDGES,
}


def recurrent_problems(s: RecurrentSettings) -> Iterator[str]:
    if s.direction == "both" and s.d_hidden % 2:
        yield f"model.direction = 'both' needs an even model.d_hidden, not {s.d_hidden}"
    if s.bridge == "copy" and s.n_encoder_layers != s.n_decoder_layers:
        yield (
            f"model.bridge = 'copy' needs model.n_encoder_layers = {s.n_encoder_layers} and model.n_decoder_layers = "
            f"{s.n_decoder_layers} to be equal"
        )


def unused_by_rnn(s: RecurrentSettings) -> Iterator[str]:
    """Yield an error message for each changed setting without an effect."""
    if not s.input_feeding and s.attention not in SCORES:
        yield f"model.input_feeding = false has no effect with model.attention = '{s.attention}'"
    if s.attention == "bahdanau" and is_changed(s, "readout_scale"):
        yield f"model.readout_scale = {s.readout_scale} has no effect with model.attention = 'bahdanau'"


class RecurrentModel(EncoderDecoder[RowState]):
    """A recurrent encoder-decoder. Id 0 is padding, allowed at both ends of the source and at the end of the target."""

    def __init__(self, settings: RecurrentSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__()
        s = settings
        self.src_embedding, self.tgt_embedding = (_embedding(n, s) for n in (n_src, n_tgt))
        shared: dict[str, Any] = {"d_model": s.d_model, "d_hidden": s.d_hidden, "cell": s.cell, "dropout": s.dropout}
        self.encoder = RecurrentEncoder(n_layers=s.n_encoder_layers, direction=s.direction, **shared)
        self.bridge = BRIDGES[s.bridge](s.d_hidden, n_layers=s.n_decoder_layers, n_states=CELLS[s.cell].n_states)
        sizes = DecoderSizes(n_layers=s.n_decoder_layers, readout_scale=s.readout_scale, **shared)
        self.decoder = ATTENTIONS[s.attention](sizes, s)
        initialize(self)
        for module in self.modules():
            if isinstance(module, Cell):
                initialize_cell(module)
        self.tie(s, n_tgt)

    def start(self, src: Int[Tensor, "B S"], *, capacity: int = 0, n_beams: int = 1) -> RowState:
        mask = padding_mask(src)
        memory, finals = self.encoder(self.src_embedding(src), mask)
        if capacity:
            memory, mask = pad_memory(memory, mask)
        return self.decoder.start(self.bridge(finals), memory, mask, n_beams=n_beams)

    def advance(self, ids: Int[Tensor, "N T"], state: RowState) -> Float[Tensor, "N T D"]:
        return self.decoder(self.tgt_embedding(ids), state)


def _embedding(vocab_size: int, s: RecurrentSettings) -> TokenEmbedding:
    positions = Positions(d_model=s.d_model, d_head=s.d_model, max_positions=1)
    return TokenEmbedding(vocab_size, s.d_model, positions=positions, dropout=s.dropout)

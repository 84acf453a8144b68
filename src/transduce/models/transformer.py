"""The encoder-decoder Transformer (Vaswani et al. 2017, section 3)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from transduce.config.architectures import TransformerSettings
from transduce.models.parts import (
    DECODER_OPTIONS,
    DECODER_SELF,
    ENCODER_OPTIONS,
    EncoderDecoder,
    Parts,
    initialize,
    is_changed,
    stack_problems,
)
from transduce.nn.masks import SourceInput, pad_memory, padding_mask
from transduce.nn.positions import POSITIONS, Positions
from transduce.nn.state import DecoderState
from transduce.text.special import BOS, EOS, PAD

TRANSFORMER_OPTIONS = {**ENCODER_OPTIONS, **DECODER_OPTIONS, "decoder_self": DECODER_SELF}


def transformer_problems(s: TransformerSettings) -> Iterator[str]:
    yield from stack_problems(s)
    if s.language_last and (s.reads_vectors or POSITIONS[s.positions].vectors is Positions.vectors):
        yield f"model.language_last needs tokens and added positions such as 'learned', not '{s.positions}'"
    if s.replaces_self_attention:
        own = f"has no effect with model.decoder_self = '{s.decoder_self}'"
        if is_changed(s, "decoder_pattern"):
            yield f"model.decoder_pattern = '{s.decoder_pattern}' {own}"
        if POSITIONS[s.positions].trains_in_attention:
            yield f"model.positions = '{s.positions}' {own}"


class Transformer(EncoderDecoder[DecoderState]):
    """The encoder-decoder Transformer. Padding is id 0, or a vector of NaN.

    Padding may be at both ends of the source and at the end of the target.
    """

    def __init__(self, settings: TransformerSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__()
        parts = Parts(settings)
        self.src_embedding = parts.source_embedding(n_src)
        self.tgt_embedding = parts.embedding(n_tgt, causal=True, alias=(BOS, EOS) if settings.one_end else None)
        self.encoder = parts.encoder()
        self.decoder = parts.decoder(cross=True, own=settings.decoder_self)
        initialize(self)
        self.tie(settings, n_tgt)
        self.source_end, self.language_last = settings.source_end, settings.language_last

    def encode(self, src: SourceInput) -> Float[Tensor, "B S D"]:
        """Return the memory, the encoder's output for the source."""
        src = self._without_end(src)
        return self.encoder(self._embedded(src), mask=padding_mask(src), positions=self.src_embedding.positions)

    def start(self, src: SourceInput, *, capacity: int = 0, n_beams: int = 1) -> DecoderState:
        src = self._without_end(src)
        x, mask = self._embedded(src), padding_mask(src)
        if capacity:
            x, mask = pad_memory(x, mask)
        memory = self.encoder(x, mask=mask, positions=self.src_embedding.positions)
        return self.decoder.start(memory, mask, capacity=capacity, n_beams=n_beams)

    def advance(self, ids: Int[Tensor, "N T"], state: DecoderState) -> Float[Tensor, "N T D"]:
        x = self.tgt_embedding(ids, offset=state.length)
        return self.decoder(x, state, positions=self.tgt_embedding.positions)

    def _embedded(self, src: SourceInput) -> Float[Tensor, "B S D"]:
        """Embed the source. With `language_last`, the first token gets the last position, as if it came at the end."""
        if not self.language_last:
            return self.src_embedding(src)
        number = (src != PAD).cumsum(1)  # the number of each token, from 1
        return self.src_embedding(src, positions=(number - 2) % number[:, -1:].clamp_min(1))

    def _without_end(self, src: SourceInput) -> SourceInput:
        """Replace the source's EOS by padding if the encoder does not read EOS; an empty source keeps it."""
        if self.source_end or src.is_floating_point():
            return src
        is_end = F.pad(src[:, 1:] == EOS, (1, 0))
        return src.masked_fill(is_end, PAD)

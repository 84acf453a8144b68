"""The convolutional encoder-decoder, ConvS2S (Gehring et al. 2017)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.architectures import ConvS2SSettings
from transduce.models.parts import EncoderDecoder
from transduce.nn.convolutional import ConvDecoder, ConvEncoder
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.masks import is_real, pad_memory
from transduce.nn.positions import POSITIONS
from transduce.nn.state import RowState

CONVS2S_OPTIONS = {"positions": {name: POSITIONS[name] for name in ("learned", "none")}}


class ConvS2S(EncoderDecoder[RowState]):
    """The encoder-decoder ConvS2S. Id 0 is padding, allowed at both ends of the source and at the end of the target."""

    def __init__(self, settings: ConvS2SSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__()
        s = settings
        self.src_embedding, self.tgt_embedding = _embedding(s, n_src), _embedding(s, n_tgt)
        names = "d_model", "d_conv", "kernel_size", "dropout"
        sizes: dict[str, Any] = {name: getattr(s, name) for name in names}
        self.encoder = ConvEncoder(n_layers=s.n_encoder_layers, n_readers=s.n_decoder_layers, **sizes)
        self.decoder = ConvDecoder(n_layers=s.n_decoder_layers, **sizes)
        self.tie(s, n_tgt)

    def start(self, src: Int[Tensor, "B S"], *, capacity: int = 0, n_beams: int = 1) -> RowState:
        x, real = self.src_embedding(src), is_real(src)
        if capacity:
            x, real = pad_memory(x, real)
        memory, values = self.encoder(x, keep=real[:, :, None])
        return self.decoder.start(memory, values, real[:, None], n_beams=n_beams)

    def advance(self, ids: Int[Tensor, "N T"], state: RowState) -> Float[Tensor, "N T D"]:
        return self.decoder(self.tgt_embedding(ids, offset=state.length), state)


def _embedding(s: ConvS2SSettings, vocab_size: int) -> TokenEmbedding:
    """Make embeddings of tokens and positions, initialized with standard deviation 0.1 (section 3.5)."""
    positions = POSITIONS[s.positions](d_model=s.d_model, d_head=s.d_model, max_positions=s.max_positions)
    embedding = TokenEmbedding(vocab_size, s.d_model, positions=positions, dropout=s.dropout, scale=1.0)
    for module in embedding.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
    return embedding

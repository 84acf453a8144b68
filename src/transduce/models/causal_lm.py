"""A causal language model: a decoder without an encoder (GPT, Radford et al. 2018 and 2019)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from transduce.config.architectures import GPTSettings
from transduce.models.parts import Parts, TokenPredictor, initialize
from transduce.nn.positions import document_positions
from transduce.nn.state import DecoderState
from transduce.text.special import BOS, EOS


class CausalLM(TokenPredictor):
    """A causal language model: embedding, a decoder without a memory, output matrix.

    Id 0 is padding, allowed only at the end. `forward(ids)` is `advance(ids, state)` with an empty state, so that
    training and generation share one path. Sampling works as in translation, with the prompt in place of the source.
    """

    def __init__(self, settings: GPTSettings, *, n_src: int, n_tgt: int) -> None:
        """`n_tgt`: size of the vocabulary; `n_src` is not used. `settings.tie` = "none": a separate output matrix."""
        super().__init__()
        parts = Parts(settings)
        self.embedding = parts.embedding(n_tgt, causal=True, alias=(BOS, EOS) if settings.one_end else None)
        self.decoder = parts.decoder(cross=False)
        initialize(self)
        self.add_output(settings, n_tgt, tied=self.embedding.table)

    def start(self, src: Int[Tensor, "B S"], *, capacity: int = 0, n_beams: int = 1) -> DecoderState:
        """Return the state after the prompt `src`, which may be empty, with room for `capacity` more tokens per row.

        All prompts of a batch have equal length and no padding. `n_beams` must be 1.
        """
        n_known = src.shape[1]
        assert n_beams == 1, "a language model has one beam"
        assert capacity or not n_known, "a prompt needs capacity"
        memory = self.output_weight.new_empty(len(src), 0, self.output_weight.shape[1])
        n_kept = n_known + capacity
        state = self.decoder.start(memory, (src != 0)[:, None, :0], capacity=n_kept, n_beams=1)
        if n_known:
            self.advance(src, state)
        return state

    def advance(self, ids: Int[Tensor, "N T"], state: DecoderState) -> Float[Tensor, "N T D"]:
        """Return the hidden states after each of the next T tokens of every row; `state` is updated in place."""
        x = self.embedding(ids, offset=state.length)
        return self.decoder(x, state, positions=self.embedding.positions)

    def forward(self, ids: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None) -> Float[Tensor, "B T D"]:
        """Return the hidden states before the output matrix; position t depends on ids[:, :t + 1].

        `documents`: each token's document number. A token then attends only to its own document, and positions are
        counted from the beginning of the document.
        """
        state = self.start(ids[:, :0])
        if documents is None:
            return self.advance(ids, state)
        x = self.embedding(ids, positions=document_positions(documents))
        return self.decoder(x, state, positions=self.embedding.positions, documents=documents)

"""Models for tests of search: a table of random logits, and networks with random weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transduce.config.settings import Settings
from transduce.kernels.accelerate import accelerate
from transduce.models.registry import build_model

PAD, UNK, BOS, EOS = 0, 1, 2, 3


@dataclass
class State:
    src: Tensor  # [B], a hash of the source
    history: Tensor  # [N, t]
    n_beams: int

    def reorder(self, rows: Tensor) -> None:
        assert torch.equal(rows // self.n_beams, torch.arange(len(rows)) // self.n_beams), "rows of another sentence"
        self.history = self.history[rows]

    def select(self, sentences: Tensor) -> None:
        self.src = self.src[sentences]
        self.history = self.history.unflatten(0, (-1, self.n_beams))[sentences].flatten(0, 1)


class StandIn:
    """The next token depends on the source and on the last two tokens.

    `end` is added to the logit of the end of a sentence; `sharpness` scales all.
    """

    def __init__(self, n_tokens: int, *, seed: int = 0, end: float = 0.0, sharpness: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(7, n_tokens, n_tokens, n_tokens, generator=generator) * sharpness
        self.table[..., EOS] += end
        self.calls = 0

    def of_source(self, src: Tensor) -> Tensor:
        return (src * torch.arange(1, src.shape[1] + 1)).sum(1) % 7

    def logits_of(self, src: Tensor, history: Tensor) -> Tensor:
        """[N, V] after the histories [N, t], which begin with BOS."""
        before = history[:, -2] if history.shape[1] > 1 else torch.full_like(history[:, 0], PAD)
        return self.table[src, before, history[:, -1]]

    def start(self, src: Tensor, *, capacity: int, n_beams: int) -> State:
        self.capacity = capacity
        return State(self.of_source(src), torch.empty(len(src) * n_beams, 0, dtype=torch.long), n_beams)

    def advance(self, ids: Tensor, state: State) -> Tensor:
        """Its hidden states are the logits."""
        self.calls += 1
        state.history = torch.cat([state.history, ids], 1)
        assert state.history.shape[1] <= self.capacity
        return self.logits_of(state.src.repeat_interleave(state.n_beams), state.history)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def next_log_probs(self, src: list[int], prefix: tuple[int, ...]) -> list[float]:
        """The same logits as the function that `oracle.search` expects."""
        number = self.of_source(torch.tensor([src]))
        history = torch.tensor([[BOS, *prefix]])
        return self.logits_of(number, history)[0].double().log_softmax(-1).tolist()


def untrained(settings: Settings, *, n_src: int, n_tgt: int, seed: int = 0) -> nn.Module:
    """A model with random weights whose outputs end at some point and depend on the source and on positions."""
    torch.manual_seed(seed)
    model = build_model(settings.model, n_src=n_src, n_tgt=n_tgt)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                parameter.mul_(3.0)
            elif name.endswith("positions.bias.weight"):
                parameter.normal_()
        model.output_weight[EOS] *= 2.5
    accelerate(model, device=torch.device("cpu"), precision=torch.float32, purpose="decoding")
    return model.eval().requires_grad_(False)

"""Record beam search step by step: each hypothesis with its fate and its best continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transduce.config.decoding import DecodingOptions
from transduce.decoding.constraints import Beginning
from transduce.decoding.engine import Hypothesis
from transduce.decoding.search import Continuations, Stepper, beam_search
from transduce.text.special import EOS

_TOP = 10
_FREE = Beginning(())


@dataclass(slots=True)
class Node:
    """A hypothesis after a step: its parent extended by a token.

    fate: kept, pruned or finished. top: its best continuations, (token, probability), if it was continued.
    """

    id: int
    parent: int | None
    token: int
    log_prob: float
    fate: str
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """A search: its options, the best first tokens, the hypotheses of each step, and its results, best first."""

    options: DecodingOptions
    first: list[tuple[int, float]]
    steps: list[list[Node]]
    results: list[Hypothesis]
    ends: list[int]  # id of the last node of each result


def replay(
    model: Stepper,
    src: Tensor,
    options: DecodingOptions,
    *,
    limit: int,
    beginning: Beginning = _FREE,
    copies: Sequence[int] | None = None,
) -> Replay:
    """Search for one source [1, S] by `beam_search`, and keep every step."""
    log_probs = torch.empty(0)  # log-probabilities of the last step
    root = Node(0, None, 0, 0.0, "kept")
    steps, nodes, live = list[list[Node]](), [root], [root]

    def logits(hidden: Tensor) -> Tensor:
        nonlocal log_probs
        scores = model.logits(hidden)
        log_probs = scores.float().log_softmax(-1)
        return scores

    def watch(continuations: Continuations) -> None:
        nonlocal live
        for node, row in zip(live, log_probs, strict=False):
            top = row.topk(min(_TOP, len(row)))
            node.top = list(zip(top.indices.tolist(), top.values.exp().tolist(), strict=True))
        step, kept = list[Node](), list[Node]()
        for rank, (log_prob, parent, token) in enumerate(zip(*(x[0].tolist() for x in continuations), strict=True)):
            if log_prob == -float("inf"):
                continue
            ends = token == EOS
            # As in the search: of the `beam` best continuations, those that end are finished; the `beam` best
            # continuations that do not end stay live.
            fate = ("finished" if rank < options.beam else "pruned") if ends else "kept"
            if not ends and len(kept) == options.beam:
                fate = "pruned"
            node = Node(len(nodes), live[parent].id, token, log_prob, fate)
            nodes.append(node)
            step.append(node)
            if fate == "kept":
                kept.append(node)
        steps.append(step)
        live = kept

    recorder: Any = SimpleNamespace(start=model.start, advance=model.advance, logits=logits)
    (results,) = beam_search(
        recorder, src, options, max_length=limit, beginnings=[beginning], copies=[copies], watch=watch
    )
    paths = {tuple(_path(node, nodes)): node.id for node in nodes if node.fate != "pruned"}
    ends = [paths[(*result.ids, EOS) if result.finished else result.ids] for result in results]
    return Replay(options, root.top, steps, results, ends)


def _path(node: Node, nodes: Sequence[Node]) -> list[int]:
    tokens = list[int]()
    while node.parent is not None:
        tokens.append(node.token)
        node = nodes[node.parent]
    return tokens[::-1]

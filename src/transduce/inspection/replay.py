"""Beam search, step by step: every hypothesis, what became of it, and the continuations that it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transduce.config.decoding import DecodingOptions
from transduce.decoding.engine import Hypothesis
from transduce.decoding.search import Continuations, Stepper, beam_search
from transduce.text.special import EOS

_TOP = 10


@dataclass(slots=True)
class Node:
    """A hypothesis after a step: that of its parent and one more token.

    fate: kept, pruned or finished. top: its own best continuations, (token, probability), if it was continued.
    """

    number: int
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
    ends: list[int]  # of each result, the number of its last node


def replay(model: Stepper, src: Tensor, options: DecodingOptions, *, limit: int, prefix: Sequence[int] = ()) -> Replay:
    """Search for one source [1, S] as `beam_search` does, and keep what happened."""
    log_probs = torch.empty(0)  # of the last step
    root = Node(0, None, 0, 0.0, "kept")
    steps, nodes, live = list[list[Node]](), [root], [root]

    def logits(hidden: Tensor) -> Tensor:
        nonlocal log_probs
        found = model.logits(hidden)
        log_probs = found.float().log_softmax(-1)
        return found

    def watch(found: Continuations) -> None:
        nonlocal live
        for node, row in zip(live, log_probs, strict=False):
            top = row.topk(min(_TOP, len(row)))
            node.top = list(zip(top.indices.tolist(), top.values.exp().tolist(), strict=True))
        step, kept = list[Node](), list[Node]()
        for place, (log_prob, parent, token) in enumerate(zip(*(x[0].tolist() for x in found), strict=True)):
            if log_prob == -float("inf"):
                continue
            ends = token == EOS
            # As in the search: what ends counts among the `beam` best; the `beam` best of the others live on.
            fate = ("finished" if place < options.beam else "pruned") if ends else "kept"
            if not ends and len(kept) == options.beam:
                fate = "pruned"
            node = Node(len(nodes), live[parent].number, token, log_prob, fate)
            nodes.append(node)
            step.append(node)
            if fate == "kept":
                kept.append(node)
        steps.append(step)
        live = kept

    recorder: Any = SimpleNamespace(start=model.start, advance=model.advance, logits=logits)
    (results,) = beam_search(recorder, src, options, max_length=limit, prefixes=[prefix], watch=watch)
    paths = {tuple(_path(node, nodes)): node.number for node in nodes if node.fate != "pruned"}
    ends = [paths[(*one.ids, EOS) if one.finished else one.ids] for one in results]
    return Replay(options, root.top, steps, results, ends)


def _path(node: Node, nodes: Sequence[Node]) -> list[int]:
    tokens = list[int]()
    while node.parent is not None:
        tokens.append(node.token)
        node = nodes[node.parent]
    return tokens[::-1]

"""The largest batch that a plan can make: the same store with every row as long as the settings allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from transduce.config import Settings
from transduce.data.label_store import LabelStore
from transduce.data.sentence_store import SentenceStore
from transduce.data.store import TokenStore
from transduce.prepare import Prepared
from transduce.tasks.classification import PreparedLabels, longest_of
from transduce.tasks.masked import PreparedSentences
from transduce.tasks.plain_text import PreparedText


def longest_rows(prepared: Any, settings: Settings) -> Any:
    """What was prepared, with training rows of the greatest length, enough of them for a batch."""
    return _LONGEST[type(prepared)](prepared, settings)


def _n_rows(length: int, settings: Settings) -> int:
    training = settings.training
    return 2 + (training.micro_batch_tokens or training.batch_tokens or 1) // length * 2


def _pairs(prepared: Prepared, settings: Settings) -> Prepared:
    length = settings.data.max_length
    n = _n_rows(length, settings)
    sides = [_tiled(side.ids, length).tolist() for side in (prepared.train.src, prepared.train.tgt)]
    return replace(prepared, train=TokenStore.from_lists([sides[0]] * n, [sides[1]] * n), weights=None)


def _text(prepared: PreparedText, settings: Settings) -> PreparedText:
    return prepared  # all rows have the length of the context


def _sentences(prepared: PreparedSentences, settings: Settings) -> PreparedSentences:
    context = settings.data.context
    assert context is not None, "chosen first"
    length, store = context - 3, prepared.train
    n = 2 * _n_rows(context, settings)  # pairs of segments share a row
    ids = np.tile(_tiled(store.ids, length), n)
    offsets, documents = np.arange(n + 1) * length, np.arange(0, n + 1, 2)
    return replace(prepared, train=SentenceStore(ids, offsets, documents, store.facts))


def _labels(prepared: PreparedLabels, settings: Settings) -> PreparedLabels:
    length, store = longest_of(settings.model, settings.data.max_length), prepared.train
    n = _n_rows(length, settings)
    ids = np.tile(_tiled(store.ids, length), n)
    ends, zeros = np.full(n, length, dtype=np.int32), np.zeros(n, dtype=np.int32)
    return replace(prepared, train=LabelStore(ids, np.arange(n + 1) * length, ends, zeros, store.facts))


def _tiled(ids: np.ndarray, length: int) -> np.ndarray:
    """The first ids, over and over."""
    return np.resize(np.asarray(ids[: max(1, min(len(ids), length))]), length)


_LONGEST: dict[type, Callable[[Any, Settings], Any]] = {
    Prepared: _pairs,
    PreparedText: _text,
    PreparedSentences: _sentences,
    PreparedLabels: _labels,
}
"""How it is done, by what a task prepares."""

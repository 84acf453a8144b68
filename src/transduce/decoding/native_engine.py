"""The engine that runs Transformers in our C++ library (`native/`), several times faster than PyTorch."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from transduce.config.architectures import GPTSettings, TransformerSettings
from transduce.config.decoding import DecodingOptions
from transduce.data.store import Example, Ids, RowExample
from transduce.decoding.alignment import Head
from transduce.decoding.engine import (
    BATCH_TOKENS,
    OUTCOMES,
    Batcher,
    DecodingInput,
    Deliver,
    Event,
    Hypothesis,
    Outcome,
    sample_numbers,
)
from transduce.decoding.native_model import NativeModel
from transduce.errors import TransduceError
from transduce.kernels.library import address, packed
from transduce.process import n_threads_to_use
from transduce.text.special import BOS, EOS, PAD, PLACEHOLDER_IDS

_LOAD = ("n_waiting", "n_waiting_tokens", "n_open", "n_steps", "n_rows")
_IN_PYTHON = ("max_length", "batch_tokens", "seed", "split")  # options used only in Python
_SLICE = 0.05  # seconds after which a decoding caller returns to Python, which handles signals
_SHARE = 4096  # maximum tokens that a thread scores at once


class _Option(ctypes.Structure):
    """The struct `transduce_option` of native/src/transduce_native.h."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_double)]


class Sentences(ctypes.Structure):
    """The struct `transduce_sentences` of transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "offsets", "prefixes", "prefix_offsets")),
        *((name, ctypes.c_void_p) for name in ("spellings", "spelling_offsets", "limits", "unscored")),
        *((name, ctypes.c_void_p) for name in ("copies", "numbers")),
        ("n", ctypes.c_int64),
    ]


class Load(ctypes.Structure):
    """The struct `transduce_load` of transduce_native.h."""

    _fields_ = [(name, ctypes.c_int64) for name in _LOAD]


class _Pairs(ctypes.Structure):
    """The struct `transduce_pairs` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sources", "source_offsets", "inputs", "tokens", "offsets")),
        ("n", ctypes.c_int64),
    ]


def option_array(options: Mapping[str, float]) -> ctypes.Array[_Option]:
    """Convert named options to an array of structs for the library."""
    return (_Option * len(options))(*(_Option(name.encode(), value) for name, value in options.items()))


@lru_cache(64)
def _native_options(options: DecodingOptions, stream: bool) -> ctypes.Array[_Option]:
    """Convert decoding options for the library. `stream`: report new tokens, unless several samples are drawn."""
    given = {name: float(value) for name, value in options if name not in _IN_PYTHON}
    return option_array(given | {"stream": stream and not (options.sample and options.n_best > 1)})


@dataclass(frozen=True, slots=True)
class _Item:
    """An example to score. `tokens`: for each input, the next token, whose log-probability is computed (-1: none)."""

    source: Ids
    inputs: Ids
    tokens: Ids

    @property
    def size(self) -> int:
        return len(self.source) + len(self.inputs)


class NativeEngine:
    """Search, sampling and scoring in C++ on all cores, from several threads at a time.

    The hypotheses of a sentence depend only on the sentence, the model and the options. They are bit-identical in any
    batch and with any number of threads. The threads end when the engine is garbage-collected; a forked process starts
    its own.
    """

    device = "cpu"

    def __init__(self, model: NativeModel, *, pytorch_model: Callable[[], Any], n_threads: int | None = None) -> None:
        """`pytorch_model`: loads the model in PyTorch. `n_threads`: threads that decode (default: one per core)."""
        self.n_threads, self.library, self._model = n_threads or n_threads_to_use(), model.library, model
        self.pytorch_model = cache(pytorch_model)
        self._lock, self._pid = threading.Lock(), 0
        self._handle = ctypes.c_void_p()
        self._threads: list[threading.Thread] = []

    @property
    def handle(self) -> ctypes.c_void_p:
        """The library's queue in this process. A forked process opens its own: threads do not survive a fork."""
        if self._pid == os.getpid():
            return self._handle
        with self._lock:
            if self._pid != os.getpid():
                handle, pid = ctypes.c_void_p(), os.getpid()
                self.library.transduce_queue_new(self._model.handle, self.n_threads, ctypes.byref(handle))
                self._handle, self._threads = handle, []
                weakref.finalize(self, _free, self.library, self._model, handle, self._threads, pid)
                self._pid = pid
            return self._handle

    def start_threads(self) -> None:
        """Start the threads that decode for all callers; without them, callers decode in `NativeCaller.work`."""
        handle = self.handle
        if len(self._threads) == self.n_threads:
            return
        with self._lock:
            while len(self._threads) < self.n_threads:
                # Daemon threads, because they run in C until `_free` ends them.
                serve = self.library.transduce_serve
                thread = threading.Thread(target=serve, args=(handle,), name="decode", daemon=True)
                thread.start()
                self._threads.append(thread)

    def workload(self) -> dict[str, int]:
        """Count waiting sentences and their tokens, open sentences, and decoding steps so far and their rows."""
        load = Load()
        self.library.transduce_queue_load(self.handle, ctypes.byref(load))
        return {name: getattr(load, name) for name in _LOAD}

    def read_ids(self, ids: Ids) -> Ids:
        """Convert the ids of a source or prompt to the model's input: place its start, end and language tokens."""
        settings = self._model.settings
        if isinstance(settings, GPTSettings):
            return [self._model.start if i == BOS else i for i in ids]
        end = (EOS,) if settings.source_end or len(ids) == 0 else ()
        return (*ids[1:], *end, *ids[:1]) if settings.language_last else (*ids, *end)

    def in_source_order(self, weights: np.ndarray) -> np.ndarray:
        """Reorder attention [..., S] from the order of the model's input (see `read_ids`) to the source's order."""
        settings = self._model.settings
        is_other = isinstance(settings, TransformerSettings) and settings.language_last
        return np.roll(weights, 1, axis=-1) if is_other else weights

    def translate(self, sources: Sequence[DecodingInput], options: DecodingOptions) -> list[list[Hypothesis]]:
        """See `Engine.translate`. The calling thread decodes too."""
        if len(sources) > 1 and self.n_threads > 1:
            self.start_threads()
        caller = NativeCaller(self)
        try:
            caller.submit(0, sources, options, order=math.inf, stream=False, works=True)
            while caller.work(_SLICE):
                pass
            hypotheses: list[list[Hypothesis]] = [[]] * len(sources)
            for event in caller.collect():
                if event.outcome != "done":
                    raise TransduceError(f"a translation {event.outcome}: {event.reason or 'its engine was closed'}")
                hypotheses[event.ticket] = event.hypotheses
            return hypotheses
        finally:
            caller.free()

    def open_batcher(self, deliver: Deliver) -> Batcher:
        self.start_threads()
        return NativeCaller(self, deliver)

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        return [log_probs.tolist() for log_probs, _ in self._map([self._pair(pair) for pair in pairs], ())]

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
    ) -> list[list[float]]:
        items, owners = list[_Item](), list[int]()
        for number, row in enumerate(rows):
            ids = np.asarray(row.ids)
            tokens = np.where(np.equal(row.targets, PAD), -1, row.targets)
            # Documents do not attend to each other, and positions count from the start of each document.
            starts = {0, *np.flatnonzero(ids == BOS).tolist(), len(ids)} if separate else {0, len(ids)}
            ids = np.where(ids == BOS, self._model.start, ids)
            for start, stop in itertools.pairwise(sorted(starts)):
                items.append(_Item((), ids[start:stop].tolist(), tokens[start:stop].tolist()))
                owners.append(number)
        log_probs_of: list[list[float]] = [[] for _ in rows]
        for number, (log_probs, _) in zip(owners, self._map(items, ()), strict=True):
            log_probs_of[number] += log_probs.tolist()
        return log_probs_of

    def attention(self, pairs: Sequence[Example], heads: Sequence[Head]) -> list[np.ndarray]:
        """See `Engine.attention`. If the encoder does not read the end of the source, the end's weight is zero."""
        scored = self._map([self._pair(pair) for pair in pairs], heads)
        weights_of = [self.in_source_order(weights) for _, weights in scored]
        unread = [len(pair.src) + 1 - weights.shape[2] for pair, weights in zip(pairs, weights_of, strict=True)]
        return [np.pad(weights, ((0, 0), (0, 0), (0, n))) for weights, n in zip(weights_of, unread, strict=True)]

    def _pair(self, pair: Example) -> _Item:
        return _Item(self.read_ids(pair.src), (self._model.start, *pair.tgt), (*pair.tgt, EOS))

    def _map(self, items: Sequence[_Item], heads: Sequence[Head]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Score items with several threads; return each item's log-probabilities and attention weights, in order."""
        shares: list[list[int]] = [[]]
        room = _SHARE
        for number in sorted(range(len(items)), key=lambda i: -items[i].size):
            if room < items[number].size and shares[-1]:
                shares.append([])
                room = _SHARE
            shares[-1].append(number)
            room -= items[number].size
        results: list[Any] = [None] * len(items)

        def work(share: list[int]) -> None:
            for number, result in zip(share, self._score([items[i] for i in share], heads), strict=True):
                results[number] = result

        if (n := min(self.n_threads, len(shares))) == 1:
            for share in shares:
                work(share)
            return results
        with ThreadPoolExecutor(n, thread_name_prefix="score") as pool:
            list(pool.map(work, shares))
        return results

    def _score(self, items: Sequence[_Item], heads: Sequence[Head]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Score items in this thread; return each item's log-probabilities and attention weights."""
        sources, source_offsets = packed([item.source for item in items])
        inputs, offsets = packed([item.inputs for item in items])
        tokens, _ = packed([item.tokens for item in items])
        sizes = [len(heads) * len(item.inputs) * len(item.source) for item in items]
        log_probs, weights = np.zeros(len(inputs), np.float32), np.empty(sum(sizes), np.float32)
        heads_array = np.array(heads, np.int32)
        pairs = _Pairs(n=len(items))
        if len(sources):
            pairs.sources, pairs.source_offsets = address(sources), address(source_offsets)
        pairs.inputs, pairs.tokens, pairs.offsets = map(address, (inputs, tokens, offsets))
        self.library.transduce_score(
            self._model.handle,
            ctypes.byref(pairs),
            log_probs.ctypes.data,
            heads_array.ctypes.data if heads else None,
            len(heads),
            weights.ctypes.data if heads else None,
        )
        stops = np.cumsum(sizes)
        return [
            (
                log_probs[offsets[i] : offsets[i + 1]],
                weights[stop - size : stop].reshape(len(heads), len(item.inputs), len(item.source)),
            )
            for i, (item, size, stop) in enumerate(zip(items, sizes, stops, strict=True))
        ]


def _free(library: ctypes.CDLL, model: Any, handle: ctypes.c_void_p, threads: list[threading.Thread], pid: int) -> None:
    """Close and free a queue. The argument `model` keeps the model alive until then."""
    if os.getpid() != pid:
        return
    library.transduce_queue_close(handle)
    if threading.current_thread() in threads:
        return  # freed in one of these threads, which cannot join itself: leak the memory
    for thread in threads:
        thread.join()
    library.transduce_queue_free(handle)


class NativeCaller:
    """The sentences of one caller: submits them, decodes them here or in the engine's threads, and collects events.

    With `deliver` it is a `Batcher` with continuous batching: new inputs are admitted at every decoding step. The
    library then wakes the event loop directly, by a file descriptor.
    """

    def __init__(self, engine: NativeEngine, deliver: Deliver | None = None) -> None:
        self._engine, self._library, self._pid = engine, engine.library, os.getpid()
        self._handle = ctypes.c_void_p()
        self._library.transduce_client_new(engine.handle, ctypes.byref(self._handle))
        self._sizes = (ctypes.c_int64 * 4)()  # numbers of collected events, hypotheses, tokens and weights
        first = ctypes.addressof(self._sizes)
        self._size_addresses = tuple(first + i * ctypes.sizeof(ctypes.c_int64) for i in range(4))
        # file descriptor that is readable if there are events
        self._deliver, self._readable = deliver, ctypes.c_int32()
        if deliver is not None:
            self._library.transduce_client_fd(self._handle, ctypes.byref(self._readable))
            asyncio.get_running_loop().add_reader(self._readable.value, self._deliver_events)

    def submit(
        self,
        first_ticket: int,
        inputs: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        order: float,
        stream: bool,
        works: bool = False,
    ) -> None:
        """See `Batcher.submit`. `works`: this thread will call `work`."""
        if os.getpid() != self._pid:
            raise TransduceError("a decoding queue cannot be used after a fork; open another one")
        arrays: dict[str, array | np.ndarray] = {"limits": array("i", [source.limit for source in inputs])}
        arrays["ids"], arrays["offsets"] = packed([self._engine.read_ids(source.ids) for source in inputs])
        if any(source.prefix for source in inputs):
            arrays["prefixes"], arrays["prefix_offsets"] = packed([source.prefix for source in inputs])
        if any(source.spelling for source in inputs):
            arrays["spellings"], ends = packed([[*itertools.chain.from_iterable(s.spelling)] for s in inputs])
            arrays["spelling_offsets"] = array("q", [end // 3 for end in ends])
        if any(source.n_unscored for source in inputs):
            arrays["unscored"] = array("i", [source.n_unscored for source in inputs])
        if any(source.copies for source in inputs):
            arrays["copies"] = array("Q", [_packed_copies(source.copies or ()) for source in inputs])
        if options.sample:
            arrays["numbers"] = _numbers(inputs, options.n_best, options.seed)
        sentences = Sentences(n=len(inputs), **{name: address(values) for name, values in arrays.items()})
        submit, given = self._library.transduce_submit, _native_options(options, stream)
        submit(self._handle, given, len(given), ctypes.byref(sentences), first_ticket, order, works)

    def cancel(self, ticket: int) -> None:
        self._library.transduce_cancel(self._handle, ticket)

    def workload(self) -> dict[str, int]:
        return self._engine.workload()

    def work(self, seconds: float) -> int:
        """Decode in this thread until all sentences have ended or time is up; return the number of open sentences."""
        n_open = ctypes.c_int64()
        self._library.transduce_work(self._handle, seconds, ctypes.byref(n_open))
        return n_open.value

    def collect(self) -> list[Event]:
        """Return the events since the last call."""
        self._library.transduce_collect(self._handle, *self._size_addresses)
        n_events, n, n_tokens, n_weights = self._sizes
        if not n_events:
            return []
        columns = zip("qiiiffbii", (*[n_events] * 3, *[n] * 5, n_tokens), strict=True)
        arrays = [array(kind, [0]) * max(1, size) for kind, size in columns]
        weights = np.empty(n_weights, np.float32)
        self._library.transduce_results(self._handle, *map(address, arrays), address(weights))
        tickets, outcomes, counts, lengths, log_probs, scores, finished, widths, tokens = arrays
        events, number, end, used = [], 0, 0, 0
        for ticket, outcome, count in zip(tickets, outcomes, counts, strict=True):
            hypotheses = []
            for _ in range(count):
                ids = tuple(tokens[end : (end := end + lengths[number])])
                attention = None
                if width := widths[number]:
                    attention = weights[used : (used := used + len(ids) * width)].reshape(len(ids), width)
                    attention = self._engine.in_source_order(attention)
                hypotheses.append(Hypothesis(ids, log_probs[number], scores[number], finished[number] == 1, attention))
                number += 1
            events.append(_event(ticket, OUTCOMES[outcome], hypotheses))
        return events

    async def close(self) -> None:
        if os.getpid() == self._pid:
            self._library.transduce_client_close(self._handle)
        asyncio.get_running_loop().remove_reader(self._readable.value)
        self._deliver_events()

    def _deliver_events(self) -> None:
        assert self._deliver is not None, "only a batcher delivers"
        for event in self.collect():
            self._deliver(event)

    def free(self) -> None:
        """Free the memory that the native library holds for this object. No other method may run then or later."""
        if self._handle and os.getpid() == self._pid:
            self._library.transduce_client_free(self._handle)
        self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.free()


def _numbers(sources: Sequence[DecodingInput], n_samples: int, seed: int) -> np.ndarray:
    """Return random numbers in [0, 1), one per token, for each sample of each source."""
    samples = [sample_numbers((seed, *s.key), i, s.limit) for s in sources for i in range(n_samples)]
    return np.concatenate(samples) if samples else np.empty(0)


def _packed_copies(copies: Sequence[int]) -> int:
    """Pack the count of each placeholder (at most 255) into 8 bits, the library's format."""
    return sum(min(copies.count(token), 255) << 8 * i for i, token in enumerate(PLACEHOLDER_IDS))


def _event(ticket: int, outcome: Outcome, hypotheses: list[Hypothesis]) -> Event:
    if outcome == "tokens":
        return Event(ticket, outcome, tokens=hypotheses[0].ids)
    reason = "the native library ran out of memory" if outcome == "failed" else ""
    return Event(ticket, outcome, hypotheses, reason=reason)

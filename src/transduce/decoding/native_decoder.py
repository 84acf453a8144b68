"""Decoding in the native library: the inputs of all callers of a model, and the threads that decode them."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import threading
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from transduce.config.architectures import GPTSettings
from transduce.config.decoding import DecodingOptions
from transduce.data.examples import Ids
from transduce.decoding.engine import (
    OUTCOMES,
    PATIENCE,
    DecodingInput,
    Deliver,
    Event,
    Hypothesis,
    OnToken,
    Outcome,
    sample_numbers,
)
from transduce.decoding.native_model import NativeModel
from transduce.errors import TransduceError
from transduce.native.library import address, packed
from transduce.text.special import BOS, EOS

_ARRAYS = ("ids", "offsets", "prefixes", "prefix_offsets", "allowed", "allowed_offsets", "limits", "numbers")
_Arrays = tuple[array | np.ndarray | None, ...]
_LOAD = ("n_waiting", "n_waiting_tokens", "n_open", "n_steps", "n_rows")
_IN_PYTHON = ("max_length", "batch_tokens", "seed", "shortlist")  # options that the library is not given
_NONE = np.empty(0, np.int32)
_SLICE = 0.05  # seconds after which a caller that decodes lets Python handle signals
_STREAM_SLICE = 0.005  # the same of one that shows tokens as they come


class _Option(ctypes.Structure):
    """`transduce_option` of native/src/transduce_native.h."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_double)]


class Sentences(ctypes.Structure):
    """`transduce_sentences`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("n", ctypes.c_int64),
    ]


class Load(ctypes.Structure):
    """`transduce_load`."""

    _fields_ = [(name, ctypes.c_int64) for name in _LOAD]


def option_array(options: Mapping[str, float]) -> ctypes.Array[_Option]:
    """Options by their names, as the library takes them."""
    return (_Option * len(options))(*(_Option(name.encode(), value) for name, value in options.items()))


@lru_cache(64)
def _native_options(options: DecodingOptions, stream: bool) -> ctypes.Array[_Option]:
    """All options. `stream`: tokens; several samples share none."""
    given = {name: float(value) for name, value in options if name not in _IN_PYTHON}
    return option_array(given | {"stream": stream and not (options.sample and options.n_best > 1)})


class NativeDecoder:
    """A model, its queue in the library, and threads. They end when it is collected; a fork gets its own."""

    def __init__(self, model: NativeModel, *, n_threads: int) -> None:
        self.n_threads, self.library, self._model = n_threads, model.library, model
        self._lock, self._pid = threading.Lock(), 0
        self._handle = ctypes.c_void_p()
        self._threads: list[threading.Thread] = []

    def read_ids(self, ids: Ids) -> Ids:
        """The model's input for a source, or for a prompt."""
        if not isinstance(self._model.settings, GPTSettings):
            return (*ids, EOS)
        return [self._model.start if i == BOS else i for i in ids]

    @property
    def handle(self) -> ctypes.c_void_p:
        """The queue of this process. One of a parent process has no threads here, and perhaps a lock that is held."""
        if self._pid == os.getpid():
            return self._handle
        with self._lock:
            if self._pid != os.getpid():
                handle, pid = ctypes.c_void_p(), os.getpid()
                self.library.transduce_queue_new(self._model.handle, self.n_threads, PATIENCE, ctypes.byref(handle))
                self._handle, self._threads = handle, []
                weakref.finalize(self, _free, self.library, self._model, handle, self._threads, pid)
                self._pid = pid
            return self._handle

    def start_threads(self) -> None:
        """Start the threads that decode for all; without them, callers decode in `NativeCaller.work`."""
        handle = self.handle
        if len(self._threads) == self.n_threads:
            return
        with self._lock:
            while len(self._threads) < self.n_threads:
                # Daemons: they stay in C until `_free` ends them.
                serve = self.library.transduce_serve
                thread = threading.Thread(target=serve, args=(handle,), name="decode", daemon=True)
                thread.start()
                self._threads.append(thread)

    def workload(self) -> dict[str, int]:
        """Numbers of waiting sentences and their tokens, of sentences that have not ended, of steps and their rows."""
        load = Load()
        self.library.transduce_queue_load(self.handle, ctypes.byref(load))
        return {name: getattr(load, name) for name in _LOAD}

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, *, on_token: OnToken | None = None
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate`. The calling thread decodes too."""
        if len(sources) > 1 and self.n_threads > 1:
            self.start_threads()
        caller = NativeCaller(self)
        try:
            caller.submit(sources, options, stream=on_token is not None, works=True)
            found: list[list[Hypothesis]] = [[]] * len(sources)
            n_seen, n_open = [0] * len(sources), 1
            while n_open:
                n_open = caller.work(_SLICE if on_token is None else _STREAM_SLICE)
                for event in caller.collect() if on_token is not None or not n_open else ():
                    tokens = event.tokens
                    if event.outcome == "done":
                        found[event.ticket] = event.hypotheses
                        tokens = event.hypotheses[0].ids[n_seen[event.ticket] :] if event.hypotheses else ()
                    elif event.outcome != "tokens":
                        raise TransduceError(
                            f"a translation was {event.outcome}; {event.reason or 'its engine was closed'}"
                        )
                    if on_token is not None:
                        n_seen[event.ticket] += len(tokens)
                        for token in tokens:
                            on_token(event.ticket, token)
            return found
        finally:
            caller.free()


def _free(library: ctypes.CDLL, model: Any, handle: ctypes.c_void_p, threads: list[threading.Thread], pid: int) -> None:
    """End and free a queue. `model` is an argument so that it lives until then."""
    if os.getpid() != pid:
        return
    library.transduce_queue_close(handle)
    if threading.current_thread() in threads:
        return  # collected in one of these threads, which cannot join itself: leave the memory
    for thread in threads:
        thread.join()
    library.transduce_queue_free(handle)


class NativeCaller:
    """Inputs of one caller: submit them, decode or let decode, collect events."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder, self._library, self._pid = decoder, decoder.library, os.getpid()
        self._handle = ctypes.c_void_p()
        self._library.transduce_client_new(decoder.handle, ctypes.byref(self._handle))
        self._sizes = (ctypes.c_int64 * 4)()  # of events, hypotheses, tokens and weights
        first = ctypes.addressof(self._sizes)
        self._size_addresses = tuple(first + i * ctypes.sizeof(ctypes.c_int64) for i in range(4))

    def fileno(self) -> int:
        """A file descriptor that can be read when there is something to collect."""
        found = ctypes.c_int32()
        self._library.transduce_client_fd(self._handle, ctypes.byref(found))
        return found.value

    def submit(
        self,
        sources: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        stream: bool,
        first_ticket: int = 0,
        seconds: float = math.inf,
        works: bool = False,
    ) -> None:
        """Add sentences with the tickets first_ticket, first_ticket + 1, ...; all or, with an error, none.

        `works`: this thread calls `work` next.
        """
        if os.getpid() != self._pid:
            raise TransduceError("a decoding queue cannot be used after a fork; open another one")
        n = len(sources)
        ids = packed([self._decoder.read_ids(source.ids) for source in sources])
        limits = array("i", [source.limit for source in sources])
        none: _Arrays = (None, None)
        prefixes, allowed, numbers = none, none, none[:1]
        if any(source.prefix for source in sources):
            prefixes = packed([source.prefix for source in sources])
        if options.sample:
            numbers = (_numbers(sources, options.n_best, options.seed),)
        elif any(source.allowed is not None for source in sources):
            allowed = _packed_lists(sources)
        arrays = (*ids, *prefixes, *allowed, limits, *numbers)
        sentences = Sentences(*(None if values is None else address(values) for values in arrays), n)
        submit, given = self._library.transduce_submit, _native_options(options, stream)
        submit(self._handle, given, len(given), ctypes.byref(sentences), first_ticket, seconds, works)

    def cancel(self, ticket: int) -> None:
        """End a sentence at the next step; no effect if it has ended."""
        self._library.transduce_cancel(self._handle, ticket)

    def work(self, seconds: float) -> int:
        """Decode in this thread until all sentences have ended or time is up; returns how many have not ended."""
        n_open = ctypes.c_int64()
        self._library.transduce_work(self._handle, seconds, ctypes.byref(n_open))
        return n_open.value

    def collect(self) -> list[Event]:
        """The events of the sentences since the last call."""
        self._library.transduce_collect(self._handle, 0.0, *self._size_addresses)
        n_events, n, n_tokens, n_weights = self._sizes
        if not n_events:
            return []
        columns = zip("qiiiffbii", (*[n_events] * 3, *[n] * 5, n_tokens), strict=True)
        arrays = [array(kind, [0]) * max(1, size) for kind, size in columns]
        weights = np.empty(n_weights, np.float32)
        self._library.transduce_results(self._handle, *map(address, arrays), address(weights))
        tickets, outcomes, counts, lengths, log_probs, scores, finished, widths, tokens = arrays
        events, place, end, used = [], 0, 0, 0
        for ticket, outcome, count in zip(tickets, outcomes, counts, strict=True):
            found = []
            for _ in range(count):
                ids = tuple(tokens[end : (end := end + lengths[place])])
                attention = None
                if width := widths[place]:
                    attention = weights[used : (used := used + len(ids) * width)].reshape(len(ids), width)
                found.append(Hypothesis(ids, log_probs[place], scores[place], finished[place] == 1, attention))
                place += 1
            events.append(_event(ticket, OUTCOMES[outcome], found))
        return events

    def close(self) -> None:
        """Cancel all and take no more."""
        if os.getpid() == self._pid:
            self._library.transduce_client_close(self._handle)

    def free(self) -> None:
        """Forget all. No other call may run, or follow."""
        if self._handle and os.getpid() == self._pid:
            self._library.transduce_client_free(self._handle)
        self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.free()


class NativeBatcher:
    """Continuous batching for a `DecodingQueue`: inputs are admitted at every decoding step.

    The library wakes the event loop, without a thread between them.
    """

    def __init__(self, decoder: NativeDecoder, deliver: Deliver) -> None:
        self._decoder, self._deliver = decoder, deliver
        decoder.start_threads()
        self._caller = NativeCaller(decoder)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._caller.fileno(), self._read)

    def submit(
        self,
        first_ticket: int,
        inputs: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        deadline: float,
        stream: bool,
    ) -> None:
        """See `Batcher.submit`."""
        seconds = deadline - time.monotonic()
        self._caller.submit(inputs, options, stream=stream, first_ticket=first_ticket, seconds=seconds)

    def cancel(self, ticket: int) -> None:
        """See `Batcher.cancel`."""
        self._caller.cancel(ticket)

    def workload(self) -> dict[str, int]:
        """See `Batcher.workload`."""
        return self._decoder.workload()

    async def close(self) -> None:
        """See `Batcher.close`."""
        self._caller.close()
        self._loop.remove_reader(self._caller.fileno())
        self._read()

    def _read(self) -> None:
        for event in self._caller.collect():
            self._deliver(event)


def _numbers(sources: Sequence[DecodingInput], n_samples: int, seed: int) -> np.ndarray:
    """The numbers that decide what is drawn: of each sample of each source, one for each token."""
    samples = [sample_numbers((seed, *s.key), i, s.limit) for s in sources for i in range(n_samples)]
    return np.concatenate(samples) if samples else np.empty(0)


def _packed_lists(sources: Sequence[DecodingInput]) -> _Arrays:
    """The allowed tokens of all sentences, and where those of each begin and end; none where all are allowed."""
    lists = [_NONE if source.allowed is None else np.asarray(source.allowed) for source in sources]
    if any(one.dtype != np.int32 for one in lists):
        return packed(lists)  # slower; refuses what does not fit into 32 bits
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return np.concatenate([_NONE, *lists]), offsets


def _event(ticket: int, outcome: Outcome, hypotheses: list[Hypothesis]) -> Event:
    if outcome == "tokens":
        return Event(ticket, outcome, tokens=hypotheses[0].ids)
    reason = "the native library ran out of memory" if outcome == "failed" else ""
    return Event(ticket, outcome, hypotheses, reason=reason)

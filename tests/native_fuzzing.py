"""Random requests to the C interface of the native library, damaged ones, and a queue that takes them."""

import ctypes
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transduce.decoding.engine import OUTCOMES
from transduce.decoding.native_engine import Load, Sentences, _Pairs, option_array

ODD = (0, -1, 1, 2, 17, 89, 90, 1 << 30, -(1 << 31), (1 << 31) - 1)
ODD_OFFSETS = (-5, 1, 1 << 62, -(1 << 62))
ODD_FLOATS = (0.0, -1.0, 1.0, 0.3, 1e-30, 1e30, math.nan, math.inf)
ODD_SECONDS = (0.0, -1.0, 1e-6, 1e-3, 1e300, math.nan, -math.inf)
MOST = 1000
"""More than any number of `ODD` that the library may accept as a limit."""

Arrays = dict[str, list[Any] | None]
DTYPES = {
    **dict.fromkeys(("ids", "prefixes", "limits", "sources", "inputs", "tokens"), np.int32),
    **dict.fromkeys(("offsets", "prefix_offsets", "source_offsets"), np.int64),
    "numbers": np.float64,
}


@dataclass
class Request:
    options: dict[str, float]
    arrays: Arrays
    n: int
    ticket: int | None = None
    order: float = 0.0


@dataclass
class Pairs:
    arrays: Arrays
    n: int
    heads: list[int] = field(default_factory=list)


def ids_of(pick: random.Random, n: int, n_tokens: int) -> list[int]:
    return [pick.randrange(4, n_tokens) if n_tokens > 4 else 1 for _ in range(n)]


def offsets_of(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))


def fine_request(pick: random.Random, *, n_tokens: int, most: int) -> Request:
    """Up to three sentences, searched for or sampled, with limits of up to `most` tokens."""
    lengths = [pick.choice([1, 2, 5, 20]) for _ in range(pick.randint(1, 3))]
    limits = [pick.choice([1, 2, 9, most]) for _ in lengths]
    beam = pick.choice([1, 1, 2, 5, 9])
    arrays: Arrays = {"ids": ids_of(pick, sum(lengths), n_tokens), "offsets": offsets_of(lengths), "limits": [*limits]}
    options: dict[str, float] = {
        "beam": beam,
        "n_best": pick.randint(1, beam),
        "stream": pick.randrange(2),
        "length_penalty": pick.choice([0.0, 0.6, 1.0]),
        "no_repeat_ngram": pick.choice([0, 0, 1, 3]),
    }
    kind = pick.choice(["plain", "scoreless", "prefixed", "sampled"])
    if kind == "scoreless":
        options |= {"beam": 1, "n_best": 1, "scores": 0}
    if kind == "prefixed" or (kind == "sampled" and pick.random() < 0.5):
        counts = [pick.choice([0, 1, limit]) for limit in limits]
        arrays |= {"prefixes": ids_of(pick, sum(counts), n_tokens), "prefix_offsets": offsets_of(counts)}
    if kind == "sampled":
        options |= {"n_best": beam, "sample": 1, "temperature": pick.choice([0.0, 0.7, 1.0, 1e30])}
        options |= {"top_k": pick.choice([0, 1, 20, 1 << 30]), "top_p": pick.choice([0.0, 0.5, 1.0])}
        arrays["numbers"] = [pick.choice([0.0, pick.random(), 1 - 2**-53]) for _ in range(beam * sum(limits))]
    return Request(options, arrays, len(limits))


def fine_pairs(pick: random.Random, *, n_tokens: int, decoder_only: bool) -> Pairs:
    lengths = [pick.choice([1, 2, 15, 17, 40]) for _ in range(pick.randint(1, 4))]
    inputs = ids_of(pick, sum(lengths), n_tokens)
    tokens = [pick.choice([-1, i]) for i in inputs]
    arrays: Arrays = {"inputs": inputs, "tokens": tokens, "offsets": offsets_of(lengths)}
    if decoder_only:
        return Pairs(arrays, len(lengths))
    counts = [pick.choice([1, 2, 16, 40]) for _ in lengths]
    arrays |= {"sources": ids_of(pick, sum(counts), n_tokens), "source_offsets": offsets_of(counts)}
    heads = [(pick.randrange(2), pick.randrange(6)) for _ in range(pick.choice([0, 0, 1, 3]))]
    return Pairs(arrays, len(lengths), [*itertools.chain(*heads)])


def damage_array(of: Request | Pairs, pick: random.Random) -> None:
    """One number is odd, or an array is missing, or one that is not wanted is there."""
    name = pick.choice(sorted(of.arrays))
    array = of.arrays[name]
    if not array or pick.random() < 0.1:
        of.arrays[name] = None if array else [1] * 200
    elif name.endswith("offsets"):
        array[pick.randrange(len(array))] = pick.choice(ODD_OFFSETS)
        for other, values in of.arrays.items():  # in case that the offsets still fit
            if values is not None and other in ("ids", "prefixes", "sources", "inputs", "tokens"):
                values.append(5)
    else:
        array[pick.randrange(len(array))] = pick.choice(ODD_FLOATS if name == "numbers" else ODD)


def damage_request(request: Request, pick: random.Random) -> None:
    part = pick.choice(["array", "array", "option", "option", "n", "ticket", "order"])
    if part == "array":
        damage_array(request, pick)
    elif part == "option":
        name = pick.choice([*request.options, "temperature", "sample", "no_such_option"])
        request.options[name] = pick.choice([*ODD, *ODD_FLOATS])
    elif part == "n":
        request.n = pick.choice([0, -1, 1, 1 << 31, -(1 << 62)])
    elif part == "ticket":
        request.ticket = pick.choice([*ODD, (1 << 63) - 1, -(1 << 63), (1 << 63) - (1 << 31)])
    else:
        request.order = pick.choice(ODD_SECONDS)


def damage_pairs(pairs: Pairs, pick: random.Random) -> None:
    part = pick.choice(["array", "array", "array", "heads", "n"])
    if part == "array":
        damage_array(pairs, pick)
    elif part == "heads":
        pairs.heads = [pick.choice(ODD), pick.choice(ODD)] if not pairs.heads else [*pairs.heads[:-1], pick.choice(ODD)]
    else:
        pairs.n = pick.choice([0, -1, 1, 1 << 31, -(1 << 62)])


def addressed(arrays: Arrays) -> tuple[dict[str, int], list[np.ndarray]]:
    """Addresses of arrays, and what must live as long as they are used."""
    made = {name: np.array(array, DTYPES[name]) for name, array in arrays.items() if array is not None}
    return {name: array.ctypes.data for name, array in made.items()}, list(made.values())


def with_numbers(request: Request) -> Arrays:
    """Damaged limits and options may ask for more numbers than there were."""
    arrays, numbers = request.arrays, request.arrays.get("numbers")
    if numbers is None:
        return arrays
    n_best = request.options["n_best"]
    wanted = int(n_best if 0 <= n_best <= MOST else 0) * sum(max(0, min(i, MOST)) for i in arrays["limits"] or [])
    return arrays | {"numbers": numbers + [0.5] * (wanted - len(numbers))}


class Session:
    """A queue with two clients, which counts that each sentence that it accepts ends once."""

    def __init__(self, library: ctypes.CDLL, model: ctypes.c_void_p) -> None:
        self.library, self.queue, self.ticket = library, ctypes.c_void_p(), 1000
        self.clients = [ctypes.c_void_p(), ctypes.c_void_p()]
        self.open, self.ended = (Counter[int](), Counter[int]()), (Counter[int](), Counter[int]())
        assert library.transduce_queue_new(model, 1, ctypes.byref(self.queue)) == 0
        for client in self.clients:
            assert library.transduce_client_new(self.queue, ctypes.byref(client)) == 0

    def submit(self, client: int, request: Request) -> bool:
        """Whether it was accepted."""
        addresses, kept = addressed(with_numbers(request))
        sentences = Sentences(n=request.n, **addresses)
        ticket = self.ticket if request.ticket is None else request.ticket
        self.ticket += 10
        options = option_array(request.options)
        code = self.library.transduce_submit(
            self.clients[client], options, len(options), ctypes.byref(sentences), ticket, request.order, 1
        )
        del kept
        if code:
            assert code in (1, 3) and self.library.transduce_last_error()
        else:
            self.open[client].update(range(ticket, ticket + request.n))
        return code == 0

    def disturb(self, pick: random.Random) -> None:
        """Something else that a client may do, now and then with odd arguments."""
        place = pick.randrange(2)
        client, action = self.clients[place], pick.choice(["none", "cancel", "work", "collect", "load", "close"])
        if action == "cancel":
            ticket = pick.choice([*(self.open[place] or [3]), pick.choice(ODD)])
            assert self.library.transduce_cancel(client, ticket) == 0
        elif action == "work":
            seconds, n_open = pick.choice([0.0, 1e-4, math.inf, *ODD_SECONDS[:-2], math.nan]), ctypes.c_int64()
            code = self.library.transduce_work(client, seconds, ctypes.byref(n_open))
            assert code == math.isnan(seconds)
        elif action == "collect":
            self.collect(place)
        elif action == "load":
            load = Load()
            assert self.library.transduce_queue_load(self.queue, ctypes.byref(load)) == 0
            assert 0 <= load.n_waiting <= load.n_open
        elif action == "close" and pick.random() < 0.1:
            self.library.transduce_client_close(client)

    def collect(self, place: int) -> None:
        """The events of a client's sentences."""
        client, sizes = self.clients[place], [ctypes.c_int64() for _ in range(4)]
        assert self.library.transduce_collect(client, *map(ctypes.byref, sizes)) == 0
        n_events, n, n_tokens, n_weights = (size.value for size in sizes)
        types = (np.int64, *[np.int32] * 3, *[np.float32] * 2, np.int8, *[np.int32] * 2, np.float32)
        counts = (*[n_events] * 3, *[n] * 5, n_tokens, n_weights)
        arrays = [np.full(max(1, c), 99, kind) for kind, c in zip(types, counts, strict=True)]
        assert self.library.transduce_results(client, *(array.ctypes.data for array in arrays)) == 0
        tickets, outcomes, n_hypotheses, lengths = (array.tolist() for array in arrays[:4])
        assert sum(n_hypotheses[:n_events]) == n and sum(lengths[:n]) == n_tokens
        assert np.dot(lengths[:n], arrays[7][:n]) == n_weights
        for ticket, outcome in zip(tickets[:n_events], outcomes, strict=False):
            if OUTCOMES[outcome] != "tokens":
                self.ended[place][ticket] += 1

    def end(self) -> None:
        """Decode what is left, and free all."""
        for place, client in enumerate(self.clients):
            n_open = ctypes.c_int64(7)
            assert self.library.transduce_work(client, math.inf, ctypes.byref(n_open)) == 0 and n_open.value == 0
            self.collect(place)
            assert self.open[place] == self.ended[place]
        self.library.transduce_client_free(self.clients[0])
        self.library.transduce_queue_free(self.queue)  # one client outlives it
        self.library.transduce_client_free(self.clients[1])


def lengths_of(offsets: list[Any] | None, n: int) -> list[int]:
    """Those that the library may accept; others count as 1."""
    pairs = itertools.islice(itertools.pairwise(offsets or []), max(0, n))
    return [stop - start if 0 <= stop - start <= MOST else 1 for start, stop in pairs]


def score(library: ctypes.CDLL, model: ctypes.c_void_p, pairs: Pairs) -> bool:
    """Whether the pairs were accepted; if so, they were scored."""
    addresses, kept = addressed(pairs.arrays)
    given = _Pairs(n=pairs.n, **addresses)
    lengths = lengths_of(pairs.arrays["offsets"], pairs.n)
    counts = lengths_of(pairs.arrays.get("source_offsets"), pairs.n)
    heads, n_heads = np.array(pairs.heads, np.int32), len(pairs.heads) // 2
    log_probs = np.full(max(1, sum(lengths)), 9, np.float32)
    weights = np.empty(max(1, n_heads * sum(a * b for a, b in zip(lengths, counts, strict=False))), np.float32)
    of_heads = (heads.ctypes.data, n_heads, weights.ctypes.data) if n_heads else (None, 0, None)
    code = library.transduce_score(model, ctypes.byref(given), log_probs.ctypes.data, *of_heads)
    del kept
    assert code in (0, 1) and (code == 0 or library.transduce_last_error())
    assert code or not pairs.n or not (log_probs[: sum(lengths)] > 1e-4).any()
    return code == 0

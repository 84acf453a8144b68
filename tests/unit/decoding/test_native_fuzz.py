"""Damaged models and hostile requests through the C interface: refused with a reason, or they work.

Arrays always have the sizes that the library is given; everything else may be wrong. `make -C native sanitize` runs
this with AddressSanitizer; TRANSDUCE_NATIVE_FUZZ sets the number of inputs of each kind.
"""

import ctypes
import math
import os
import random
from functools import cache
from typing import Any

import numpy as np

from native_engines import needs_library
from native_fuzzing import Session, damage_pairs, damage_request, fine_pairs, fine_request, score
from oracle.stand_in import untrained
from transduce.config.settings import Settings
from transduce.decoding.native_model import PRECISIONS, READ, Config, NamedTensor, native_config, plain_weights
from transduce.kernels.library import load_library

pytestmark = needs_library
N_INPUTS = int(os.environ.get("TRANSDUCE_NATIVE_FUZZ", "600"))
N_TOKENS = 90
SIZES: dict[str, Any] = {"d_model": 42, "d_ff": 33, "n_heads": 6, "n_kv_heads": 3, "n_decoder_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "learned": {
        **{"n_encoder_layers": 1, "positions": "learned", "max_positions": 50, "activation": "gelu"},
        **{"embedding_norm": True, "tie": "none", "output_bias": True, "norm_eps": 1e-3},
    },
    "ssru": {"n_encoder_layers": 1, "decoder_self": "ssru", "residual": "pre"},
    "t5": {"n_encoder_layers": 2, "positions": "t5", "d_key": 5, "d_value": 9, "residual": "pre"},
    "gpt": {"kind": "gpt", "positions": "learned", "max_positions": 60, "one_end": True, "residual": "pre"},
}
Shaped = dict[str, tuple[np.ndarray, int, int]]
"""Arrays, and the numbers of rows and columns that the library is given."""


@cache
def library() -> ctypes.CDLL:
    """The library, whose functions here return their codes."""
    found = load_library.__wrapped__()
    assert not isinstance(found, str), found
    for function in vars(found).values():
        if isinstance(function, ctypes._CFuncPtr):
            del function.errcheck
    return found


@cache
def tensors_of(name: str, precision: int = 0) -> tuple[Config, Shaped]:
    task = "causal" if name == "gpt" else "translation"
    settings = Settings.from_mapping({"task": task, "model": SIZES | MODELS[name]})
    model = untrained(settings, n_src=N_TOKENS, n_tgt=N_TOKENS)
    weights = plain_weights({name: tensor.numpy() for name, tensor in model.state_dict().items()}, settings.model)
    shaped = {name: (a, a.shape[0] if a.ndim == 2 else 1, a.shape[-1]) for name, a in weights.items()}
    return native_config(settings.model, PRECISIONS[precision], n_src=N_TOKENS, n_tgt=N_TOKENS), shaped


class Model:
    """A model from tensors; `handle` is null if it was refused."""

    def __init__(self, config: Config, tensors: Shaped) -> None:
        self.handle = ctypes.c_void_p()
        arrays = [np.ascontiguousarray(t).reshape(-1) for t, *_ in tensors.values()]
        given = [NamedTensor(name.encode(), *shape) for name, (_, *shape) in tensors.items()]

        @READ
        def read(number: int, first: int, n: int, to: int) -> bool:
            columns = given[number].columns
            assert 0 <= first < first + n <= given[number].rows
            rows = arrays[number][first * columns : (first + n) * columns]
            ctypes.memmove(to, rows.ctypes.data, rows.nbytes)
            return True

        table = (NamedTensor * len(given))(*given)
        new = library().transduce_model_new
        code = new(ctypes.byref(config), table, len(given), read, ctypes.byref(self.handle))
        assert code in (0, 1, 2) and (code == 0) == bool(self.handle)
        assert code == 0 or library().transduce_last_error()

    def free(self) -> None:
        library().transduce_model_free(self.handle)


def use(model: Model, pick: random.Random, *, n_tokens: int = N_TOKENS, decoder_only: bool = False) -> None:
    """Translate, sample and score."""
    session = Session(library(), model.handle)
    for _ in range(2):
        session.submit(0, fine_request(pick, n_tokens=n_tokens, most=4))
    session.end()
    score(library(), model.handle, fine_pairs(pick, n_tokens=n_tokens, decoder_only=decoder_only))


def damage_config(config: Config, pick: random.Random) -> Config:
    damaged = Config.from_buffer_copy(bytes(config))
    for _ in range(pick.randint(1, 3)):
        name, kind = pick.choice(Config._fields_)
        if kind is ctypes.c_float:
            setattr(damaged, name, pick.choice([0.0, -1.0, math.nan, math.inf, 1e-30, 1e30]))
        else:
            old = getattr(damaged, name)
            odd = [0, -1, 1, old + 1, old - 1, 2 * old, 1 << 20, -(1 << 31), (1 << 31) - 1]
            setattr(damaged, name, pick.choice(odd))
    return damaged


def damage_tensors(tensors: Shaped, pick: random.Random) -> Shaped:
    damaged = dict(tensors)
    name = pick.choice(sorted(damaged))
    tensor, rows, columns = damaged.pop(name)
    if pick.random() < 0.5:
        damaged[name] = (tensor, columns, rows) if rows != columns else (tensor, 1, columns)
    elif pick.random() < 0.5:
        damaged[name] = (np.full_like(tensor, pick.choice([np.nan, np.inf, 1e38])), rows, columns)
    return damaged


def test_damaged_models_are_refused_or_work() -> None:
    """Shapes in the table of tensors are always those of the memory behind them."""
    pick, n_refused = random.Random(5), 0
    for number in range(N_INPUTS):
        name = pick.choice(list(MODELS))
        config, tensors = tensors_of(name, pick.randrange(3))
        if number % 3:
            config = damage_config(config, pick)
        else:
            tensors = damage_tensors(tensors, pick)
        model = Model(config, tensors)
        n_refused += not model.handle
        if model.handle:
            use(model, pick, n_tokens=min(config.n_tgt, config.n_src), decoder_only=name == "gpt")
            model.free()
    assert N_INPUTS / 3 < n_refused < 0.9 * N_INPUTS


@cache
def models() -> list[tuple[Model, bool]]:
    """Of each kind and precision; whether they have no encoder."""
    return [(Model(*tensors_of(name, p)), name == "gpt") for name in MODELS for p in range(3)]


def test_hostile_requests_are_refused_or_work() -> None:
    """Streams of requests with cancellations, odd orders and closed clients: each accepted sentence ends once."""
    pick, n_accepted, session = random.Random(6), 0, None
    for number in range(N_INPUTS):
        if session is None or pick.random() < 0.2:
            if session is not None:
                session.end()
            model, _ = models()[number % len(models())]
            session = Session(library(), model.handle)
        request = fine_request(pick, n_tokens=N_TOKENS, most=30)
        for _ in range(pick.choice([0, 1, 1, 2])):
            damage_request(request, pick)
        n_accepted += session.submit(pick.randrange(2), request)
        session.disturb(pick)
    assert session is not None
    session.end()
    assert N_INPUTS / 5 < n_accepted < 0.8 * N_INPUTS


def test_hostile_scoring_requests_are_refused_or_work() -> None:
    pick, n_accepted = random.Random(7), 0
    for number in range(N_INPUTS):
        model, decoder_only = models()[number % len(models())]
        pairs = fine_pairs(pick, n_tokens=N_TOKENS, decoder_only=decoder_only)
        for _ in range(pick.choice([0, 1, 1, 2])):
            damage_pairs(pairs, pick)
        n_accepted += score(library(), model.handle, pairs)
    assert N_INPUTS / 5 < n_accepted < 0.8 * N_INPUTS


def test_null_pointers_are_refused() -> None:
    null, lib = ctypes.c_void_p(), library()
    assert lib.transduce_model_new(null, null, 0, READ(), null) == lib.transduce_queue_new(null, 1, null) == 1
    assert lib.transduce_client_new(null, null) == lib.transduce_submit(null, null, 0, null, 0, 1.0, 0) == 1
    assert lib.transduce_client_fd(null, null) == lib.transduce_cancel(null, 0) == 1
    assert lib.transduce_work(null, 1.0, null) == lib.transduce_serve(null) == 1
    assert lib.transduce_collect(*[null] * 5) == lib.transduce_results(*[null] * 11) == 1
    assert lib.transduce_score(null, null, null, null, 0, null) == lib.transduce_queue_load(null, null) == 1
    for name in ("queue_close", "queue_free", "client_close", "client_free", "model_free"):
        getattr(lib, f"transduce_{name}")(null)

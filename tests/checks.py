"""Check the arguments and the results of every function of a package that takes or returns tensors, with shapes.

In each test the first calls of a function are checked, and then some: the checks took half of the time of a training.
"""

import functools
import inspect
import re
import typing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

CONTEXT = jaxtyping.jaxtyped("context")
"""Within it a letter of a shape has one value."""
TENSORS = re.compile(r"Tensor|ndarray")
FIRST, EVERY = 8, 16
"""In a test, the first 8 calls of a function are checked, then every 16th."""
CONF = BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError)
"""An int is accepted as a float (PEP 484)."""


@dataclass
class Calls:
    """The number of calls of a function in a test."""

    test: int = 0
    n: int = 0


_tests = [0]


def begin_test() -> None:
    """Count the calls of all functions from 0."""
    _tests[0] += 1


def install(package: str) -> None:
    """jaxtyping's hook, with `checked` in place of its decorator, which took half of the time of a training."""
    jaxtyping.install_import_hook(package, None)
    jaxtyping.jaxtyped = lambda typechecker: checked  # type: ignore[assignment]


def checked(given: Any) -> Any:
    """A function that checks its types; a dataclass checks those of its fields when it is made."""
    if inspect.isclass(given):
        if "__dataclass_fields__" in vars(given):
            given.__init__ = checked(given.__init__)
        return given
    if "<locals>" in given.__qualname__:  # would be compiled at every call of the function around it
        return given
    if not TENSORS.search(" ".join(map(str, given.__annotations__.values()))):  # mypy checks the others
        return given
    if ".triton_" in given.__module__:  # Triton compiles the source, PyTorch's operators read the annotations
        return given
    hints = {name: _resolved(hint, given.__globals__) for name, hint in given.__annotations__.items()}
    if inspect.isgeneratorfunction(given):
        hints.pop("return", None)  # its values are checked where they are used
    given.__annotations__ = hints
    checking, calls = beartype(given, conf=CONF), Calls()

    @functools.wraps(given)
    def call(*args: Any, **kwargs: Any) -> Any:
        if calls.test != _tests[0]:
            calls.test, calls.n = _tests[0], 0
        calls.n += 1
        if jaxtyping.config.jaxtyping_disable or (calls.n > FIRST and calls.n % EVERY):
            return given(*args, **kwargs)
        with CONTEXT:
            return checking(*args, **kwargs)

    return call


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """The type that a string stands for: Any if one of its names is only imported for type checkers."""
    holder = SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:
        return Any

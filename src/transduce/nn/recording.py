"""Record, replace or switch off any intermediate value of a model, by name.

Every module has its output under its own name (`encoder.blocks.0.feed_forward`) and its first input under
`NAME.input`; several outputs are `NAME.0`, `NAME.1`. Attention has more (`nn.attention.Attention`): the arguments of
`attend` (`NAME.query`, `.key`, `.value`, `.bias`), `NAME.scores` before the bias, and `NAME.weights`. Recurrent units
have `NAME.gates.i` and so on. Nothing is computed or kept while nobody records.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import SettingsError, nearest
from transduce.nn.attention import Attention, attention_weights
from transduce.nn.bias import SpecialBias
from transduce.nn.patterns import FullPattern
from transduce.nn.positions import Positions
from transduce.nn.recurrent import GRU, LSTM

Change = Callable[[Tensor], Tensor]
"""From a value [B, ...] to the one that takes its place."""
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_ONE_AT_A_TIME = threading.RLock()  # modules have hooks meanwhile


class Recording(dict[str, list[Tensor]]):
    """Values by name, in the order of computation; a name has several where a decoder goes step by step."""

    def value(self, name: str) -> Tensor:
        """One value [B, ...]; the steps of a decoder together along the axis of positions.

        Attention has positions on the axis before the last one; units without such an axis get one after the batch.
        """
        if name not in self:
            raise SettingsError(f"{name}: not recorded; recorded are {', '.join(self) or 'no values'}")
        steps = self[name]
        if steps[0].dim() == 2:
            return torch.stack(steps, 1)
        if len({step.shape[-1] for step in steps}) > 1:
            steps = _aligned(steps, 0.0 if name.endswith(".weights") else -math.inf)
        return steps[0] if len(steps) == 1 else torch.cat(steps, -2)


def _aligned(steps: Sequence[Tensor], hidden: float) -> list[Tensor]:
    """Scores or weights [B, H, Q, C] of segments, whose last keys are their queries, with a column for every key.

    `hidden`: the value for keys that a segment does not have.
    """
    total, end, found = sum(step.shape[-2] for step in steps), 0, []
    for step in steps:
        end += step.shape[-2]
        found.append(F.pad(step, (end - step.shape[-1], total - end), value=hidden))
    return found


@contextmanager
def record(model: nn.Module, names: str | Iterable[str] = "*") -> Iterator[Recording]:
    """Record the values that the model computes inside, in this thread. The model's output does not change.

    Args:
        model: Any model or layer of this package.
        names: Patterns of names, such as "encoder.blocks.*.weights".

    >>> with record(model, "decoder.blocks.*.cross_attention.weights") as found:     # doctest: +SKIP
    ...     model(src, tgt_in)
    >>> found.value("decoder.blocks.0.cross_attention.weights").shape                # doctest: +SKIP
    torch.Size([1, 4, 7, 9])
    """
    recorder = _Recorder(model, (names,) if isinstance(names, str) else tuple(names))
    with _ONE_AT_A_TIME, ExitStack() as changes:
        for module in recorder.names:
            changes.callback(module.register_forward_hook(recorder.after).remove)
            if isinstance(module, Attention):
                changes.enter_context(_replaced(module, "attend", recorder.attend(module)))
            elif isinstance(module, (LSTM, GRU)):
                changes.enter_context(_replaced(module, "gates", recorder.gates(module)))
        yield recorder.found


class _Recorder:
    """The hooks of `record`. A twin of the model has them too, where they keep nothing."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...]) -> None:
        self.names = {module: name for name, module in model.named_modules() if name}
        self.found = Recording()
        self._patterns, self._thread = patterns, threading.get_ident()

    def __deepcopy__(self, memo: object) -> _Recorder:
        return self

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        """The hook after each module."""
        if not self._records(module):
            return
        name = self.names[module]
        if inputs:
            self._keep(f"{name}.input", inputs[0])
        self._keep(name, output)
        for n, part in enumerate(output if isinstance(output, tuple) else ()):
            self._keep(f"{name}.{n}", part)

    def attend(self, module: Attention) -> Callable[..., Tensor]:
        """A replacement for `module.attend`."""
        name, attend, arguments = self.names[module], module.attend, _arguments(type(module))

        def attend_and_record(*inputs: Any, **options: Any) -> Tensor:
            if self._records(module):
                for argument, value in (*zip(arguments, inputs, strict=False), *options.items()):
                    if self._wants(f"{name}.{argument}"):
                        plain = value.dense(inputs[0]) if isinstance(value, SpecialBias) else value
                        self._keep(f"{name}.{argument}", plain)
                for point, compute in (("scores", module.raw_scores), ("weights", module.weights)):
                    if self._wants(f"{name}.{point}"):
                        self._keep(f"{name}.{point}", compute(*inputs, **options))
            return attend(*inputs, **options)

        return attend_and_record

    def gates(self, module: LSTM | GRU) -> Callable[..., tuple[Tensor, ...]]:
        """A replacement for `module.gates`."""
        name, gates = self.names[module], module.gates

        def gates_and_record(x: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
            values = gates(x, hidden)
            if self._records(module):
                for letter, value in zip(module.gate_names, values, strict=True):
                    self._keep(f"{name}.gates.{letter}", value)
            return values

        return gates_and_record

    def _records(self, module: nn.Module) -> bool:
        return threading.get_ident() == self._thread and module in self.names

    def _wants(self, name: str) -> bool:
        return _is_wanted(name, self._patterns)

    def _keep(self, name: str, value: object) -> None:
        if isinstance(value, Tensor) and self._wants(name):
            self.found.setdefault(name, []).append(value)


@lru_cache(maxsize=1 << 14)
def _is_wanted(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@cache
def _arguments(kind: type[Attention]) -> tuple[str, ...]:
    """The names of the arguments of `attend`, which `weights` spells out in every class."""
    return tuple(inspect.signature(kind.weights).parameters)[1:]


@contextmanager
def recorded_heads(model: nn.Module, heads: Sequence[tuple[int, int]]) -> Iterator[Callable[[], Tensor]]:
    """Record some heads of the cross-attention of a Transformer's decoder, given as (layer, head), from 0.

    Yields a function that gives their weights [B, heads, T, S], without dropout, after the model was called inside.
    """
    names = {layer: f"decoder.blocks.{layer}.cross_attention" for layer, _ in heads}
    with record(model, [f"{name}.{part}" for name in names.values() for part in ("query", "key", "bias")]) as found:

        def weights() -> Tensor:
            parts = []
            for layer, head in heads:
                query, key, bias = (found[f"{names[layer]}.{part}"][0] for part in ("query", "key", "bias"))
                group = head * key.shape[1] // query.shape[1]
                parts.append(attention_weights(query[:, [head]], key[:, [group]], bias))
            return torch.cat(parts, 1)

        yield weights


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Change | Tensor | None]) -> Iterator[None]:
    """Replace values that the model computes inside, in every thread: meant for a model of one's own, see `twin`.

    Args:
        model: Any model or layer of this package.
        changes: By name: a function of the value, its replacement, or None for zeros. Names are those of `record`
            except `NAME.scores`; replaced weights are used as they are.

    Raises:
        SettingsError: The model has no such value, or a replacement has another shape.

    >>> with intervene(model, {"encoder.blocks.0.feed_forward": None}):     # doctest: +SKIP
    ...     model(src, tgt_in)
    """
    modules = dict(model.named_modules())
    with _ONE_AT_A_TIME, ExitStack() as hooks:
        for name, change in changes.items():
            hooks.enter_context(_changed(modules, name, _as_function(name, change)))
        yield


def _as_function(name: str, change: Change | Tensor | None) -> Change:
    def changed(value: Tensor) -> Tensor:
        if change is None:
            return torch.zeros_like(value)
        found = change if isinstance(change, Tensor) else change(value)
        if found.shape != value.shape:
            raise SettingsError(f"{name} has the shape {[*value.shape]}, its replacement {[*found.shape]}")
        return found

    return changed


@contextmanager
def _changed(modules: Mapping[str, nn.Module], name: str, change: Change) -> Iterator[None]:
    owner, _, point = name.rpartition(".")
    target = modules.get(name, modules.get(owner))
    # Hooks compare the module with their target: a twin has copies of them.
    if target is not None and name in modules:
        handle = target.register_forward_hook(
            lambda module, _inputs, output: change(output) if module is target else None
        )
    elif target is not None and point == "input":
        handle = target.register_forward_pre_hook(
            lambda module, inputs: (change(inputs[0]), *inputs[1:]) if module is target else None
        )
    elif isinstance(target, Attention) and point in (*_arguments(type(target)), "weights"):
        with _replaced(target, "attend", _with_change(target, point, change)):
            yield
        return
    else:
        raise SettingsError(f"{name}: the model has no such value; list them with record(model)")
    try:
        yield
    finally:
        handle.remove()


def _with_change(module: Attention, point: str, change: Change) -> Callable[..., Tensor]:
    attend, arguments = module.attend, _arguments(type(module))

    def attend_changed(*inputs: Any, **options: Any) -> Tensor:
        if point == "weights":
            return module.combine(change(module.weights(*inputs, **options)), *inputs, **options)
        given = dict(zip(arguments, inputs, strict=False)) | options
        given[point] = change(given[point])
        positional = [given.pop(name) for name in arguments[: len(inputs)]]
        return attend(*positional, **given)

    return attend_changed


@contextmanager
def _replaced(module: nn.Module, method: str, function: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get(method)
    setattr(module, method, function)
    try:
        yield
    finally:
        if before is None:
            delattr(module, method)
        else:
            setattr(module, method, before)


def twin(model: ModuleT) -> ModuleT:
    """A copy of the model that shares its weights. `record` and `switched_off` of either do not affect the other."""
    with _ONE_AT_A_TIME:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        found = copy.deepcopy(model, shared)
    for module in found.modules():
        for method in ("attend", "gates"):  # those of `_replaced` belong to the model
            module.__dict__.pop(method, None)
    return found


# --- switching parts off ----------------------------------------------------------------------------------------------


def switches(model: nn.Module) -> dict[str, str]:
    """The parts of a model that can be switched off: titles by name, for `switched_off`."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        heads = getattr(module, "n_heads", 0)
        if isinstance(module, Attention) and heads:
            found |= {f"{name}.heads.{h}": f"{title(name)}, head {h + 1}" for h in range(heads)}
        elif name.endswith(".feed_forward"):
            found[name] = title(name)
        elif isinstance(module, Positions) and type(module) is not Positions:
            found[name] = f"{title(name.rpartition('.')[0])}: positions"
        elif getattr(module, "patterns", ()) and name == "decoder":
            found["decoder.mask"] = "causal mask of the decoder"
    return found


def title(name: str) -> str:
    """A module's name for people.

    >>> title("encoder.blocks.0.self_attention")
    'encoder layer 1, self-attention'
    """
    words = name.replace("blocks.", "").replace("attentions.", "attention.").split(".")
    stack, *rest = words
    layer = [f" layer {int(word) + 1}" for word in rest if word.isdigit()][:1]
    what = " ".join(word.replace("_", "-") for word in rest if not word.isdigit() and word != "layers")
    stack = stack.replace("src_", "source ").replace("tgt_", "target ").replace("_", " ")
    return "".join((stack, *layer)) + (f", {what}" if what else "")


def switched_off(model: ModuleT, names: Sequence[str]) -> ModuleT:
    """A twin of the model without these parts (names of `switches`); without names, the model itself.

    A head is switched off by zeros in place of its output; a feed-forward network likewise, so that only the residual
    connection stays; positions by the scheme that does nothing; the causal mask by a pattern that hides nothing.

    Raises:
        SettingsError: The model has no such part.
    """
    if not names:
        return model
    known, found = switches(model), twin(model)
    for name in names:
        if name not in known:
            kinds = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", one) for one in known))
            advice = f"allowed are {kinds}" if known else "this model has no part that can be; leave it out"
            raise SettingsError(f"off = '{name}': cannot be switched off{nearest(name, known)}; {advice}")
        owner, _, last = name.rpartition(".")
        if owner.endswith(".heads"):
            module: Any = found.get_submodule(owner.removesuffix(".heads"))
            module.output.register_forward_pre_hook(_without_head(int(last), module.d_head))
        elif name == "decoder.mask":
            found.get_submodule("decoder").patterns = (FullPattern(),)  # type: ignore[assignment]
        elif last == "positions":
            scheme: Any = found.get_submodule(name)
            plain = Positions(d_model=scheme.d_model, d_head=scheme.d_head, max_positions=scheme.max_positions)
            setattr(found.get_submodule(owner), last, plain)
        else:
            found.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output))
    return found


def _without_head(head: int, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    def clear(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        merged = inputs[0].clone()
        merged[..., head * width : (head + 1) * width] = 0
        return merged

    return clear

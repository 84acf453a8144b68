"""Record, replace or switch off any intermediate value of a model, by name.

The output of a module has the module's name (`encoder.blocks.0.feed_forward`); several outputs are `NAME.0`, `NAME.1`.
The module's first input is `NAME.input`. Attention (`nn.attention.Attention`) also has the arguments of `attend`
(`NAME.query`, `.key`, `.value`, `.bias`), the scores without the bias (`NAME.scores`), and `NAME.weights`. Recurrent
units have their gates, such as `NAME.gates.i`. Without a recorder, nothing extra is computed or kept.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import SettingsError, nearest
from transduce.nn.attention import Attention, MultiHeadAttention
from transduce.nn.bias import PatternBias, dense_bias
from transduce.nn.patterns import FullPattern
from transduce.nn.positions import Positions
from transduce.nn.recurrent import GRU, LSTM
from transduce.nn.stack import Decoder

Change = Callable[[Tensor], Tensor]
"""Function from a value [B, ...] to its replacement."""
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_ONE_AT_A_TIME = threading.RLock()  # modules have hooks while values are recorded or replaced


class Recording(dict[str, list[Tensor]]):
    """Recorded values by name, in the order of computation. A decoder that runs step by step adds a value per step."""

    def value(self, name: str) -> Tensor:
        """Return the value with this name, [B, ...], with a decoder's steps concatenated along the axis of positions.

        That is the axis before the last. Values of recurrent units have no such axis; it is inserted after the batch.
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
    """Give the scores or weights [B, H, Q, C] of all segments of a text one column for every key of the text.

    The last keys of a segment are its queries. `hidden`: the value for keys that a segment does not attend to.
    """
    total, end, aligned = sum(step.shape[-2] for step in steps), 0, []
    for step in steps:
        end += step.shape[-2]
        aligned.append(F.pad(step, (end - step.shape[-1], total - end), value=hidden))
    return aligned


@contextmanager
def record(model: nn.Module, names: str | Iterable[str] = "*") -> Iterator[Recording]:
    """Record values that the model computes inside the `with` block, in this thread. The model's output is unchanged.

    Args:
        model: Any model or layer of this package.
        names: One or more patterns of names of values, such as "encoder.blocks.*.weights".

    >>> with record(model, "decoder.blocks.*.cross_attention.weights") as recording:  # doctest: +SKIP
    ...     model(src, tgt_in)
    >>> recording.value("decoder.blocks.0.cross_attention.weights").shape             # doctest: +SKIP
    torch.Size([1, 4, 7, 9])
    """
    recording, thread = Recording(), threading.get_ident()
    patterns = (names,) if isinstance(names, str) else tuple(names)

    def visit(name: str, value: Tensor) -> None:
        recording.setdefault(name, []).append(value)

    def wants(name: str) -> bool:
        return threading.get_ident() == thread and _matches(name, patterns)

    modules = {name: module for name, module in model.named_modules() if name}
    with _visiting(modules, wants, visit):
        yield recording


@lru_cache(maxsize=1 << 14)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Change | Tensor | None]) -> Iterator[None]:
    """Replace values that the model computes inside the `with` block, in every thread.

    If other code uses the model at the same time, pass its `twin` instead.

    Args:
        model: Any model or layer of this package.
        changes: For each name of a value, a function of the value, a replacement, or None for zeros. The names are
            those of `record` except `NAME.scores`. Replaced attention weights are used as given.

    Raises:
        SettingsError: The model has no such value, or a replacement has another shape.

    >>> with intervene(model, {"encoder.blocks.0.feed_forward": None}):     # doctest: +SKIP
    ...     model(src, tgt_in)
    """

    def visit(name: str, value: Tensor) -> Tensor:
        change = changes[name]
        if change is None:
            return torch.zeros_like(value)
        result = change if isinstance(change, Tensor) else change(value)
        if result.shape != value.shape:
            raise SettingsError(f"{name} has the shape {[*value.shape]}, its replacement {[*result.shape]}")
        return result

    modules = dict(model.named_modules())
    owners = [_owner(modules, name) for name in changes]
    with _visiting({owner: modules[owner] for owner in owners}, changes.__contains__, visit):
        yield


def _owner(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return the name of the module that computes the value `name`; `SettingsError` if there is no such value."""
    if name in modules:
        return name
    owner, _, point = name.rpartition(".")
    module = modules.get(owner)
    of_attention = (*_arguments(type(module)), "weights") if isinstance(module, Attention) else ()
    if module is None or point not in ("input", *of_attention):
        raise SettingsError(f"{name}: the model has no such value; list them with record(model)")
    return owner


@contextmanager
def _visiting(
    modules: Mapping[str, nn.Module], wants: Callable[[str], bool], visit: Callable[[str, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call `visit(name, value)` for each wanted value inside the `with` block; a result replaces the value."""
    hooks = _Hooks({module: f"{name}." if name else "" for name, module in modules.items()}, wants, visit)
    with _ONE_AT_A_TIME, ExitStack() as changes:
        for module in modules.values():
            changes.callback(module.register_forward_pre_hook(hooks.before).remove)
            changes.callback(module.register_forward_hook(hooks.after).remove)
            if isinstance(module, Attention):
                changes.enter_context(_replaced(module, "attend", hooks.attend(module)))
            elif isinstance(module, (LSTM, GRU)):
                changes.enter_context(_replaced(module, "gates", hooks.gates(module)))
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Hooks:
    """The forward hooks of `_visiting`. Copies of the model (`twin`) get these hooks too, which ignore the copies.

    prefixes: The name of each visited module, followed by a dot; empty for the model itself.
    """

    prefixes: Mapping[nn.Module, str]
    wants: Callable[[str], bool]
    visit: Callable[[str, Tensor], Tensor | None]

    def __deepcopy__(self, memo: object) -> _Hooks:
        return self

    def visited(self, name: str, value: Any) -> Any:
        """Visit a value if it is a wanted tensor; return its replacement, or the value itself."""
        changed = self.visit(name, value) if isinstance(value, Tensor) and self.wants(name) else None
        return value if changed is None else changed

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Visit a module's first input (a forward pre-hook)."""
        if module not in self.prefixes or not inputs:
            return None
        return (self.visited(f"{self.prefixes[module]}input", inputs[0]), *inputs[1:])

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Visit a module's outputs (a forward hook)."""
        if module not in self.prefixes:
            return None
        prefix = self.prefixes[module]
        if isinstance(output, tuple):
            return tuple(self.visited(f"{prefix}{n}", part) for n, part in enumerate(output))
        return self.visited(prefix.removesuffix("."), output)

    def attend(self, module: Attention) -> Callable[..., Tensor]:
        """Return a replacement for `module.attend` that visits its arguments, scores and weights."""
        prefix, attend, names = self.prefixes[module], module.attend, _arguments(type(module))

        def attend_visited(*inputs: Any, **options: Any) -> Tensor:
            given = dict(zip(names, inputs, strict=False)) | options
            for name, value in given.items():
                if self.wants(f"{prefix}{name}"):
                    plain = dense_bias(value, inputs[0]) if isinstance(value, (PatternBias, tuple)) else value
                    changed = self.visited(f"{prefix}{name}", plain)
                    given[name] = value if changed is plain else changed
            if self.wants(f"{prefix}scores"):
                self.visited(f"{prefix}scores", module.raw_scores(**given))
            if self.wants(f"{prefix}weights"):
                changed = self.visit(f"{prefix}weights", module.weights(**given))
                if changed is not None:
                    return module.combine(changed, **given)
            return attend(**given)

        return attend_visited

    def gates(self, module: LSTM | GRU) -> Callable[..., tuple[Tensor, ...]]:
        """Return a replacement for `module.gates` that visits each gate."""
        prefix, gates = self.prefixes[module], module.gates

        def gates_visited(x: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
            values = zip(module.gate_names, gates(x, hidden), strict=True)
            return tuple(self.visited(f"{prefix}gates.{letter}", value) for letter, value in values)

        return gates_visited


@cache
def _arguments(kind: type[Attention]) -> tuple[str, ...]:
    """Return the names of the arguments of `attend`, taken from `weights`, which every class declares in full."""
    return tuple(inspect.signature(kind.weights).parameters)[1:]


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


@contextmanager
def recorded_heads(model: nn.Module, heads: Sequence[tuple[int, int]]) -> Iterator[Callable[[], Tensor]]:
    """Record cross-attention heads of a Transformer's decoder, given as pairs (layer, head), both from 0.

    Yields a function to call after the model; it returns the heads' weights [B, heads, T, S], without dropout.
    """
    names = [f"decoder.blocks.{layer}.cross_attention.weights" for layer, _ in heads]
    with record(model, names) as recording:

        def weights() -> Tensor:
            return torch.stack([recording[name][0][:, head] for name, (_, head) in zip(names, heads, strict=True)], 1)

        yield weights


def twin(model: ModuleT) -> ModuleT:
    """Copy a model; the copy shares the weights. Recording or switching parts off affects only one of the two."""
    with _ONE_AT_A_TIME:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        for method in ("attend", "gates"):  # replacements by `_replaced` belong to the original
            module.__dict__.pop(method, None)
    return copied


# --- switching parts off ----------------------------------------------------------------------------------------------


def switches(model: nn.Module) -> dict[str, str]:
    """Return the parts of a model that `switched_off` can switch off, as a mapping from name to title."""
    titles: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            titles |= {f"{name}.heads.{h}": f"{title(name)}, head {h + 1}" for h in range(module.n_heads)}
        elif name.endswith(".feed_forward"):
            titles[name] = title(name)
        elif isinstance(module, Positions) and type(module) is not Positions:
            titles[name] = f"{title(name.rpartition('.')[0])}: positions"
        elif isinstance(module, Decoder) and name == "decoder":
            titles["decoder.mask"] = "causal mask of the decoder"
    return titles


def title(name: str) -> str:
    """Convert a module's name to a readable title.

    >>> title("encoder.blocks.0.self_attention")
    'encoder layer 1, self-attention'
    """
    words = name.replace("blocks.", "").replace("attentions.", "attention.").split(".")
    stack, *rest = words
    layer = [f" layer {int(word) + 1}" for word in rest if word.isdigit()][:1]
    words = [word.replace("_residual", " residual").replace("_", "-") for word in rest]
    what = " ".join(word for word in words if not word.isdigit() and word != "layers")
    stack = stack.replace("src_", "source ").replace("tgt_", "target ").replace("_", " ")
    return "".join((stack, *layer)) + (f", {what}" if what else "")


def switched_off(model: ModuleT, names: Sequence[str]) -> ModuleT:
    """Return a copy (`twin`) of the model with some parts switched off, named as in `switches`.

    Without names, return the model itself. The output of a head or of a feed-forward network becomes zeros, so that
    only the residual connection is left. Positions become the scheme "none", and the causal mask hides nothing.

    Raises:
        SettingsError: The model has no such part.
    """
    if not names:
        return model
    known, changed = switches(model), twin(model)
    for name in names:
        if name not in known:
            kinds = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", part) for part in known))
            advice = f"allowed are {kinds}" if known else "this model has no part that can be; leave it out"
            raise SettingsError(f"off = '{name}': cannot be switched off{nearest(name, known)}; {advice}")
        owner, _, last = name.rpartition(".")
        if owner.endswith(".heads"):
            module: Any = changed.get_submodule(owner.removesuffix(".heads"))
            module.output.register_forward_pre_hook(_without_head(int(last), module.d_head))
        elif name == "decoder.mask":
            changed.get_submodule("decoder").patterns = (FullPattern(),)  # type: ignore[assignment]
        elif last == "positions":
            scheme: Any = changed.get_submodule(name)
            plain = Positions(d_model=scheme.d_model, d_head=scheme.d_head, max_positions=scheme.max_positions)
            setattr(changed.get_submodule(owner), last, plain)
        else:
            changed.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output))
    return changed


def _without_head(head: int, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    def clear(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        merged = inputs[0].clone()
        merged[..., head * width : (head + 1) * width] = 0
        return merged

    return clear

"""Inspection of a model on one sentence: recorded values by name, plain data for the page, and the page itself."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from transduce.config.decoding import DecodingKeywords, DecodingOptions
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.inspection.analyses import (
    RULES,
    attention_view,
    lens_view,
    log_prob,
    logits_part,
    masks_view,
    positions_view,
    recorded_run,
    saliency_view,
    tokens_view,
    without_view,
)
from transduce.inspection.inspected_models import (
    Node,
    Replay,
    Sentence,
    Side,
    Subject,
    TranslationSubject,
    open_subject,
)
from transduce.inspection.page import page_of
from transduce.inspection.recorded_modules import NamedArray, RecordedModule, cell, operands, pack, parts_of
from transduce.models.registry import count_parameters
from transduce.nn.recording import switched_off, switches
from transduce.nn.relative_attention import RelativeAttention
from transduce.text.special import Vocabulary

MOST_BYTES = 3_000_000
"""Maximum size of a saved page. Matrices that do not fit are left out, those of the last blocks first."""
MOST_WEIGHTS = 1 << 17
"""Maximum number of elements of a weight matrix that the live page draws."""


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """A record of a model's computation for one sentence: its views, and its modules with their values.

    recorded: views by name. slow: functions, with cached results, that compute further views.
    """

    sentence: Sentence
    parts: tuple[RecordedModule, ...] = field(repr=False)
    recorded: Mapping[str, Any] = field(repr=False)
    slow: Mapping[str, Callable[[], Any]] = field(repr=False)

    @property
    def views(self) -> dict[str, Any]:
        """Return all views by name, as plain data."""
        return {**self.recorded, **{name: compute() for name, compute in self.slow.items()}}

    @property
    def arrays(self) -> dict[str, NamedArray]:
        """Return all values by name, such as "encoder.blocks.0.self_attention.weights"."""
        return {name: value for part in self.parts for name, value in part.values.items()}

    def __getitem__(self, name: str) -> NamedArray:
        return self.arrays[name]

    def to_json(
        self,
        values: Sequence[str] = (),
        views: Sequence[str] | None = None,
        *,
        weights: Sequence[str] = (),
        head: int | None = None,
    ) -> dict[str, Any]:
        """Return plain data for the page.

        Args:
            values: Names of the modules whose matrices are included.
            views: Names of the views, "parts" among them (default: all); if empty, all views that are not slow.
            weights: Names, among `values`, of the modules whose weight matrices are included, for dot products.
            head: Include this head's weight matrices, and other matrices only up to `MOST_WEIGHTS` numbers (default:
                all).

        Raises:
            SettingsError: There is no such view.
        """
        parts = [_part_data(part, part.name in values, part.name in weights, head) for part in self.parts]
        quick = {**self.recorded, "parts": parts}
        known = (*quick, *self.slow)
        wanted = known if views is None else views or tuple(quick)
        if unknown := [name for name in wanted if name not in known]:
            raise SettingsError(f"views = {unknown[0]}: no such view; allowed are {', '.join(known)}")
        return {name: quick[name] if name in quick else self.slow[name]() for name in wanted}

    def cell(self, name: str, index: Sequence[int]) -> dict[str, Any] | None:
        """Return the dot product that computed a cell of the value `name`; None if no dot product did."""
        part = next(part for part in self.parts if name in part.values)
        return cell(part, name, tuple(index))

    def _repr_html_(self) -> str:
        """Return the page in an HTML frame; notebooks show it."""
        page = html.escape(kept_page([self]), quote=True)
        attributes = 'title="Inside the model" sandbox="allow-scripts" width="100%" height="720"'
        return f'<iframe srcdoc="{page}" {attributes}></iframe>'


def kept_page(inspections: Sequence[Inspection]) -> str:
    """Return the page as one file that contains the recorded values and needs no network; works from file://.

    The matrices of as many modules as fit into `MOST_BYTES` are included, those of the first blocks first. The
    remaining room is for the weight matrices of their dot products, in the same order.
    """
    values, weights = Counter[str](), Counter[str]()
    parts = [part for inspection in inspections for part in inspection.parts]
    for part in parts:
        values[part.name] += sum(3 * value.array.size + 90 for value in part.values.values())
        weights[part.name] += sum(3 * array.size + 90 for array in _weights(part))
    room = MOST_BYTES - 250_000 - sum(len(json.dumps(inspection.to_json())) for inspection in inspections)
    shown, room = _fitting(values, room)
    weighed, _ = _fitting({name: weights[name] for name in shown}, room)
    return page_of([inspection.to_json(shown, weights=weighed) for inspection in inspections])


def _fitting(sizes: Mapping[str, int], room: int) -> tuple[list[str], int]:
    """Choose the modules whose `sizes` fit into `room`, first blocks first; also return the remaining room."""
    chosen = list[str]()
    for name in sorted(sizes, key=lambda name: next((int(w) for w in name.split(".") if w.isdigit()), 0)):
        if sizes[name] <= room:
            chosen.append(name)
            room -= sizes[name]
    return chosen, room


def _weights(part: RecordedModule) -> Iterator[np.ndarray]:
    """Yield the weights and biases that the dot products of a module need."""
    for name in part.values:
        product = part.point(name).product
        if product is not None and product.weight is not None and (factors := operands(part, name)) is not None:
            yield factors.right
            if factors.bias is not None:
                yield factors.bias


def inspect_sentence(
    subject: Subject,
    text: str,
    target: str | None = None,
    *,
    prefix: Sequence[int] = (),
    off: Sequence[str] = (),
    decoding: DecodingOptions | None = None,
) -> Inspection:
    """Run the model on a sentence and keep all values that can be shown.

    Args:
        subject: The model.
        text: Source sentence, or the text of a model without a source.
        target: Translation to inspect (default: the model's).
        prefix: Token ids that the translation starts with.
        off: Names of parts to switch off (`recording.switches`).
        decoding: Options of the search for a translation (default: those of the subject).

    Raises:
        DataError: The text is too long or empty, or the model takes no target.
        SettingsError: A part cannot be switched off, or the model does not translate and has no search.
    """
    subject = subject if decoding is None else subject.searching(decoding)
    if target is not None and not subject.reads_pairs:
        raise DataError("this model reads one text; leave out the target")
    model = switched_off(subject.model, off)
    with torch.no_grad():
        sentence = subject.read(model, text, target, prefix)
        recording, hidden, logits = recorded_run(subject, model, sentence)
        last, candidates = logits_part(subject, model, sentence, hidden, logits)
        parts = (*parts_of(model, recording, subject.side_of), last)
        lens = lens_view(subject, model, recording, sentence)
        original = _original(subject, subject.read(subject.model, text, target, prefix)) if off else None
    sides = sentence.sides | {"candidates": candidates}
    views = {
        "model": _model_data(subject),
        "off": list(off),
        "original": original,
        "can_switch": [_switch(name, label) for name, label in switches(subject.model).items()],
        "sides": {name: _side_data(side) for name, side in sides.items()},
        "attention": list(attention_view(parts, sides)),
        "rules": RULES,
        "positions": list(positions_view(model, sentence, subject)),
        "masks": list(masks_view(parts)),
        "tokens": tokens_view(subject, logits.log_softmax(-1), sentence, sides[subject.predicted]),
        "lens": lens,
        "steps": _steps(subject, sentence.search),
        "sources": _sources(parts),
    }
    views["absent"] = _absent(subject, views)
    saliency = cache(partial(saliency_view, subject, model, sentence))
    without = cache(partial(without_view, subject, text, sentence, prefix))
    return Inspection(replace(sentence, sides=sides), parts, views, {"saliency": saliency, "without": without})


def inspect(
    model: Translator | Path | str,
    text: str,
    target: str | None = None,
    *,
    off: Sequence[str] = (),
    **decoding: Unpack[DecodingKeywords],
) -> Inspection:
    """Inspect a translator, or the model of a run folder of any task, on a sentence; see `inspect_sentence`.

    `decoding`: options of the search for a translation, such as `beam=4`.

    >>> transduce.inspect(translator, "A dog.")["decoder.blocks.0.cross_attention.weights"]  # doctest: +SKIP
    <weights, after the softmax: head=4, query=4, key=4>
    """
    options = DecodingOptions().with_values(**decoding) if decoding else None
    if not isinstance(model, Translator):
        return inspect_sentence(open_subject(model), text, target, off=off, decoding=options)
    engine = model.engine.pytorch_model()
    subject = TranslationSubject(engine, None, model.tokenizers, settings=model.settings, longest=model.longest)
    return inspect_sentence(subject, text, target, off=off, decoding=options)


def _model_data(subject: Subject) -> dict[str, Any]:
    settings = {} if subject.folder is None else subject.folder.settings.model.model_dump()
    scalars = {key: value for key, value in settings.items() if isinstance(value, (int, float, str, bool))}
    task = "translation" if subject.folder is None else subject.folder.settings.task
    return {
        "name": subject.name,
        "kind": scalars.get("kind", type(subject.model).__name__),
        "task": task,
        "n_parameters": count_parameters(subject.model) or sum(p.numel() for p in subject.model.parameters()),
        "settings": scalars,
    }


def _side_data(side: Side) -> dict[str, Any]:
    texts = side.word_texts or side.tokens
    return {"text": side.text, "tokens": side.tokens, "words": side.words, "word_texts": texts}


def _original(subject: Subject, sentence: Sentence) -> dict[str, Any]:
    """Return the inspected output, and its log-probability when no part is switched off."""
    text = sentence.sides[subject.predicted].text
    return {"text": text, "log_prob": log_prob(subject, subject.model, sentence)}


def _switch(name: str, label: str) -> dict[str, str]:
    group = next(g for g in ("heads", "feed_forward", "positions", "mask") if g in name.rsplit(".", 2)[-2:])
    return {"name": name, "title": label, "group": group}


def _part_data(part: RecordedModule, with_values: bool, with_weights: bool, only: int | None) -> dict[str, Any]:
    operands_of = {name: operands(part, name) if with_values else None for name in part.values}

    def product(name: str) -> dict[str, Any] | None:
        """Return the formula of a value's cells; None if its operands are not recorded."""
        how, factors = part.point(name).product, operands_of[name]
        if how is None or factors is None or (how.weight is not None and not with_weights):
            return None
        data = {"left": f"{part.name}.{how.left}", "scale": factors.scale, "transposed": how.transposed}
        if how.weight is None:
            return {**data, "right": f"{part.name}.{how.right}"}
        right, bias = factors.right, factors.bias
        if only is not None:
            if right.ndim == 3:
                head = min(only, len(right) - 1)
                right, bias, data["head"] = right[head], None if bias is None else bias[head], head
            if right.size > MOST_WEIGHTS:
                return None
        return {**data, "weight": pack(right), "bias": None if bias is None else pack(bias)}

    values = [
        {
            "name": name,
            "title": value.title,
            "axes": value.axes,
            "shape": value.shape,
            "rows": value.rows,
            "columns": value.columns,
            "is_product": operands_of[name] is not None,
            "product": product(name),
            "softmax": [full for point in part.point(name).softmax if (full := part.full_name(point)) in part.values],
            "data": pack(value.array) if with_values else None,
            "text": part.point(name).text,
            "line": None if (line := part.line(name)) is None else [_source_key(line[0]), line[1]],
        }
        for name, value in part.values.items()
    ]
    return {
        "name": part.name,
        "kind": part.kind.kind,
        "title": part.title,
        "stack": part.stack,
        "layer": part.layer,
        "shape": part.shape,
        "equation": part.kind.equation,
        "text": part.kind.text,
        "source": part.source(),
        "values": values,
    }


def _source_key(source: Mapping[str, Any]) -> str:
    return f"{source['file']}:{source['line']}"


def _sources(parts: Sequence[RecordedModule]) -> dict[str, Any]:
    """Return the source code that computes the values, by "file:line"."""
    lines = [part.line(name) for part in parts for name in part.values]
    return {_source_key(line[0]): line[0] for line in lines if line is not None}


def _steps(subject: Subject, search: Replay | None) -> dict[str, Any] | None:
    if search is None:
        return None
    vocabulary = subject.tokenizers.tgt

    def node_data(node: Node) -> dict[str, Any]:
        token, top = vocabulary.pieces([node.token])[0], _top(vocabulary, node.top)
        return {**asdict(node), "token": token, "token_id": node.token, "top": top}

    results = [
        {
            "id": end,
            "text": vocabulary.decode(hypothesis.ids),
            "log_prob": hypothesis.log_prob,
            "length": len(hypothesis.ids) + hypothesis.finished,
            "score": hypothesis.score,
        }
        for hypothesis, end in zip(search.results, search.ends, strict=True)
    ]
    return {
        "beam": search.options.beam,
        "length_penalty": search.options.length_penalty,
        "top": _top(vocabulary, search.first),
        "steps": [{"live": [node_data(node) for node in step]} for step in search.steps],
        "results": results,
    }


def _top(vocabulary: Vocabulary, continuations: Sequence[tuple[int, float]]) -> list[list[Any]]:
    return [[vocabulary.pieces([token])[0], token, p] for token, p in continuations]


def _absent(subject: Subject, views: Mapping[str, Any]) -> dict[str, str]:
    """Name the views that this model does not have, with the reasons."""
    reasons = {
        "heads": "This model has no attention.",
        "positions": "This model adds no positions to its embeddings or scores.",
        "steps": "This view replays the search for a translation; this model does not translate.",
        "lens": "This view needs a residual stream from the embedding to predictions of tokens.",
    }
    if any(isinstance(module, RelativeAttention) for module in subject.model.modules()):
        reasons["positions"] = (
            "Positions enter the scores of each attention, by the distance of query and key: (q + v) · W_R R. They "
            "cannot be switched off."
        )
    keys = {"heads": "attention", "positions": "positions", "steps": "steps", "lens": "lens"}
    return {"layers" if view == "lens" else view: reasons[view] for view, key in keys.items() if not views[key]}

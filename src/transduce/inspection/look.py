"""Look into a model on one sentence: `look`, whose result is data, arrays by name, and a page."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.inspection.arrays import NamedArray, pack
from transduce.inspection.heads import RULES, attention_view
from transduce.inspection.page import page_of
from transduce.inspection.parts import Part, cell, operands, parts_of
from transduce.inspection.replay import Replay
from transduce.inspection.subjects import Sentence, Side, Subject, TranslationSubject, open_subject
from transduce.inspection.views import (
    lens_view,
    logits_part,
    masks_view,
    positions_view,
    predictions,
    recorded_run,
    saliency_view,
    tokens_view,
)
from transduce.models.registry import count_parameters
from transduce.nn.recording import switched_off, switches
from transduce.nn.relative_attention import RelativeAttention
from transduce.text.special import Vocabulary

MOST_BYTES = 3_000_000
"""Size of a kept page; the matrices of parts are left out, the last first, where they would not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """A record of a model's computation for one sentence: its views, and the parts with their values.

    recorded: views by name. slow: functions that compute further views, and keep what they computed.
    """

    sentence: Sentence
    parts: tuple[Part, ...] = field(repr=False)
    recorded: Mapping[str, Any] = field(repr=False)
    slow: Mapping[str, Callable[[], Any]] = field(repr=False)

    @property
    def views(self) -> dict[str, Any]:
        """All views by name, plain data."""
        return {**self.recorded, **{name: compute() for name, compute in self.slow.items()}}

    @property
    def arrays(self) -> dict[str, NamedArray]:
        """All values by name, such as "encoder.blocks.0.self_attention.weights"."""
        return {name: value for part in self.parts for name, value in part.values.items()}

    def __getitem__(self, name: str) -> NamedArray:
        return self.arrays[name]

    def to_json(
        self, values: Sequence[str] = (), views: Sequence[str] | None = None, *, weights: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Plain data for the page.

        Args:
            values: Names of the parts whose matrices are wanted.
            weights: Of these, those whose weight matrices are wanted too, as far as dot products need them.
            views: Names of the views, "parts" among them (default: all); without any, those that are not slow.

        Raises:
            SettingsError: There is no such view.
        """
        parts = [_part_data(part, part.name in values, part.name in weights) for part in self.parts]
        quick = {**self.recorded, "parts": parts}
        known = (*quick, *self.slow)
        wanted = known if views is None else views or tuple(quick)
        if unknown := [name for name in wanted if name not in known]:
            raise SettingsError(f"views = {unknown[0]}: no such view; allowed are {', '.join(known)}")
        return {name: quick[name] if name in quick else self.slow[name]() for name in wanted}

    def cell(self, name: str, index: Sequence[int]) -> dict[str, Any] | None:
        """The dot product behind one cell of a value; None if it is none."""
        part = next(part for part in self.parts if name in part.values)
        return cell(part, name, tuple(index))

    def _repr_html_(self) -> str:
        """A notebook shows the page in a frame."""
        page = html.escape(kept_page([self]), quote=True)
        attributes = 'title="Inside the model" sandbox="allow-scripts" width="100%" height="720"'
        return f'<iframe srcdoc="{page}" {attributes}></iframe>'


def kept_page(inspections: Sequence[Inspection]) -> str:
    """The page as one file without network access, with the recorded values inside; works from file://.

    As many parts have their matrices as fit in `MOST_BYTES`: those of the first blocks of encoder and decoder first.
    What is left is for the weights that their dot products need, in the same order.
    """
    values, weights = Counter[str](), Counter[str]()
    parts = [part for one in inspections for part in one.parts]
    for part in parts:
        values[part.name] += sum(3 * value.array.size + 90 for value in part.values.values())
        weights[part.name] += sum(3 * array.size + 90 for array in _weights(part))
    room = MOST_BYTES - 250_000 - sum(len(json.dumps(one.to_json())) for one in inspections)
    shown, room = _fitting(values, room)
    weighed, _ = _fitting({name: weights[name] for name in shown}, room)
    return page_of([one.to_json(shown, weights=weighed) for one in inspections])


def _fitting(sizes: Mapping[str, int], room: int) -> tuple[list[str], int]:
    """The parts that fit into `room`, those of the first blocks first, and the room that is left."""
    chosen = list[str]()
    for name in sorted(sizes, key=lambda name: next((int(w) for w in name.split(".") if w.isdigit()), 0)):
        if sizes[name] <= room:
            chosen.append(name)
            room -= sizes[name]
    return chosen, room


def _weights(part: Part) -> Iterator[np.ndarray]:
    """The weights and biases that dot products of a part need."""
    for name in part.values:
        product = part.point(name).product
        if product is not None and product.weight is not None and (found := operands(part, name)) is not None:
            yield found.right
            if found.bias is not None:
                yield found.bias


def look(
    subject: Subject,
    text: str,
    target: str | None = None,
    *,
    prefix: Sequence[int] = (),
    off: Sequence[str] = (),
) -> Inspection:
    """Run the model on a sentence and keep all that can be shown.

    Args:
        subject: The model.
        text: What it reads.
        target: A translation to look at (default: the model's).
        prefix: Token ids that the translation starts with.
        off: Names of parts to switch off (`recording.switches`).

    Raises:
        DataError: The text is too long or empty, or has a target that the model does not take.
        SettingsError: A part cannot be switched off.
    """
    if target is not None and not subject.reads_pairs:
        raise DataError("this model reads one text; leave out the target")
    model = switched_off(subject.model, off)
    with torch.no_grad():
        sentence = subject.read(model, text, target, prefix)
        found, hidden, logits = recorded_run(subject, model, sentence)
        last, candidates = logits_part(subject, model, sentence, hidden, logits)
        parts = (*parts_of(model, found, subject.side_of), last)
        lens = lens_view(subject, model, found, sentence)
        original = _original(subject, subject.read(subject.model, text, target, prefix)) if off else None
    sides = sentence.sides | {"candidates": candidates}
    predicted = sides[subject.predicted]
    attention = list(attention_view(parts, sides))
    views = {
        "model": _model_data(subject),
        "off": list(off),
        "original": original,
        "can_switch": [_switch(name, label) for name, label in switches(subject.model).items()],
        "sides": {name: _side_data(side) for name, side in sides.items()},
        "attention": attention,
        "rules": RULES,
        "positions": list(positions_view(model, sentence, subject)),
        "masks": list(masks_view(parts)),
        "tokens": tokens_view(logits.log_softmax(-1), sentence, predicted),
        "lens": lens,
        "steps": _steps(subject, sentence.search),
    }
    views["absent"] = _absent(subject, views)
    saliency = cache(partial(saliency_view, subject, model, sentence))
    return Inspection(replace(sentence, sides=sides), parts, views, {"saliency": saliency})


def inspect(
    model: Translator | Path | str, text: str, target: str | None = None, *, off: Sequence[str] = ()
) -> Inspection:
    """Look into a translator, or into the model of a run folder of any task: see `look`.

    >>> transduce.inspect(translator, "A dog.")["decoder.blocks.0.cross_attention.weights"]  # doctest: +SKIP
    <weights, after the softmax: head=4, query=4, key=4>
    """
    if not isinstance(model, Translator):
        return look(open_subject(model), text, target, off=off)
    engine = model.engine.pytorch_model()
    subject = TranslationSubject(engine, None, model.tokenizers, settings=model.settings, longest=model.longest)
    return look(subject, text, target, off=off)


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
    """The output of the complete model and its log-probability."""
    targets = predictions(subject, subject.model, sentence).gather(1, sentence.targets[:, None])
    return {"text": sentence.sides[subject.predicted].text, "log_prob": float(targets.sum())}


def _switch(name: str, label: str) -> dict[str, str]:
    group = next(g for g in ("heads", "feed_forward", "positions", "mask") if g in name.rsplit(".", 2)[-2:])
    return {"name": name, "title": label, "group": group}


def _part_data(part: Part, with_values: bool, with_weights: bool) -> dict[str, Any]:
    found_of = {name: operands(part, name) if with_values else None for name in part.values}

    def product(name: str) -> dict[str, Any] | None:
        """Formula of a cell, if its operands are recorded."""
        how, found = part.point(name).product, found_of[name]
        if how is None or found is None or (how.weight is not None and not with_weights):
            return None
        data = {"left": f"{part.name}.{how.left}", "scale": found.scale, "transposed": how.transposed}
        if how.weight is None:
            return {**data, "right": f"{part.name}.{how.right}"}
        return {**data, "weight": pack(found.right), "bias": None if found.bias is None else pack(found.bias)}

    values = [
        {
            "name": name,
            "title": value.title,
            "axes": value.axes,
            "shape": value.shape,
            "rows": value.rows,
            "columns": value.columns,
            "is_product": found_of[name] is not None,
            "product": product(name),
            "data": pack(value.array) if with_values else None,
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


def _steps(subject: Subject, found: Replay | None) -> dict[str, Any] | None:
    """The search for the translation, step by step."""
    if found is None:
        return None
    vocabulary = subject.tokenizers.tgt
    steps = [
        {
            "live": [
                {
                    "id": node.number,
                    "parent": node.parent,
                    "token": vocabulary.pieces([node.token])[0],
                    "token_id": node.token,
                    "log_prob": node.log_prob,
                    "fate": node.fate,
                    "top": _top(vocabulary, node.top),
                }
                for node in step
            ]
        }
        for step in found.steps
    ]
    results = [
        {
            "id": end,
            "text": vocabulary.decode(one.ids),
            "log_prob": one.log_prob,
            "length": len(one.ids) + one.finished,
            "score": one.score,
        }
        for one, end in zip(found.results, found.ends, strict=True)
    ]
    return {
        "beam": found.options.beam,
        "length_penalty": found.options.length_penalty,
        "top": _top(vocabulary, found.first),
        "steps": steps,
        "results": results,
    }


def _top(vocabulary: Vocabulary, found: Sequence[tuple[int, float]]) -> list[list[Any]]:
    return [[vocabulary.pieces([token])[0], token, p] for token, p in found]


def _absent(subject: Subject, views: Mapping[str, Any]) -> dict[str, str]:
    """The views that this model does not have, and why."""
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

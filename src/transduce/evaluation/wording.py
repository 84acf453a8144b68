"""The wording of report and model card for each task: the WORDINGS table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transduce.config.purposes import PURPOSES
from transduce.evaluation.records import Record


@dataclass(frozen=True, slots=True)
class Wording:
    """The words for one task. `shape`: the model in one line, plain text."""

    shape: Callable[[Record], str]
    samples: str
    command: str
    python: str
    limits: Callable[[Record], tuple[str, ...]]


def _shape(record: Record) -> str:
    m = record.settings.model
    size = f"{'+'.join(map(str, m.depth))} layers, d_model {m.d_model}, d_ff {m.d_ff}, {m.n_heads} heads"
    return f"{m.kind}, {size}, {m.residual}-norm, {m.positions} positions"


def _translator(record: Record) -> str:
    src, tgt = record.languages
    return f"{src} to {tgt} · {_shape(record)}"


def _translator_limits(record: Record) -> tuple[str, ...]:
    longest, length = record.settings.decoding.max_length, record.settings.data.max_length
    return (
        "It translates sentence by sentence and does not see the context.",
        f"It was trained on sentences of up to {length} tokens and writes up to {longest}.",
    )


def _generator(record: Record) -> str:
    settings = record.settings
    return f"language model, {settings.tokenizer.kind} tokens · {_shape(record)}, " + (
        f"context {settings.data.context}"
    )


def _generator_limits(record: Record) -> tuple[str, ...]:
    return (
        f"It sees {record.settings.data.context} tokens at once and nothing before them.",
        "It writes likely text, which need not be true.",
    )


WORDINGS: dict[str, Wording] = {
    "translation": Wording(
        shape=_translator,
        samples="Translations",
        command=PURPOSES["translation"].command,
        python=(
            "from transduce import Translator\n\n"
            'translator = Translator.load("THIS_FOLDER")\nprint(translator.translate(["..."])[0].text)'
        ),
        limits=_translator_limits,
    ),
    "causal": Wording(
        shape=_generator,
        samples="Texts",
        command=PURPOSES["causal"].command,
        python=(
            "from transduce import Generator\n\n"
            'generator = Generator.load("THIS_FOLDER")\nprint(generator.generate(["..."])[0].text)'
        ),
        limits=_generator_limits,
    ),
    "masked": Wording(
        shape=lambda record: f"masked language model · {_shape(record)}",
        samples="Masked words",
        command=PURPOSES["masked"].command,
        python=(
            "from transduce import Filler\n\n"
            'filler = Filler.load("THIS_FOLDER")\nprint(filler.fill(["A <mask> runs."])[0].gaps[0])'
        ),
        limits=lambda record: (f"It sees {record.settings.data.context} tokens at once.",),
    ),
    "classification": Wording(
        shape=lambda record: f"text classifier · {_shape(record)}",
        samples="Texts",
        command=PURPOSES["classification"].command,
        python=(
            "from transduce import TextClassifier\n\n"
            'classifier = TextClassifier.load("THIS_FOLDER")\nprint(classifier.classify(["..."])[0].label)'
        ),
        limits=lambda record: (f"It reads the first {record.settings.data.max_length} tokens of a text.",),
    ),
}


def wording_of(record: Record) -> Wording:
    """The words for the task of a run."""
    return WORDINGS[record.settings.task]

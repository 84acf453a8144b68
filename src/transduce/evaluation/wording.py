"""What report and model card say of a run, by its task: the WORDINGS table. What they show, the data decides."""

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
        "It translates sentence by sentence: what the sentences around say, it does not see.",
        f"It has seen no sentence above {length} tokens and writes none above {longest}.",
    )


def _generator(record: Record) -> str:
    settings = record.settings
    return f"text goes on, by {settings.tokenizer.kind} · {_shape(record)}, " + (f"context {settings.data.context}")


def _generator_limits(record: Record) -> tuple[str, ...]:
    return (
        f"It sees {record.settings.data.context} tokens at once; what stands further back, it has forgotten.",
        "It writes what is likely to stand in such text, which need not be true.",
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
        shape=lambda record: f"gaps are filled · {_shape(record)}",
        samples="Gaps",
        command=PURPOSES["masked"].command,
        python=(
            "from transduce import Filler\n\n"
            'filler = Filler.load("THIS_FOLDER")\nprint(filler.fill(["A <mask> runs."])[0].gaps[0])'
        ),
        limits=lambda record: (f"It sees {record.settings.data.context} tokens at once.",),
    ),
    "classification": Wording(
        shape=lambda record: f"texts get labels · {_shape(record)}",
        samples="Texts",
        command=PURPOSES["classification"].command,
        python=(
            "from transduce import TextClassifier\n\n"
            'classifier = TextClassifier.load("THIS_FOLDER")\nprint(classifier.classify(["..."])[0].label)'
        ),
        limits=lambda record: (f"It reads {record.settings.data.max_length} tokens of a text; the rest is cut off.",),
    ),
}


def wording_of(record: Record) -> Wording:
    """The words for the task of a run."""
    return WORDINGS[record.settings.task]

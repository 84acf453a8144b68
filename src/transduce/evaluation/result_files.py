"""The small JSON files of a run folder that describe its results: written one part at a time, read as a whole.

scores.json     {"sets": [{"name", "scores": Scores.to_json(), "search": {...}}]}
text_scores.json {"sets": [{"name", "nll", "perplexity", "bits_per_byte", "tokens", "bytes", "context", "stride"}]}
label_scores.json {"sets": [{"name", **LabelScores.to_json()}]}
masked_scores.json {"sets": [{"name", "loss", "nll", "perplexity", "masked_accuracy", "next_sentence_accuracy"}]}
samples.json    {"sets": [{"name", "update", "samples": [{"src", "ref", "hyp"} or {"prompt", "text"}]}]}
attention.json  {"sentences": [{"sides", "attention", "rules"}]}, views of `Inspection`
precision_scores.json
                {"sentences", "precisions": {"float32": {"bleu", "sentences_per_second"}, ...}}, of validation text
data.json       {"fingerprint",
                 "sets": [{"name", "files", "pairs", "src_tokens", "tgt_tokens",
                           "cleaning": CleanReport.to_json()} or {"name", "files", "documents", "bytes", "tokens"}],
                 "leaks": [LeakCheck.to_json()]}
metrics.jsonl   one event per line: start, update, skipped, validation, restart, memory, end (`metrics_log`)

Every file, and every key of data.json, may be missing; the report leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from jinja2 import UndefinedError

from transduce.config.settings import Settings
from transduce.evaluation.metrics import Scores
from transduce.inspection.arrays import unpack
from transduce.inspection.look import Inspection
from transduce.metrics_log import MetricsFile
from transduce.runs.atomic import expecting
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import shapes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SetScores:
    """Scores of one test set, and the search options."""

    name: str
    scores: Scores
    search: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that the report and the model card show of a run."""

    name: str
    settings: Settings
    recipe: str = ""
    made_by: str = ""  # version of transduce that created the run
    n_parameters: int | None = None
    events: Sequence[Mapping[str, Any]] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    scores: Sequence[SetScores] = ()
    text_scores: Sequence[Mapping[str, Any]] = ()
    label_scores: Sequence[Mapping[str, Any]] = ()
    masked_scores: Sequence[Mapping[str, Any]] = ()
    precisions: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    attention: Sequence[Mapping[str, Any]] = ()

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind, in order."""
        return [e for e in self.events if e.get("event") == event]

    def points(self, event: str, key: str) -> list[tuple[float, float]]:
        """Return (update, value) of the events of one kind that have a number for the key."""
        found = [(e.get("update"), e.get(key)) for e in self.of(event)]
        return [(float(x), float(y)) for x, y in found if isinstance(x, int | float) and isinstance(y, int | float)]

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the software that trained the run, as of its last start."""
        starts = [*self.of("start"), *self.of("restart")]
        found: dict[str, str] = {"transduce": self.made_by} if self.made_by else {}
        for event in starts:
            found |= {key: str(event[key]) for key in ("torch", "device", "threads") if key in event}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words of a task. Names in braces stand for facts of a model, which `of` fills in.

    Args:
        title: What a model is, as a noun phrase in Markdown.
        does: What a model does, as a verb phrase.
        command: A shell line that uses the model in THIS_FOLDER.
        python: An expression that does the same with the model in FOLDER; empty if there is none.
        samples: Heading of the report's samples.
        shape: The model in one line of plain text.
        limits: What the card says about the limits of a model.
    """

    title: str
    does: str
    command: str
    python: str = ""
    samples: str = "Samples"
    shape: str
    limits: tuple[str, ...] = ()

    def of(self, settings: Settings) -> Wording:
        """The words for a model."""
        data, model, vectors = settings.data, settings.model, settings.model.reads_vectors
        labels = [f"`{' '.join(label.replace('`', ' ').split())}`" for label in data.labels or ()]
        memory = model.remembered
        facts = {
            "src": data.src_lang,
            "tgt": data.tgt_lang,
            "labels": ", ".join(labels),
            "model": model.summary,
            "tokenizer": settings.tokenizer.kind,
            "context": data.context,
            "memory": " and nothing before them" if memory is None else f", and the last {memory:,} before them",
            "max_length": data.max_length,
            "output_length": settings.decoding.max_length,
            "text": "sequence of vectors" if vectors else "text",
            "input_text": "sequences of vectors" if vectors else "text",
            "tokens": "vectors" if vectors else "tokens",
            "input": "in.safetensors" if vectors else "< in.txt",
            "example": '"in.safetensors#0"' if vectors else '"..."',
        }
        names = ("title", "does", "command", "python", "shape")
        texts = {name: getattr(self, name).format(**facts) for name in names}
        return replace(self, **texts, limits=tuple(limit.format(**facts) for limit in self.limits))

    @property
    def usage(self) -> str:
        """A model's function and command, e.g. "translates text: `transduce translate`"."""
        return f"{self.does}: `{' '.join(self.command.split()[:2])}`"

    @property
    def imports(self) -> str:
        """The name that `python` imports from transduce."""
        return self.python.partition(".")[0]


def render_record(run: RunFolder, render: Callable[[Record], T]) -> T:
    """Return `render` of the record of a run. Raises `RunFolderError` for unexpected content of its files."""
    with expecting(f"a record of {run.path} (see transduce verify {run.path} --files)", UndefinedError):
        return render(_read_record(run))


def read_record(run: RunFolder) -> Record:
    """Read the record of a run; errors as for `render_record`."""
    return render_record(run, lambda record: record)


def _read_record(run: RunFolder) -> Record:
    read = run.read_record
    scores, samples, attention = read("scores.json"), read("samples.json"), read("attention.json")
    events = MetricsFile(run.path / "metrics.jsonl").read()
    model, recipe = run.path / "model.safetensors", run.path / "recipe.toml"
    n_parameters = next((e["parameters"] for e in events if "parameters" in e), None)
    if n_parameters is None and model.exists():
        n_parameters = sum(math.prod(shape) for shape in shapes(model).values())
    return Record(
        name=run.settings.name or run.path.absolute().name,
        settings=run.settings,
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else "",
        made_by=run.manifest.version,
        n_parameters=n_parameters,
        events=events,
        data=read("data.json"),
        scores=[
            SetScores(s["name"], Scores.from_json(s["scores"]), s.get("search", {})) for s in scores.get("sets", ())
        ],
        text_scores=read("text_scores.json").get("sets", ()),
        label_scores=read("label_scores.json").get("sets", ()),
        masked_scores=read("masked_scores.json").get("sets", ()),
        precisions=read("precision_scores.json"),
        samples=samples.get("sets", ()),
        attention=list(map(_checked_heads, attention.get("sentences", ()))),
    )


def save_set(
    run: RunFolder,
    kind: Literal["scores", "text_scores", "label_scores", "masked_scores", "samples"],
    name: str,
    values: Mapping[str, Any],
) -> None:
    """Save the scores or samples of one set, in the form shown above; earlier ones of the same name are replaced."""
    file = f"{kind}.json"
    content = run.read_record(file)
    with expecting(run.path / file):
        others = [one for one in content.get("sets", ()) if one.get("name") != name]
        run.write_record(file, {**content, "sets": [*others, {"name": name, **values}]})


def save_generated(run: RunFolder, name: str, texts: Iterable[tuple[str, str]], *, update: int) -> None:
    """Save generated text: (prompt, text) pairs."""
    samples = [{"prompt": prompt, "text": text} for prompt, text in texts]
    save_set(run, "samples", name, {"update": update, "samples": samples})


def save_attention(run: RunFolder, sentences: Iterable[Inspection]) -> None:
    """Save the attention of a few held-out sentences; earlier ones are replaced."""
    records = (one.to_json(views=["sides", "attention", "rules"]) for one in sentences)
    run.write_record("attention.json", {"sentences": [one for one in records if one["attention"]]})


def _checked_heads(sentence: Mapping[str, Any]) -> Mapping[str, Any]:
    """A sentence of attention.json, which only the script of the report reads."""
    for layer in sentence["attention"]:
        heads, *_ = unpack(layer["weights"]).shape
        if heads != len(layer["labels"]):
            raise ValueError("expected a label for each head")
    return sentence

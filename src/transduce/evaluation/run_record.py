"""The JSON files of a run folder that describe its results. Tasks write them part by part; reports read them all.

scores.json     {"sets": [{"name", "scores": TranslationScores.to_json(), "search": {...}}]}
text_scores.json {"sets": [{"name", "nll", "perplexity", "bits_per_byte", "tokens", "bytes", "context", "stride"}]}
label_scores.json {"sets": [{"name", **LabelScores.to_json()}]}
masked_scores.json {"sets": [{"name", "loss", "nll", "perplexity", "masked_accuracy", "next_sentence_accuracy"}]}
samples.json    {"sets": [{"name", "update", "samples": [{"src", "ref", "hyp"} or {"prompt", "text"}],
                          "worst": [{"src", "ref", "hyp"}]}]}
attention.json  {"sentences": [{"sides", "attention", "rules"}]}, views of `Inspection`
data.json       {"fingerprint",
                 "sets": [{"name", "files", "pairs", "src_tokens", "tgt_tokens",
                           "cleaning": CleanReport.to_json()} or {"name", "files", "documents", "bytes", "tokens"}],
                 "leaks": [LeakCheck.to_json()]}
metrics.jsonl   one event per line: start, update, skipped, validation, restart, change, memory, end

Every file, and every key of data.json, may be missing; the report leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jinja2 import UndefinedError

from transduce.config.settings import Settings
from transduce.evaluation.metrics import TranslationScores
from transduce.metrics_log import MetricsFile
from transduce.runs.atomic import expecting
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import count_weights

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SetScores:
    """Scores of one test set, and the options of the search that translated it."""

    name: str
    scores: TranslationScores
    search: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The data for a run's report and model card."""

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
    samples: Sequence[Mapping[str, Any]] = ()
    attention: Sequence[Mapping[str, Any]] = ()

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind in metrics.jsonl, in order."""
        return [e for e in self.events if e.get("event") == event]

    def points(self, event: str, key: str) -> list[tuple[float, float]]:
        """Return (update, value) for each event of a kind that has a number under `key`."""
        values = [(e.get("update"), e.get(key)) for e in self.of(event)]
        return [(float(x), float(y)) for x, y in values if isinstance(x, int | float) and isinstance(y, int | float)]

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the software that trained the run, as of the last start."""
        starts = [*self.of("start"), *self.of("restart")]
        versions: dict[str, str] = {"transduce": self.made_by} if self.made_by else {}
        for event in starts:
            versions |= {key: str(event[key]) for key in ("torch", "device", "threads") if key in event}
        return versions


def render_record(run: RunFolder, render: Callable[[RunRecord], T]) -> T:
    """Read a run's record, and return `render` of it. Raises `RunFolderError` for unexpected content of files."""
    with expecting(f"a record of {run.path} (see transduce verify {run.path})", UndefinedError):
        return render(_read_record(run))


def read_record(run: RunFolder) -> RunRecord:
    """Read the record of a run. Raises `RunFolderError` for unexpected content of its files."""
    return render_record(run, lambda record: record)


def _read_record(run: RunFolder) -> RunRecord:
    read = run.read_record
    scores, samples, attention = read("scores.json"), read("samples.json"), read("attention.json")
    events = MetricsFile(run.path / "metrics.jsonl").read()
    model, recipe = run.path / "model.safetensors", run.path / "recipe.toml"
    n_parameters = next((e["parameters"] for e in events if "parameters" in e), None)
    if n_parameters is None and model.exists():
        n_parameters = count_weights(model)
    return RunRecord(
        name=run.settings.name or run.path.absolute().name,
        settings=run.settings,
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else "",
        made_by=run.manifest.version,
        n_parameters=n_parameters,
        events=events,
        data=read("data.json"),
        scores=[
            SetScores(s["name"], TranslationScores.from_json(s["scores"]), s.get("search", {}))
            for s in scores.get("sets", ())
        ],
        text_scores=read("text_scores.json").get("sets", ()),
        label_scores=read("label_scores.json").get("sets", ()),
        masked_scores=read("masked_scores.json").get("sets", ()),
        samples=samples.get("sets", ()),
        attention=attention.get("sentences", ()),
    )


def save_set(
    run: RunFolder,
    kind: Literal["scores", "text_scores", "label_scores", "masked_scores", "samples"],
    name: str,
    values: Mapping[str, Any],
) -> None:
    """Save the scores or samples of a set in the form described in the module; replace the set's earlier entries."""
    file = f"{kind}.json"
    content = run.read_record(file)
    with expecting(run.path / file):
        others = [other for other in content.get("sets", ()) if other.get("name") != name]
        run.write_record(file, {**content, "sets": [*others, {"name": name, **values}]})


def save_generated(run: RunFolder, name: str, texts: Iterable[tuple[str, str]], *, update: int) -> None:
    """Save generated text, as (prompt, text) pairs, for the set `name`."""
    samples = [{"prompt": prompt, "text": text} for prompt, text in texts]
    save_set(run, "samples", name, {"update": update, "samples": samples})

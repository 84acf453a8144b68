"""`report.html`, one page that works offline, and the model card `README.md`, both from the files of a run folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from markupsafe import Markup, escape

import transduce
from transduce.evaluation.html import Curve, compact, environment, line_chart, render, smooth
from transduce.evaluation.run_record import RunRecord, SetScores, render_record
from transduce.evaluation.wording import wording_of
from transduce.inspection.page import script_of
from transduce.logging import duration
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import format_changes

N_SAMPLES = 12  # samples shown at first; further samples are folded
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>&|~$])")  # characters with a meaning in Markdown and HTML
UNSCORED = "Nothing was scored when this run was trained: it was given no test text."

_COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "text_scores": {
        "nats per token": ("nll", "{:.4f}"),
        "perplexity per token": ("perplexity", "{:.3f}"),
        "bits per byte": ("bits_per_byte", "{:.4f}"),
        "tokens": ("tokens", "{:,}"),
        "bytes": ("bytes", "{:,}"),
    },
    "label_scores": {
        "texts": ("n", "{:,}"),
        "accuracy": ("accuracy", "{:.2%}"),
        "macro F1": ("macro_f1", "{:.2%}"),
        "F1 of the second": ("binary_f1", "{:.2%}"),
        "Matthews": ("matthews", "{:.4f}"),
    },
    "masked_scores": {
        "masked-token accuracy": ("masked_accuracy", "{:.2%}"),
        "nats per masked token": ("nll", "{:.4f}"),
        "perplexity": ("perplexity", "{:.2f}"),
        "next-sentence accuracy": ("next_sentence_accuracy", "{:.2%}"),
    },
}
"""Columns of score tables: heading, key of the score, number format."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. All columns but the first contain numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_report(run: RunFolder) -> None:
    run.write_page("report.html", render_report(run))


def render_report(run: RunFolder) -> str:
    return render_record(run, report_html)


def report_html(record: RunRecord) -> str:
    end, wording = record.of("end"), wording_of(record.settings)
    padding = [share for _, share in record.points("update", "padding")]
    return render(
        "report.html",
        title=f"{record.name}: report",
        record=record,
        data=record.data,
        padding=sum(padding) / len(padding) if padding else None,
        summary=wording.shape,
        tiles=_tiles(record),
        score_tables=score_tables(record),
        signatures=signatures(record.scores),
        unscored=unscored(record),
        charts=_charts(record),
        end=end[-1] if end else None,
        events=_events(record),
        samples_title=wording.samples,
        n_samples=N_SAMPLES,
        problems=_problems(record),
        marked=marked,
        heads_script=Markup(script_of("report.js")),
        sets=set_table(record.data.get("sets", ())),
        leaks=[(leak_line(leak), leak) for leak in record.data.get("leaks", ())],
        settings=_settings(record),
        provenance=_provenance(record),
    )


def _problems(record: RunRecord) -> list[tuple[str, str]]:
    """Return possible problems of the run, each with the id of the report's section about it."""
    problems = [("data", leak_line(leak)) for leak in record.data.get("leaks", ()) if leak.get("leaked")]
    if skipped := record.of("skipped"):
        problems.append(("curves", f"skipped updates: {len(skipped):,}; the loss or its gradient was not finite"))
    return problems


def _tiles(record: RunRecord) -> list[tuple[str, str]]:
    """Return the most important figures for the top of the report, as (name, value)."""
    tiles = [
        (f"{bleu.value:.1f}", f"BLEU {test.name}" + (f": {bleu.remark}" if bleu.remark else ""))
        for test in record.scores[:2]
        for bleu in [test.scores.bleu]
    ]
    if record.scores and record.scores[0].scores.exact_match >= 0.1:
        tiles.append((f"{record.scores[0].scores.exact_match:.1%}", f"exact match {record.scores[0].name}"))
    tiles += [(f"{s['accuracy']:.1%}", f"accuracy {s['name']}") for s in record.label_scores[:2]]
    tiles += [(f"{s['masked_accuracy']:.1%}", f"masked-token accuracy {s['name']}") for s in record.masked_scores[:2]]
    tiles += [(f"{s['bits_per_byte']:.3f}", f"bits per byte {s['name']}") for s in record.text_scores[:2]]
    validations = record.of("validation")
    best = max((event.get("best_update") or 0 for event in record.events), default=0)
    last_validation = validations[-1] if validations else {}
    kept = next((event for event in validations if event.get("update") == best), last_validation)
    if kept.get("perplexity") is not None and "accuracy" not in kept:
        tiles.append((f"{kept['perplexity']:.2f}", "validation perplexity per token"))
    if record.n_parameters is not None:
        tiles.append((compact(record.n_parameters), "parameters"))
    if record.events:
        last = record.events[-1]
        tiles.append((duration(last.get("seconds") or 0), f"training time, {last.get('update', 0):,} updates"))
    if speeds := sorted(y for _, y in record.points("update", "tokens_per_second")):
        tiles.append((compact(round(speeds[len(speeds) // 2])), "target tokens per second"))
    return tiles


def signatures(scores: Sequence[SetScores]) -> list[tuple[str, list[str]]]:
    """Describe how sets were scored, as (names of sets, lines). Sets with equal lines are listed together."""
    names: dict[tuple[str, ...], list[str]] = {}
    for test in scores:
        search = ", ".join(f"{key} {value}" for key, value in test.search.items())
        lines = [f"{name} {signature}" for name, signature in test.scores.signatures().items()]
        names.setdefault((*lines, *filter(None, [search]), *test.scores.notes), []).append(test.name)
    return [(", ".join(sets), list(lines)) for lines, sets in names.items()]


_ACCURACIES = {
    "accuracy": "accuracy",
    "macro F1": "macro_f1",
    "masked tokens": "masked_accuracy",
    "next sentences": "next_sentence_accuracy",
}
"""Curves of the chart of accuracies: name, key in the validation's scores."""


def _charts(record: RunRecord) -> list[Markup]:
    restarts = [float(event.get("update", 0)) for event in record.of("restart")]
    window = max(1, len(record.points("update", "loss")) // 50)
    loss = "Loss, nats per target token" + (", label-smoothed" if record.settings.training.label_smoothing else "")

    def smoothed(name: str, key: str) -> list[Curve]:
        points = record.points("update", key)
        return [Curve("single updates", points, pale=True), Curve(name, smooth(points, window=window))]

    def validation(name: str, key: str) -> Curve:
        return Curve(name, record.points("validation", key))

    def chart(title: str, curves: Sequence[Curve], *, settle: float = 0.0, floor: float | None = None) -> Markup:
        return line_chart(title, curves, marks=restarts, settle=settle, floor=floor)

    directions = dict.fromkeys(key for event in record.of("validation") for key in event if key.startswith("bleu "))
    by_direction = [validation(f"BLEU {key.removeprefix('bleu ')}", key) for key in directions]
    charts = [
        chart(loss, [*smoothed("training", "loss"), validation("validation", "loss")], settle=0.05),
        chart("Validation scores", [validation("BLEU", "bleu"), validation("chrF", "chrf"), *by_direction]),
        chart("Validation, bits per byte", [validation("bits per byte", "bits_per_byte")]),
        chart("Validation accuracy", [validation(name, key) for name, key in _ACCURACIES.items()]),
        chart("Learning rate", [Curve("learning rate", record.points("update", "lr"))]),
        chart("Target tokens per second", smoothed("tokens per second", "tokens_per_second"), floor=0.0),
        chart("Gradient norm", [Curve("gradient norm", record.points("update", "grad_norm"))], settle=0.05),
    ]
    return list(filter(None, charts))


def _events(record: RunRecord) -> list[tuple[str, str, str, str]]:
    """Return restarts, changed settings, skipped updates and batches split for lack of memory, in order.

    Each has four columns: event, update, explanation, time.
    """
    rows = []
    for event in record.events:
        update = event.get("update", 0)
        match event["event"]:
            case "restart":
                kind, text = "restart", "interrupted: " + ("resumed from the checkpoint" if update else "started again")
            case "change":
                kind, text = "continued" if event.get("continues") else "changed", format_changes(event["settings"])
            case "skipped":
                kind, text = "skipped", "the loss or its gradient was not finite; the weights did not change"
            case "memory":
                kind = "out of memory"
                text = f"batches of {event['too_large']:,} slots or more are split in two from here on"
            case _:
                continue
        rows.append((kind, f"{update:,}", text, duration(event["seconds"]) if event.get("seconds") else ""))
    return rows


def marked(ref: str, hyp: str) -> tuple[Markup, Markup]:
    """Mark the words that the other text lacks: <ins> in the reference, <del> in the translation.

    >>> print(*marked("a dog", "a cat"))
    a <ins>dog</ins> a <del>cat</del>
    """
    a, b = ref.split(), hyp.split()
    left, right = [], []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left.append(_wrapped(a[i:j], "" if kind == "equal" else "ins"))
        right.append(_wrapped(b[k:m], "" if kind == "equal" else "del"))
    return Markup(" ").join(filter(None, left)), Markup(" ").join(filter(None, right))


def _wrapped(words: Sequence[str], tag: str) -> Markup:
    text = escape(" ".join(words))
    return Markup(f"<{tag}>{text}</{tag}>") if tag and words else text


def set_table(sets: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return a table of the data sets' sizes and files. Test sets and plain text are not cleaned."""
    sizes = ("documents", "texts", "pairs", "bytes", "tokens", "src_tokens", "tgt_tokens")
    counts = [{**facts, **_dropped(facts.get("cleaning"))} for facts in sets]
    used = [key for key in (*sizes, "dropped") if any(key in facts for facts in counts)]
    rows = []
    for facts in counts:
        texts = (f"{facts[key]:,}" if key in facts else "" for key in used)
        rows.append([str(facts["name"]), *texts, ", ".join(map(str, facts.get("files", ())))])
    return Table(("set", *(key.replace("_", " ") for key in used), "files"), rows) if sets else None


def _dropped(cleaning: Mapping[str, Any] | None) -> dict[str, int]:
    return {"dropped": cleaning["read"] - cleaning["kept"]} if cleaning else {}


def leak_line(leak: Mapping[str, Any]) -> str:
    """Describe in one line how a held-out set overlaps with the training text."""
    n, total, sources = leak.get("leaked", 0), leak.get("pairs", 0), leak.get("sources", 0)
    text = f"{leak['name']}: {n:,} of {total:,} {leak.get('unit', 'pairs')} overlap with the training text"
    return text + (f", and {sources - n:,} more sources with another translation" if sources > n else "")


def _settings(record: RunRecord) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return all settings by section: (name, value, description)."""
    sections = []
    for section, fields in record.settings.model_dump(mode="json").items():
        if isinstance(fields, dict):
            known = type(getattr(record.settings, section)).model_fields
            rows = [(key, _value(value), known[key].description or "") for key, value in fields.items()]
            sections.append((section, rows))
    return sections


def _value(value: Any) -> str:
    """Format the value of a setting: booleans as in TOML, a corpus as its files."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items() if item is not None)
    return "; ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _provenance(record: RunRecord) -> list[tuple[str, str]]:
    rows = list(record.versions.items())
    if record.events:
        restarts = record.of("restart")
        places = ", ".join(f"after update {event.get('update', 0):,}" for event in restarts)
        rows.append(("restarts", f"{len(restarts)}: {places}" if restarts else "none"))
    software = f"transduce {transduce.__version__}, sacrebleu {metadata.version('sacrebleu')}"
    return [*rows, ("this page", f"written by {software}")]


def score_tables(record: RunRecord) -> list[Table]:
    """Return the scores of all test sets, one table per kind of score."""
    tables = []
    if record.scores:
        header = ("set", "sentences", "BLEU", "chrF", "TER", "exact", "precisions", "brevity")
        tables.append(Table(header, [_translation_row(scores) for scores in record.scores]))
    for name, columns in _COLUMNS.items():
        rows = [
            [
                str(scores["name"]),
                *("" if (value := scores.get(key)) is None else form.format(value) for key, form in columns.values()),
            ]
            for scores in getattr(record, name)
        ]
        if rows:
            tables.append(Table(("set", *columns), rows))
    return tables


def unscored(record: RunRecord) -> str:
    """Return a note if the run has finished without scores."""
    scored = record.scores or any(getattr(record, name) for name in _COLUMNS)
    return UNSCORED if record.of("end") and not scored else ""


def _translation_row(test: SetScores) -> list[str]:
    s = test.scores
    bleu = f"{s.bleu.value:.2f}" + (f" ({s.bleu.remark})" if s.bleu.remark else "")
    ter = "" if s.ter is None else f"{s.ter.value:.2f}"
    values = [bleu, f"{s.chrf.value:.2f}", ter, f"{s.exact_match:.1%}"]
    precisions = " / ".join(f"{p:.1f}" for p in s.bleu.precisions)
    return [test.name, f"{s.n_sentences:,}", *values, precisions, f"{s.bleu.brevity_penalty:.3f}"]


def write_card(run: RunFolder) -> None:
    run.write_page("README.md", render_record(run, card))


def card(record: RunRecord) -> str:
    settings, wording = record.settings, wording_of(record.settings)
    start = settings.training.start
    templates = environment(autoescape=False).overlay(finalize=plain)  # escaped for Markdown by `plain`
    text = templates.get_template("card.md").render(
        code=code,
        record=record,
        head=wording.title,
        start=start.name if start is not None else "",
        summary=wording.shape,
        n_parameters="" if record.n_parameters is None else compact(record.n_parameters),
        score_tables=score_tables(record),
        signatures=signatures(record.scores),
        unscored=unscored(record),
        wording=wording,
        sets=set_table(record.data.get("sets", ())),
        training=_training_lines(record),
        limits=wording.limits,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def plain(text: object) -> str:
    r"""Put text on one line, with the special characters of Markdown and HTML escaped. `Markup` is unchanged.

    >>> print(plain("a *b* <c>\nd"))
    a \*b\* \<c\> d
    """
    return text if isinstance(text, Markup) else _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def code(text: object) -> Markup:
    return Markup(f"`{' '.join(str(text).replace('`', ' ').split())}`")


def _training_lines(record: RunRecord) -> list[str]:
    """Return lines on the training text, settings and software for the model card."""
    t = record.settings.training
    lines = [leak_line(leak) for leak in record.data.get("leaks", ()) if leak.get("leaked")]
    if record.data.get("fingerprint"):
        lines.append(f"fingerprint of the encoded training data: {record.data['fingerprint']}")
    if record.events:
        last, restarts = record.events[-1], len(record.of("restart"))
        how = f"{t.optimizer or 'optimizer'} with {t.schedule or 'its'} schedule, weight averaging: {t.average}"
        lines.append(f"{last.get('update', 0):,} updates in {duration(last.get('seconds') or 0)}, {how}")
        lines.append(f"restarts: {restarts}; seed {t.seed}")
    if record.versions:
        lines.append(", ".join(f"{key} {value}" for key, value in record.versions.items()))
    return lines

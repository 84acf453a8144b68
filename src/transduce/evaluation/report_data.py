"""The parts of the report about what went in, data, settings, versions; and about what came in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transduce.evaluation.records import Record, versions
from transduce.inspection.page import Html, escape, table
from transduce.logging import duration


def data_section(data: Mapping[str, Any]) -> str:
    """Sets with their sizes, what cleaning dropped and why, held-out text found in the training text."""
    sets = data.get("sets", ())
    parts = []
    if any("bytes" in found for found in sets):
        header: tuple[str, ...] = ("set", "documents", "bytes", "tokens", "files")
        parts.append(table(header, map(_text_row, sets), numbers=frozenset({1, 2, 3})))
    elif sets:
        header = ("set", "read", "kept", "dropped", "source tokens", "target tokens", "files")
        parts.append(table(header, map(_set_row, sets), numbers=frozenset({1, 2, 3, 4, 5})))
    facts = []
    if data.get("padding") is not None:
        facts.append(f"{data['padding']:.1%} of the tokens in training batches are padding.")
    if data.get("fingerprint"):
        facts.append(f"Fingerprint of the encoded training data: {data['fingerprint']}.")
    parts += [f"<p>{escape(fact)}</p>" for fact in facts]
    for found in sets:
        cleaning = found.get("cleaning") or {}
        parts.append(_tallies(f"Dropped from {found['name']}", cleaning.get("dropped", ())))
        parts.append(_tallies(f"Changed in {found['name']}", cleaning.get("changed", ())))
    parts.append(_leaks(data.get("leaks", ())))
    return "".join(parts)


def _text_row(found: Mapping[str, Any]) -> tuple[object, ...]:
    numbers = (f"{found[key]:,}" for key in ("documents", "bytes", "tokens"))
    return (found["name"], *numbers, ", ".join(map(str, found.get("files", ()))))


def _set_row(found: Mapping[str, Any]) -> tuple[object, ...]:
    cleaning = found.get("cleaning") or {}
    kept = cleaning.get("kept", found.get("pairs", 0))
    read = cleaning.get("read", kept)
    tokens = (f"{found[key]:,}" if found.get(key) is not None else "" for key in ("src_tokens", "tgt_tokens"))
    return (
        found["name"],
        f"{read:,}",
        f"{kept:,}",
        f"{read - kept:,}",
        *tokens,
        ", ".join(map(str, found.get("files", ()))),
    )


def _tallies(title: str, tallies: Sequence[Mapping[str, Any]]) -> str:
    """What cleaning did, by reason, with examples."""
    lines = [_folded(f"{t['reason']}: {t['count']:,}", _pairs(t.get("samples", ()))) for t in tallies if t["count"]]
    return f"<h3>{escape(title)}</h3>{''.join(lines)}" if lines else ""


def _leaks(leaks: Iterable[Mapping[str, Any]]) -> str:
    parts = []
    for leak in leaks:
        n, total, sources = leak.get("leaked", 0), leak.get("pairs", 0), leak.get("sources", 0)
        text = f"{leak['name']}: {n:,} of {total:,} {leak.get('unit', 'pairs')} stand in the training text too"
        if sources > n:
            text += f", and {sources - n:,} more sources with another translation"
        found = n or sources
        parts.append(_folded(text, _pairs(leak.get("samples", ()))) if found else f"<p>{escape(text)}.</p>")
    return "<h3>Held-out text in the training text</h3>" + "".join(parts) if parts else ""


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _pairs(samples: Sequence[Mapping[str, Any]]) -> str:
    """Sentence pairs and where they stand; `train` is where a held-out one stands in the training text."""
    columns = {"text": "text", "src": "source", "tgt": "target", "place": "place", "train": "in the training text"}
    shown = [key for key in columns if any(key in sample for sample in samples)]
    return table([columns[key] for key in shown], [[sample.get(key, "") for key in shown] for sample in samples])


def settings_section(record: Record) -> str:
    """All settings with what they mean, and the recipe."""
    parts = []
    values = record.settings.model_dump(mode="json")
    for section, fields in values.items():
        if not isinstance(fields, dict):
            continue
        known = type(getattr(record.settings, section)).model_fields
        rows = [
            (Html(f"<code>{escape(key)}</code>"), _value(value), known[key].description or "")
            for key, value in fields.items()
        ]
        parts.append(_folded(section, table(("", "", ""), rows)))
    if record.recipe.strip():
        parts.append(_folded("recipe.toml, as it was given", f"<pre><code>{escape(record.recipe)}</code></pre>"))
    return "".join(parts)


def _value(value: Any) -> str:
    """A setting for people: TOML's words, and a corpus as its files."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items() if item is not None)
    return "; ".join(map(_value, value)) if isinstance(value, list) else str(value)


def provenance_section(record: Record) -> str:
    """Versions and restarts."""
    rows = [(key, value) for key, value in record.versions.items()]
    restarts = record.of("restart")
    if record.events:
        told = ", ".join(f"after update {e.get('update', 0):,}" for e in restarts)
        rows.append(("restarts", f"{len(restarts)}: {told}" if restarts else "none"))
    here = versions()
    rows.append(("this page", f"written by transduce {here['transduce']}, sacrebleu {here['sacrebleu']}"))
    return table(("", ""), rows)


def way_table(record: Record) -> str:
    """Restarts, goings back, and batches cut for memory, in order: at which update, after what time, and why."""
    rows = [
        (*_TOLD[event["event"]](event), duration(event["seconds"]) if event.get("seconds") else "")
        for event in record.events
        if event["event"] in _TOLD
    ]
    header = ("on the way", "update", "why, and what was done", "of training")
    return table(header, rows, numbers=frozenset({1, 3})) if rows else ""


def _rollback(event: Mapping[str, Any]) -> tuple[str, str, str]:
    loss, n = event.get("loss"), len(event["skipped"])
    why = event["reason"] + (f" ({loss:.4g})" if loss is not None else "")
    batches = "the batch" if n == 1 else f"the {n} batches"
    return (
        "went back",
        f"{event['from']:,}",
        f"{why}: back to update {event['update']:,}, and on without {batches} that may have done it",
    )


def _restart(event: Mapping[str, Any]) -> tuple[str, str, str]:
    update = event.get("update", 0)
    return "restart", f"{update:,}", "it had been stopped: " + ("on from the checkpoint" if update else "begun anew")


def _memory(event: Mapping[str, Any]) -> tuple[str, str, str]:
    why = f"memory did not suffice: batches of {event['too_large']:,} slots and more are cut in two from there on"
    return "out of memory", f"{event['update']:,}", why


_TOLD: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, str, str]]] = {
    "restart": _restart,
    "rollback": _rollback,
    "memory": _memory,
}

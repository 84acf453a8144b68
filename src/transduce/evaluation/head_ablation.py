"""Effect of removing each head on BLEU and loss of a translator (Michel et al. 2019)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transduce.config.settings import EvaluationSettings
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError
from transduce.evaluation.metrics import metrics
from transduce.inspection.subjects import TranslationSubject
from transduce.logging import Log
from transduce.metrics_log import MetricsFile
from transduce.nn.recording import switched_off, switches
from transduce.runs.atomic import write_text

_ALL = ""  # the name of the row with all heads


def ablate_heads(
    subject: TranslationSubject, srcs: Sequence[str], refs: Sequence[str], path: Path, log: Log
) -> list[dict[str, Any]]:
    """Translate and score with each head switched off in turn; the first row has all heads on.

    Args:
        subject: The translator.
        srcs: Sources.
        refs: Their references.
        path: Has a line of JSON per row. Rows that it has already are not computed again.
        log: Shows progress.

    Returns:
        Rows with `name`, `title`, `bleu`, and `loss`: nats per token of the references.

    Raises:
        DataError: The file is of another model, other texts or other settings.
    """
    heads = {name: title for name, title in switches(subject.model).items() if ".heads." in name}
    if not heads:
        raise DataError("this model has no heads that can be switched off; give a run of a Transformer")
    key = _key(subject, srcs, refs)
    known = {row["name"]: row for row in _read(path, key)}
    if not known and path.exists() and path.stat().st_size:
        raise DataError(f"{path}: has no results of --ablate-heads; name another file, or remove it")
    file = MetricsFile(path)
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        write_text(path, text[: text.rfind("\n") + 1])  # without half a line, in which a run was killed
    names = {_ALL: "all heads", **heads}
    with log.progress("heads") as bar:
        for number, (name, title) in enumerate(names.items()):
            bar.update(number / len(names), note=title)
            if name not in known:
                bleu, loss = _scores(subject, [name] if name else [], srcs, refs)
                known[name] = {"key": key, "name": name, "title": title, "bleu": bleu, "loss": loss}
                file.append(known[name])
        bar.update(1.0)
    return [known[name] for name in names]


def format_ablation(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table, the most important heads first."""
    whole, *others = rows
    yield f"{'':44} {'loss':>8} {'BLEU':>7}"
    yield f"{whole['title']:44} {whole['loss']:8.4f} {whole['bleu']:7.2f}"
    for row in sorted(others, key=lambda row: -row["loss"]):
        yield f"{row['title']:44} {row['loss'] - whole['loss']:+8.4f} {row['bleu'] - whole['bleu']:+7.2f}"


def _scores(
    subject: TranslationSubject, off: Sequence[str], srcs: Sequence[str], refs: Sequence[str]
) -> tuple[float, float]:
    engine = TorchEngine(switched_off(subject.model, off))
    limit = None if subject.folder is None else subject.folder.settings.model.position_limit
    translator = Translator(engine, subject.tokenizers, settings=subject.settings, position_limit=limit)
    outputs = [translation.text for translation in translator.translate(srcs)]
    scoring = _scoring(subject)
    bleu: Any = metrics(scoring.tokenize, scoring.lowercase)["BLEU"]
    known = [log_prob for one in translator.score(srcs, refs) for log_prob in one.token_log_probs]
    return float(bleu.corpus_score(outputs, [list(refs)]).score), -sum(known) / max(1, len(known))


def _scoring(subject: TranslationSubject) -> EvaluationSettings:
    return EvaluationSettings() if subject.folder is None else subject.folder.settings.evaluation


def _key(subject: TranslationSubject, srcs: Sequence[str], refs: Sequence[str]) -> str:
    """Identifies the model, the settings of its translations and scores, and the texts."""
    model = "" if subject.folder is None else subject.folder.model_digest()
    settings = (one.model_dump_json() for one in (subject.settings, _scoring(subject)))
    return hashlib.sha256("\n".join([model, *settings, *srcs, "", *refs]).encode("utf-8", "replace")).hexdigest()[:16]


def _read(path: Path, key: str) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            found = row["key"]
        except (ValueError, KeyError, TypeError):
            continue  # the last line, where a run was killed
        if found != key:
            raise DataError(
                f"{path}: has results of another model, other texts or other settings; name another file, or remove it"
            )
        yield row

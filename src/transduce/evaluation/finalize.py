"""The end of a training: the report and the model card."""

from __future__ import annotations

import shutil

from transduce.evaluation.card import write_card
from transduce.evaluation.report import write_report
from transduce.evaluation.result_files import Wording
from transduce.logging import Log
from transduce.runs.folder import RunFolder

LOG = "metrics.jsonl"


def finalize(folder: RunFolder, wording: Wording, log: Log) -> None:
    """Write the report and the model card, seal the log with a checksum and delete the encoded text."""
    if (folder.path / LOG).exists():
        folder.manifest.add(folder.manifest.records, LOG)
    write_report(folder, wording)
    write_card(folder, wording)
    unused = folder.path / ".tokens.done.aside"  # after a kill, the next start removes the rest
    (folder.path / "tokens").rename(unused)  # from here on the run is finished
    shutil.rmtree(unused, ignore_errors=True)
    log.say(f"run folder: {folder.path}    report: {folder.path / 'report.html'}")


def restore_pages(folder: RunFolder, wording: Wording, *, log: Log) -> None:
    """Write the report and the card of a finished run again if they are missing."""
    for name, write in (("report.html", write_report), ("README.md", write_card)):
        if not (folder.path / name).exists():
            write(folder, wording)
            log.say(f"rewritten: {folder.path / name}")

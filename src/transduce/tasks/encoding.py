"""Imported encoders without a head. No training makes them; other runs are fine-tuned from them."""

from __future__ import annotations

from transduce.evaluation.records import Wording, shape_line
from transduce.tasks.base import TaskInfo


class Encoding(TaskInfo):
    """Vectors of texts."""

    name = "encoding"
    wording = Wording(
        title="An encoder of texts, without a head",
        does="can be fine-tuned",
        command="transduce train --from THIS_FOLDER ...",
        shape=lambda record: f"text encoder · {shape_line(record)}",
        limits=lambda record: (),
    )

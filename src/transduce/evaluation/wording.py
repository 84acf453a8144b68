"""The words for the models of a task in messages, the report and the model card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transduce.config import DataSettings
from transduce.evaluation.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words of a task.

    Args:
        title: What a model is, as a noun phrase in Markdown; may contain `{src}`, `{tgt}` and `{labels}`.
        does: What a model does, as a verb phrase.
        command: A shell line that uses the model in THIS_FOLDER.
        python: Lines of Python that do the same; empty if there are none.
        samples: Heading of the report's samples.
        shape: The model in one line of plain text.
        limits: What the card says about the limits of a model.
    """

    title: str
    does: str
    command: str
    python: str = ""
    samples: str = "Samples"
    shape: Callable[[Record], str]
    limits: Callable[[Record], tuple[str, ...]]

    def title_for(self, data: DataSettings) -> str:
        """Return the title of a model trained on this data."""
        labels = ", ".join(f"`{' '.join(label.replace('`', ' ').split())}`" for label in data.labels or ())
        return self.title.format(src=data.src_lang, tgt=data.tgt_lang, labels=labels)

    @property
    def usage(self) -> str:
        """What a model does and its command, e.g. "translates text: `transduce translate`"."""
        return f"{self.does}: `{' '.join(self.command.split()[:2])}`"


def shape_line(record: Record) -> str:
    """Format the architecture and its sizes."""
    m = record.settings.model
    size = f"{'+'.join(map(str, m.depth))} layers, d_model {m.d_model}, d_ff {m.d_ff}, {m.n_heads} heads"
    return f"{m.kind}, {size}, {m.residual}-norm, {m.positions} positions"

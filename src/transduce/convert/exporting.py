"""`transduce export`: a run as a folder for another program, compared with the run before it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transduce.convert.bert import export_bert
from transduce.convert.ctranslate2 import QUANTIZATIONS, export_ctranslate2
from transduce.convert.folder import Outgoing, check_free, make_parents
from transduce.convert.gpt2 import export_gpt2
from transduce.convert.marian_folder import export_marian
from transduce.convert.onnx_export import export_onnx
from transduce.decoding.loading import load_model
from transduce.errors import SettingsError, UserError, check_known
from transduce.models.registry import ARCHITECTURES, count_parameters
from transduce.runs.atomic import write_aside
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

Exporter = Callable[[Path, Outgoing], list[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """A format: its exporter for each family of architectures, and the quantizations that it supports."""

    exporters: Mapping[str, Exporter]
    quantizations: tuple[str, ...] = ()


EXPORTS = {
    "huggingface": Target({"Transformer": export_marian, "GPT": export_gpt2, "BERT": export_bert}),
    "ctranslate2": Target({"Transformer": export_ctranslate2}, QUANTIZATIONS),
    "onnx": Target(dict.fromkeys(("Transformer", "GPT", "BERT"), export_onnx), ("int8",)),
}


def export_run(run: Path, to: str, out: Path, *, quantization: str | None = None) -> Iterator[str]:
    """Create the folder `out` from a run's model for another program, and yield lines that report the comparison.

    `to`: huggingface, ctranslate2 or onnx. After an error there is no `out`. Raises `UserError`, or `TransduceError` if
    the exported model differs from the run.
    """
    check_known("to", to, EXPORTS)
    check_free(out)
    target = EXPORTS[to]
    if quantization not in (None, *target.quantizations):
        allowed = f"allowed are {', '.join(target.quantizations)}" if target.quantizations else f"{to} has none"
        raise SettingsError(f"quantization = {quantization!r}: {allowed}")
    outgoing = open_outgoing(run, quantization=quantization)
    kind, task = outgoing.settings.model.kind, outgoing.settings.task
    exporter = target.exporters.get(ARCHITECTURES[kind].family)
    if exporter is None:
        able = ", ".join(kind for kind, other in ARCHITECTURES.items() if other.family in target.exporters)
        raise SettingsError(f"{run} has a model of kind '{kind}', task '{task}'; {to} takes models of kind {able}")
    if outgoing.settings.model.reads_vectors:
        raise UserError(f"{run} has model.source = 'vectors', which no format can express; use it with transduce")
    if outgoing.settings.model.replaces_self_attention:
        raise UserError(
            f"{run} has model.decoder_self = 'ssru', which no format can express; translate it with "
            "transduce, or train with model.decoder_self = 'attention'"
        )
    make_parents(out)
    with write_aside(out) as aside:
        aside.mkdir()
        lines = exporter(aside, outgoing)
    yield f"{out}: {count_parameters(outgoing.model):,} parameters"
    yield from lines


def open_outgoing(run: Path, *, quantization: str | None = None) -> Outgoing:
    """The model of a run folder, ready for an exporter; `RunFolderError` where it is missing or damaged."""
    folder = RunFolder.open(run)
    tokenizers = load_tokenizers(folder)
    model = load_model(folder, tokenizers)
    return Outgoing(folder.settings, tokenizers, model.state_dict(), model.eval(), quantization)

"""`transduce export`: write a run for another program, and compare it with the run before it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transduce.config.architectures import TransformerSettings
from transduce.convert.bert import export_bert
from transduce.convert.ctranslate2 import QUANTIZATIONS, export_argos, export_ctranslate2
from transduce.convert.folder import Outgoing, check_free, make_parents
from transduce.convert.gpt2 import export_gpt2
from transduce.convert.peft import export_peft
from transduce.convert.seq2seq import export_seq2seq
from transduce.convert.t5 import export_t5
from transduce.decoding.open_run import load_model
from transduce.errors import SettingsError, UserError, check_known
from transduce.models.registry import ARCHITECTURES, count_parameters
from transduce.runs.atomic import write_aside
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

Exporter = Callable[[Path, Outgoing], list[str]]


def _export_translator(out: Path, run: Outgoing) -> list[str]:
    """Write a translator's folder for transformers: as T5 if it has T5's positions, else in BART's format."""
    is_t5 = isinstance(s := run.settings.model, TransformerSettings) and s.positions == "t5"
    return (export_t5 if is_t5 else export_seq2seq)(out, run)


@dataclass(frozen=True, slots=True)
class Target:
    """An export format: its exporter for each family of architectures, and the quantizations that it supports.

    `is_file`: the exporter writes a single file instead of a folder.
    """

    exporters: Mapping[str, Exporter]
    quantizations: tuple[str, ...] = ()
    is_file: bool = False


EXPORTS = {
    "huggingface": Target({"Transformer": _export_translator, "GPT": export_gpt2, "BERT": export_bert}),
    "peft": Target({"Transformer": export_peft}),
    "ctranslate2": Target({"Transformer": export_ctranslate2}, QUANTIZATIONS),
    "argos": Target({"Transformer": export_argos}, QUANTIZATIONS, is_file=True),
}


def export_run(run: Path, to: str, out: Path, *, quantization: str | None = None) -> Iterator[str]:
    """Create `out` from a run's model for another program, and yield lines that report the comparison.

    `to`: huggingface, peft or ctranslate2 (a folder), or argos (a package). If there is an error, no `out` is left.
    Raises `UserError`, or `TransduceError` if the exported model differs from the run.
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
    outgoing.settings.model.require_text("export", run=run)
    if outgoing.settings.model.replaces_self_attention:
        raise UserError(
            f"{run} has model.decoder_self = 'ssru', which no format can express; translate it with "
            "transduce, or train with model.decoder_self = 'attention'"
        )
    make_parents(out)
    with write_aside(out) as aside:
        if not target.is_file:
            aside.mkdir()
        lines = exporter(aside, outgoing)
    yield f"{out}: {count_parameters(outgoing.model):,} parameters"
    yield from lines


def open_outgoing(run: Path, *, quantization: str | None = None) -> Outgoing:
    """Load a run's model for an exporter; `RunFolderError` if the folder is missing or damaged."""
    folder = RunFolder.open(run)
    tokenizers = load_tokenizers(folder)
    model = load_model(folder, tokenizers)
    adapters = folder.load_adapters() if folder.has_adapters else {}
    given = folder.settings, tokenizers, model.state_dict(), model.eval()
    return Outgoing(*given, quantization, adapters, folder.base_name)

"""Models in from other programs, and out to them: `transduce import` and `transduce export`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from transduce.config import to_toml
from transduce.config.purposes import PURPOSES
from transduce.convert import bert, gpt2, hub, marian
from transduce.convert.ctranslate2 import QUANTIZATIONS, export_ctranslate2
from transduce.convert.download import Source, fetched, hub_name
from transduce.convert.exporting import Outgoing, export_marian
from transduce.convert.exporting_hub import export_bert, export_gpt2
from transduce.convert.folder import PICKLED, SAFE
from transduce.convert.importing import Imported, import_marian
from transduce.convert.importing_hub import import_bert, import_gpt2
from transduce.convert.onnx_export import export_onnx
from transduce.decoding.loading import load_model
from transduce.errors import RunFolderError, SettingsError, UserError, nearest
from transduce.evaluation.card import plain
from transduce.logging import Log
from transduce.models.registry import ARCHITECTURES, build_model, count_parameters
from transduce.runs.atomic import expecting, write_aside
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import fingerprint
from transduce.text.tokenizer import load_tokenizers

_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
IMPORTERS = {
    "marian": Source(
        import_marian,
        marian.ARCHITECTURES,
        files=("tokenizer_config.json", "generation_config.json", "vocab.json", "target_vocab.json"),
        tokenizer=("source.spm", "target.spm"),
    ),
    "bert": Source(import_bert, bert.ARCHITECTURES, files=_NAMES, tokenizer=(hub.FILE,), older=(hub.WORDS, hub.ADDED)),
    "gpt2": Source(
        import_gpt2,
        gpt2.ARCHITECTURES,
        files=_NAMES,
        tokenizer=(hub.FILE,),
        older=(hub.PIECES, hub.MERGES, hub.ADDED),
    ),
}
USES = {task: ("```sh", purpose.command, "```") for task, purpose in PURPOSES.items()}
"""What the card says of a model of each task."""


@dataclass(frozen=True, slots=True)
class Target:
    """Another program: how a run of each task that it can take is written, and the --quantization that it knows."""

    exporters: Mapping[str, Callable[[Path, Outgoing], list[str]]]
    quantizations: tuple[str, ...] = ()


EXPORTS = {
    "huggingface": Target(
        {
            "translation": export_marian,
            "causal": export_gpt2,
            "masked": export_bert,
            "classification": export_bert,
            "encoding": export_bert,
        }
    ),
    "ctranslate2": Target({"translation": export_ctranslate2}, QUANTIZATIONS),
    "onnx": Target(dict.fromkeys(USES, export_onnx), ("int8",)),
}


def import_run(
    kind: str, source: Path | str, run: Path, *, revision: str | None = None, log: Log | None = None
) -> Iterator[str]:
    """Make the run folder `run` of another program's model; lines that tell what was made.

    `source`: a folder, or OWNER/NAME of a model on the Hub, which is downloaded (`revision`: a branch, tag or commit).
    All of it or, when this fails, nothing. Raises `UserError`.
    """
    _known(kind, IMPORTERS, "import")
    name = hub_name(str(source))
    if name is None:
        source = Path(source)
        _check_folder(source)
        if revision is not None:
            raise SettingsError(f"--revision {revision} goes with a name on the Hub; {source} is a folder")
        _check_room(run)
        yield from _import_folder(kind, source, run, f"the folder `{plain(source.absolute().name)}`")
        return
    _check_room(run)
    with (
        _made(run.parent),
        fetched(name, source=IMPORTERS[kind], beside=run, revision=revision, log=log) as there,
    ):
        yield from _import_folder(kind, there.folder, run, there.origin)
    yield f"downloaded: {there.name} at commit {there.commit}"


def _check_folder(source: Path) -> None:
    """Refuse what is no folder, and say what else may have been meant."""
    if source.is_dir():
        return
    if source.exists():
        raise RunFolderError(f"{source} is a file; an import takes the folder that it lies in")
    owner = source.parent.is_dir() and len(source.parts) == 2
    hint = f" ({source.parent} is one, so that this is no name on the Hub)" if owner else ""
    hint = "; a model on the Hub is named OWNER/NAME, as openai-community/gpt2" if len(source.parts) == 1 else hint
    raise RunFolderError(f"there is no folder {source}{hint}")


def _import_folder(kind: str, source: Path, run: Path, origin: str) -> Iterator[str]:
    with expecting(source):  # what the readers have not looked for themselves
        found = IMPORTERS[kind].importer(source)
    settings, tokenizers = found.settings, found.tokenizers
    model = build_model(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    model.load_state_dict(found.tensors)  # strict: every name and shape
    with _made(run.parent), write_aside(run) as aside:
        with RunFolder.create(aside, settings, to_toml(settings)) as folder:
            folder.save_tokenizers(tokenizers)
            folder.save_model(model.state_dict())
            folder.write_page("README.md", _card(found, kind, source, origin))
        (aside / ".lock").unlink(missing_ok=True)
    yield f"{run}: {count_parameters(model):,} weights, {tokenizers.n_src:,} and {tokenizers.n_tgt:,} pieces"
    yield from found.notes


def export_run(run: Path, to: str, out: Path, *, quantization: str | None = None) -> Iterator[str]:
    """Make the folder `out` of a run's model for another program; lines that tell what was checked.

    All of it or, when this or the check fails, nothing. Raises `UserError`, or `TransduceError` where the check fails.
    """
    _known(to, EXPORTS, "--to")
    _check_room(out)
    target = EXPORTS[to]
    if quantization is not None and not target.quantizations:
        able = ", ".join(name for name, other in EXPORTS.items() if other.quantizations)
        raise SettingsError(f"--quantization goes with --to {able}, not {to}")
    if quantization not in (None, *target.quantizations):
        raise SettingsError(f"--quantization {quantization or repr('')}: allowed are {', '.join(target.quantizations)}")
    outgoing = open_outgoing(run, quantization=quantization)
    task = outgoing.settings.task
    if to not in ARCHITECTURES[outgoing.settings.model.kind].exports:
        raise SettingsError(f"{run} is of task '{task}'; --to {to} takes: {', '.join(target.exporters)}")
    with _made(out.parent), write_aside(out) as aside:
        told = target.exporters[task](aside, outgoing)
    yield f"{out}: {count_parameters(outgoing.model):,} weights"
    yield from told


def open_outgoing(run: Path, *, quantization: str | None = None) -> Outgoing:
    """The model of a run folder with all that an export needs; `RunFolderError` where it is missing or damaged."""
    folder = RunFolder.open(run)
    model = load_model(folder)
    return Outgoing(folder.settings, load_tokenizers(folder), model.state_dict(), model.eval(), quantization)


def _known(name: str, table: Collection[str], option: str) -> None:
    if name not in table:
        raise SettingsError(f"{option} {name}{nearest(name, table)}; known: {', '.join(table)}")


def _check_room(path: Path) -> None:
    """Refuse a place that is taken."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} is there already; name another folder, or remove it")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Within, the folder is there with all that it lies in; those that were made for it go again after an error."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror or error}") from None
        yield
    except BaseException:
        for path in missing:  # the innermost first
            with suppress(OSError):  # something else lies in it by now
                path.rmdir()
        raise


def _card(found: Imported, kind: str, source: Path, origin: str) -> str:
    """The model card of an imported run: where it came from, and how it is used."""
    settings, data = found.settings, found.settings.data
    weights = next(path for name in (SAFE, PICKLED) if (path := source / name).exists())
    lines = [
        f"# {plain(found.settings.name)}",
        "",
        f"{PURPOSES[settings.task].head_of(data)}, imported, not trained here.",
        "",
        "## Where it came from",
        "",
        f"- `transduce import {kind}` of {origin}, as transformers keeps it",
        f"- sha256 of its `{weights.name}`: `{fingerprint(weights)['sha256']}`",
        *(f"- {plain(note)}" for note in found.notes),
        "- its licence, training text and limits: see its own card",
        "",
        "## Use",
        "",
        *USES[settings.task],
    ]
    return "\n".join(lines) + "\n"

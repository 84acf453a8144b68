"""`transduce import`: a run folder from a model of another program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.config.recipe import to_toml
from transduce.config.settings import Settings
from transduce.convert import bert, gpt2, hub_folder, marian
from transduce.convert.download import download, hub_name
from transduce.convert.folder import PICKLED, SAFE, Imported, check_free, make_parents
from transduce.convert.marian_folder import import_marian
from transduce.errors import RunFolderError, SettingsError, check_known
from transduce.evaluation.card import plain
from transduce.models.registry import build_model, count_parameters
from transduce.runs.atomic import expecting, write_aside
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import fingerprint
from transduce.tasks.registry import WORDINGS


@dataclass(frozen=True, slots=True)
class Importer:
    """A kind of model that can be imported.

    `architectures`: those supported, by model_type. `files`: all that may be read besides config.json and the weights.
    """

    importer: Callable[[Path], Imported]
    architectures: Mapping[str, Sequence[str]]
    files: tuple[str, ...]


_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
_VOCABULARY = (hub_folder.TOKENIZER, hub_folder.ADDED)
IMPORTERS = {
    "marian": Importer(
        import_marian,
        marian.ARCHITECTURES,
        files=(
            *("tokenizer_config.json", "generation_config.json", "vocab.json", "target_vocab.json"),
            *("source.spm", "target.spm"),
        ),
    ),
    "bert": Importer(bert.import_bert, bert.ARCHITECTURES, files=(*_NAMES, *_VOCABULARY, hub_folder.WORDS)),
    "gpt2": Importer(
        gpt2.import_gpt2,
        gpt2.ARCHITECTURES,
        files=(*_NAMES, *_VOCABULARY, hub_folder.PIECES, hub_folder.MERGES),
    ),
}


def import_run(
    kind: str, source: Path | str, run: Path, *, revision: str | None = None, quiet: bool = False
) -> Iterator[str]:
    """Create the run folder `run` from another program's model, and yield lines that report what was made.

    `kind`: marian, bert or gpt2. `source`: a folder, or OWNER/NAME of a model on the Hugging Face Hub, which is
    downloaded (`revision`: a branch, tag or commit; `quiet`: without progress bars). After an error no run is left.
    Raises `UserError`.
    """
    check_known("kind", kind, IMPORTERS)
    name, this = hub_name(str(source)), IMPORTERS[kind]
    if name is None:
        _check_folder(Path(source), revision)
    check_free(run)
    if name is None:
        folder, title = Path(source), Path(source).absolute().name
        origin = f"the folder `{plain(title)}`"
    else:
        folder = download(name, this.files, this.architectures, revision=revision, quiet=quiet)
        title, origin = name.rpartition("/")[2], f"`{name}` on the Hugging Face Hub, at commit `{folder.name}`"
    yield from _import_folder(kind, folder, run, title, origin)
    if name is not None:
        yield f"downloaded: {name} at commit {folder.name}"


def _check_folder(source: Path, revision: str | None) -> None:
    """Refuse what is not a folder, with a hint at what may have been meant."""
    if source.is_file():
        raise RunFolderError(f"{source} is a file; give the folder that contains it")
    if not source.is_dir():
        hint = ""
        if len(source.parts) == 1:
            hint = "; a model on the Hub is named OWNER/NAME, such as openai-community/gpt2"
        elif len(source.parts) == 2 and source.parent.is_dir():
            hint = f" (the folder {source.parent} exists, so this is not read as a name on the Hub)"
        raise RunFolderError(f"there is no folder {source}{hint}")
    if revision is not None:
        raise SettingsError(f"revision = {revision!r} needs a name on the Hub; {source} is a folder")


def _import_folder(kind: str, source: Path, run: Path, title: str, origin: str) -> Iterator[str]:
    with expecting(source):  # for malformed JSON that the importers do not check for
        found = IMPORTERS[kind].importer(source)
    settings, tokenizers = found.settings.model_copy(update={"name": title}), found.tokenizers
    model = build_model(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    model.load_state_dict(found.tensors)
    make_parents(run)
    with write_aside(run) as aside:
        with RunFolder.create(aside, settings, to_toml(settings)) as folder:
            folder.save_tokenizers(tokenizers.save)
            folder.save_model(model.state_dict())
            folder.write_page("README.md", _card(found.notes, settings, kind, source, origin))
        (aside / ".lock").unlink(missing_ok=True)
    sizes = f"{tokenizers.n_src:,} and {tokenizers.n_tgt:,} pieces"
    yield f"{run}: {count_parameters(model):,} parameters, {sizes}"
    yield from found.notes


def _card(notes: Sequence[str], settings: Settings, kind: str, source: Path, origin: str) -> str:
    """The model card of an imported run: its origin and its use."""
    wording = WORDINGS[settings.task].of(settings)
    weights = next(path for name in (SAFE, PICKLED) if (path := source / name).exists())
    listed = "".join(f"- {plain(note)}\n" for note in notes)
    return (
        f"# {plain(settings.name)}\n\n{wording.title}, imported, not trained with transduce.\n\n"
        f"## Origin\n\n- `transduce import {kind}` of {origin}, in the format of transformers\n"
        f"- sha256 of its `{weights.name}`: `{fingerprint(weights)['sha256']}`\n{listed}"
        "- licence, training data and limits: see the model's own card\n\n"
        f"## Use\n\n```sh\n{wording.command}\n```\n"
    )

"""`transduce import`: a run folder from a model of another program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transduce.config import to_toml
from transduce.convert import bert, gpt2, hub_folder, marian
from transduce.convert.download import download, hub_name
from transduce.convert.folder import (
    PICKLED,
    SAFE,
    Imported,
    check_is_free,
    known_or_nearest,
    made_folder,
)
from transduce.convert.marian_folder import import_marian
from transduce.errors import RunFolderError, SettingsError
from transduce.evaluation.card import plain
from transduce.logging import Log
from transduce.models.registry import build_model, count_parameters
from transduce.runs.atomic import expecting, write_aside
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import fingerprint
from transduce.tasks.registry import TASK_INFOS


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of model that can be imported.

    `architectures`: those supported, by model_type. `files` and `tokenizer`: what is read besides config.json and the
    weights. `older`: the files that replace `tokenizer` where its first is missing.
    """

    importer: Callable[[Path], Imported]
    architectures: Mapping[str, Sequence[str]]
    files: tuple[str, ...]
    tokenizer: tuple[str, ...]
    older: tuple[str, ...] = ()

    def wanted(self, available: Collection[str]) -> list[str]:
        """Of the files that exist, those to read besides config.json and the weights."""
        newer = self.tokenizer[0] in available or not self.older
        return [file for file in (*self.files, *(self.tokenizer if newer else self.older)) if file in available]


_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
IMPORTERS = {
    "marian": Source(
        import_marian,
        marian.ARCHITECTURES,
        files=("tokenizer_config.json", "generation_config.json", "vocab.json", "target_vocab.json"),
        tokenizer=("source.spm", "target.spm"),
    ),
    "bert": Source(
        bert.import_bert,
        bert.ARCHITECTURES,
        files=_NAMES,
        tokenizer=(hub_folder.TOKENIZER,),
        older=(hub_folder.WORDS, hub_folder.ADDED),
    ),
    "gpt2": Source(
        gpt2.import_gpt2,
        gpt2.ARCHITECTURES,
        files=_NAMES,
        tokenizer=(hub_folder.TOKENIZER,),
        older=(hub_folder.PIECES, hub_folder.MERGES, hub_folder.ADDED),
    ),
}


def import_run(
    kind: str, source: Path | str, run: Path, *, revision: str | None = None, log: Log | None = None
) -> Iterator[str]:
    """Create the run folder `run` from another program's model, and yield lines that report what was made.

    `kind`: marian, bert or gpt2. `source`: a folder, or OWNER/NAME of a model on the Hugging Face Hub, which is
    downloaded (`revision`: a branch, tag or commit). After an error nothing is left. Raises `UserError`.
    """
    known_or_nearest(kind, IMPORTERS, "import")
    name, this = hub_name(str(source)), IMPORTERS[kind]
    if name is None:
        _check_folder(Path(source), revision)
    check_is_free(run)
    with made_folder(run.parent), ExitStack() as stack:
        if name is None:
            folder, commit = Path(source), ""
            origin = f"the folder `{plain(folder.absolute().name)}`"
        else:
            asked = download(name, this.wanted, this.architectures, place=run, revision=revision, log=log)
            folder, endpoint, commit = stack.enter_context(asked)
            origin = f"`{name}` on {endpoint}, at commit `{commit}`"
        yield from _import_folder(kind, folder, run, origin)
    if commit:
        yield f"downloaded: {name} at commit {commit}"


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
        raise SettingsError(f"--revision {revision} needs a name on the Hub; {source} is a folder")


def _import_folder(kind: str, source: Path, run: Path, origin: str) -> Iterator[str]:
    with expecting(source):  # for malformed JSON that the importers do not check for
        found = IMPORTERS[kind].importer(source)
    settings, tokenizers = found.settings, found.tokenizers
    model = build_model(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    model.load_state_dict(found.tensors)
    with write_aside(run) as aside:
        with RunFolder.create(aside, settings, to_toml(settings)) as folder:
            folder.save_tokenizers(tokenizers.save)
            folder.save_model(model.state_dict())
            folder.write_page("README.md", _card(found, kind, source, origin))
        (aside / ".lock").unlink(missing_ok=True)
    sizes = f"{tokenizers.n_src:,} and {tokenizers.n_tgt:,} pieces"
    yield f"{run}: {count_parameters(model):,} parameters, {sizes}"
    yield from found.notes


def _card(found: Imported, kind: str, source: Path, origin: str) -> str:
    """The model card of an imported run: its origin and its use."""
    settings, wording = found.settings, TASK_INFOS[found.settings.task].wording
    weights = next(path for name in (SAFE, PICKLED) if (path := source / name).exists())
    notes = "".join(f"- {plain(note)}\n" for note in found.notes)
    return (
        f"# {plain(settings.name)}\n\n{wording.title_for(settings.data)}, imported, not trained with transduce.\n\n"
        f"## Origin\n\n- `transduce import {kind}` of {origin}, in the format of transformers\n"
        f"- sha256 of its `{weights.name}`: `{fingerprint(weights)['sha256']}`\n{notes}"
        "- licence, training data and limits: see the model's own card\n\n"
        f"## Use\n\n```sh\n{wording.command}\n```\n"
    )

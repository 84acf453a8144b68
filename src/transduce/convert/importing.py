"""`transduce import`: make a run folder from a model of another program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transduce.config.recipe import to_toml
from transduce.config.settings import Settings
from transduce.convert import bert, ctranslate2, gpt2, marian, peft, seq2seq, t5
from transduce.convert.ctranslate2_files import MODEL
from transduce.convert.folder import SAFE, Imported, check_free, make_parents, read_object, weight_files
from transduce.convert.parity import NotLoaded
from transduce.decoding.translator import Translator
from transduce.errors import RunFolderError, SettingsError, TransduceError, UserError, listed
from transduce.evaluation.report import plain
from transduce.evaluation.wording import wording_of
from transduce.models.registry import build_model, count_parameters
from transduce.runs.atomic import expecting, write_aside
from transduce.runs.folder import RunFolder
from transduce.runs.hub import download, hub_name
from transduce.runs.manifest import fingerprint
from transduce.text.languages import base_language

_LFS = b"version https://git-lfs"
_SETTINGS = ("*.json", "*.txt", "*.spm", "*.model")
"""Patterns of files with settings and vocabularies, for every family."""


def download_model(name: str, *, revision: str | None = None, quiet: bool = False) -> Path:
    """Download a model's config.json, weights, other settings and vocabulary; see `download`.

    A model that no importer supports is refused after its config.json. Pickled weights are not downloaded.
    """
    folder = download(name, "config.json", revision=revision, quiet=quiet)
    if not (folder / "config.json").exists():
        raise UserError(f"{name} has no config.json")
    importer = find_importer(folder)
    download(name, *importer.weights, *_SETTINGS, revision=folder.name, quiet=quiet)
    if not any(any(folder.glob(pattern)) for pattern in importer.weights):
        raise UserError(
            f"{name} has no {importer.weights[0]}, and other weights are not downloaded; name a revision that has it "
            f"(often refs/pr/NUMBER), or import a folder that was downloaded elsewhere (hf download {name} --local-dir "
            "FOLDER)"
        )
    return folder


@dataclass(frozen=True, slots=True)
class Importer:
    """A family of models that can be imported.

    `architectures`: supported architectures by model_type. `weights`: patterns of the files with the weights.
    `program`: the program that defines the format. `find_weights`: finds an imported model's files with weights.
    """

    importer: Callable[[Path], Imported]
    architectures: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: tuple[str, ...] = (SAFE, "model-?????-of-?????.safetensors")
    program: str = "transformers"
    find_weights: Callable[[Path], list[Path]] = weight_files


IMPORTERS = {
    "seq2seq": Importer(seq2seq.import_seq2seq, seq2seq.ARCHITECTURES),
    "t5": Importer(t5.import_t5, t5.ARCHITECTURES),
    "bert": Importer(bert.import_bert, bert.ARCHITECTURES),
    "gpt2": Importer(gpt2.import_gpt2, gpt2.ARCHITECTURES),
}
_CTRANSLATE2 = Importer(
    ctranslate2.import_ctranslate2,
    weights=(MODEL,),
    program="CTranslate2",
    find_weights=lambda folder: [folder / MODEL],
)
_ARGOS = Importer(  # of an unpacked package
    ctranslate2.import_argos, program="CTranslate2", find_weights=lambda folder: [folder / "model" / MODEL]
)
_MARIAN = Importer(marian.import_marian, program="Marian", find_weights=lambda source: [marian.find_model(source)])


def _of_adapters(base: Path | None) -> Importer:
    """Return the importer of PEFT's adapters for the run `base`."""
    read = partial(peft.import_peft, base=base)
    return Importer(read, program="PEFT", find_weights=lambda folder: [folder / peft.WEIGHTS])


def _has_adapters(folder: Path) -> bool:
    """Whether a folder contains adapters of PEFT without the weights that they adapt."""
    return (folder / peft.CONFIG).exists() and not (folder / "config.json").exists()


def find_importer(folder: Path, base: Path | None = None) -> Importer:
    """Return the importer for a folder or a file of Marian; `UserError` if there is none.

    A config.json that names no architecture is accepted. `base`: see `import_run`.
    """
    if _has_adapters(folder):
        return _of_adapters(base)
    if (folder / ctranslate2.ARGOS_METADATA).exists():
        return _ARGOS
    if folder.is_file() or (not (folder / "config.json").exists() and marian.models_in(folder)):
        return _MARIAN
    is_ctranslate2 = (folder / MODEL).exists()
    if not is_ctranslate2 and not (folder / "config.json").exists():
        raise RunFolderError(
            f"{folder / 'config.json'} is missing, which a model of transformers has; the folder has no model of other "
            f"programs either: {MODEL} (CTranslate2), *.npz or *.bin (Marian), {peft.CONFIG} (PEFT)"
        )
    config = read_object(folder / "config.json", optional=is_ctranslate2)
    if is_ctranslate2 or "add_source_eos" in config:
        return _CTRANSLATE2
    model_type, named = str(config.get("model_type")), config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else None
    for importer in IMPORTERS.values():
        if architecture in (*importer.architectures.get(model_type, ()), None) and model_type in importer.architectures:
            return importer
    supported = {kind: names for importer in IMPORTERS.values() for kind, names in importer.architectures.items()}
    known = "; ".join(f"model_type {kind}: {', '.join(names)}" for kind, names in supported.items())
    raise UserError(f"{folder} contains {architecture or 'a model'} (model_type {model_type}); supported here: {known}")


def import_run(
    source: Path | str, run: Path, *, revision: str | None = None, base: Path | None = None, quiet: bool = False
) -> Iterator[str]:
    """Create the run folder `run` from another program's model, and yield lines that describe it.

    `source`: a folder, a package of Argos Translate, a model of Marian, or OWNER/NAME of a model on the Hugging Face
    Hub, which is downloaded (`revision`: a branch, tag or commit; `quiet`: without progress bars). The kind of model is
    detected from the files. If there is an error, no run is left. `base`: for a folder of PEFT, the run whose weights
    the adapters adapt. Raises `UserError`.
    """
    with _reading(Path(source)):
        name = hub_name(str(source))
        if name is None:
            _check_path(Path(source), revision)
        if base is not None and not _has_adapters(Path(source)):
            raise SettingsError(
                f"base = '{base}': {source} has no {peft.CONFIG}, so it is no folder of adapters; leave it out", "base"
            )
    check_free(run)
    if name is not None:
        folder = download_model(name, revision=revision, quiet=quiet)
        origin = f"`{name}` on the Hugging Face Hub, at commit `{folder.name}`"
        yield from _import_folder(folder, run, name.rpartition("/")[2], origin)
        yield f"downloaded: {name} at commit {folder.name}"
        return
    path = Path(source).absolute()
    title, kind = path.stem, "file"
    opened: AbstractContextManager[Path] = nullcontext(Path(source))
    if path.is_dir():
        title, kind = path.name, "folder"
    elif path.suffix == ctranslate2.ARGOS_SUFFIX:
        kind, opened = "package", ctranslate2.unpacked(path)
    with opened as folder:
        yield from _import_folder(folder, run, title, f"the {kind} `{plain(path.name)}`", base=base)


def _check_path(source: Path, revision: str | None) -> None:
    """Raise an error that hints at the likely mistake, unless the path is a folder or file of a model."""
    if source.is_file() and source.suffix not in (ctranslate2.ARGOS_SUFFIX, *marian.SUFFIXES):
        raise RunFolderError(
            f"{source} is a file; give the folder that contains it, a package *{ctranslate2.ARGOS_SUFFIX}, or a model "
            f"of Marian ({' or '.join(f'*{suffix}' for suffix in marian.SUFFIXES)})"
        )
    if not source.exists():
        hint = ""
        if len(source.parts) == 1:
            hint = "; a model on the Hub is named OWNER/NAME, such as openai-community/gpt2"
        elif len(source.parts) == 2 and source.parent.is_dir():
            hint = f" (the folder {source.parent} exists, so this is not read as a name on the Hub)"
        raise RunFolderError(f"there is no folder {source}{hint}")
    if not source.is_dir() and not source.is_file():
        raise RunFolderError(
            f"{source} is neither a folder nor a package *{ctranslate2.ARGOS_SUFFIX}; give one of the two"
        )
    if revision is not None:
        raise SettingsError(f"revision = {revision!r} needs a name on the Hub; {source} exists here")


def _import_folder(source: Path, run: Path, title: str, origin: str, *, base: Path | None = None) -> Iterator[str]:
    with _reading(source), expecting(source):  # for malformed JSON that the importers do not check
        importer = find_importer(source, base)
        imported = importer.importer(source)
    settings, tokenizers = imported.settings.model_copy(update={"name": title}), imported.tokenizers
    model = build_model(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    model.load_state_dict(imported.tensors)
    lines = list(imported.notes)
    if imported.compare is not None:
        try:
            lines.append(imported.compare(model.eval()))
        except NotLoaded as error:  # the folder may be incomplete for transformers
            lines.append(f"not compared: {error}")
    make_parents(run)
    with write_aside(run) as aside:
        with RunFolder.create(aside, settings, to_toml(settings)) as folder:
            folder.save_tokenizers(tokenizers.save)
            folder.save_model(model.state_dict())
            folder.write_page("README.md", _card(imported, settings, importer, importer.find_weights(source), origin))
        (aside / ".lock").unlink(missing_ok=True)
        if settings.task == Translator.task:
            lines += _translate_a_sentence(aside)
    sizes = f"{tokenizers.n_src:,} and {tokenizers.n_tgt:,} pieces"
    yield f"{run}: {count_parameters(model):,} parameters, {sizes}"
    yield from lines


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Context in which an error names the files that cannot be read, or that Git LFS has not downloaded."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"cannot read {error.filename or source}: {error.strerror or error}") from error
    except UserError as error:
        folder, pointers = source if source.is_dir() else source.parent, list[str]()
        with suppress(OSError):
            small = (path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < 1000)
            pointers = [path.name for path in small if path.read_bytes().startswith(_LFS)]
        if not pointers:
            raise
        raise RunFolderError(
            f"{folder} has pointers of Git LFS in place of {listed(pointers, 9)}; download them with git lfs pull"
        ) from error


def _translate_a_sentence(run: Path) -> Iterator[str]:
    """Yield a line with a sample translation. A multilingual model translates from English, or not at all."""
    translator, sentence = Translator.load(run), "Hello, world."
    framing = translator.tokenizers.src.framing
    if translator.tokenizers.src.frame is None:
        english = [(src, tgt) for src, tgt in framing.pairs() if base_language(src) == "en" != base_language(tgt)]
        if not english:
            return
        translator = translator.between(*english[0])
    try:
        text = translator.translate(sentence, beam=1, max_length=32).text
    except TransduceError as error:  # weights that give no finite probability
        yield f"not translated: {error}"
        return
    yield f"translated, {' to '.join(translator.languages)}: {sentence!r} becomes {text[:80]!r}"


def _card(imported: Imported, settings: Settings, importer: Importer, weights: list[Path], origin: str) -> str:
    """Return the model card of an imported run, with its origin and use."""
    wording = wording_of(settings, n_languages=len(imported.tokenizers.src.framing.languages))
    digests = "".join(f"- sha256 of its `{path.name}`: `{fingerprint(path)['sha256']}`\n" for path in weights)
    listed = "".join(f"- {plain(note)}\n" for note in imported.notes)
    return (
        f"# {plain(settings.name)}\n\n{wording.title}, imported, not trained with transduce.\n\n"
        f"## Origin\n\n- `transduce import` of {origin}, in the format of {importer.program}\n{digests}{listed}"
        "- licence, training data and limits: see the model's own card\n\n"
        f"## Use\n\n```sh\n{wording.command}\n```\n"
    )

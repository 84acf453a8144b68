"""Packages of Argos Translate, which LibreTranslate uses too: a zip file with a CTranslate2 model of one direction."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transduce import __version__
from transduce.convert.ctranslate2 import export_ctranslate2, import_ctranslate2
from transduce.convert.folder import Imported, Outgoing, read_object
from transduce.convert.format_limits import CTRANSLATE2_HINT
from transduce.errors import RunFolderError, SettingsError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.text.languages import language_name

SUFFIX, METADATA = ".argosmodel", "metadata.json"
_MODEL, _PIECES = "model", "sentencepiece.model"


@contextmanager
def unpacked(package: Path) -> Iterator[Path]:
    """Unpack a package into a temporary folder, and yield the folder in it. Raises `UserError`."""
    with TemporaryDirectory(prefix="transduce-") as temporary:
        try:
            with zipfile.ZipFile(package) as archive:
                archive.extractall(temporary)  # never writes outside the folder
        except (zipfile.BadZipFile, OSError, RuntimeError) as error:
            raise RunFolderError(f"{package} is damaged, or not a package of Argos Translate: {error}") from None
        folders = [path.parent for path in Path(temporary).glob(f"*/{METADATA}")]
        if len(folders) != 1:
            raise RunFolderError(f"{package} is no package of Argos Translate: it needs one folder with {METADATA}")
        yield folders[0]


def import_argos(folder: Path) -> Imported:
    """Read an unpacked package. Raises `UserError`, also if the package tokenizes without SentencePiece."""
    metadata = read_object(folder / METADATA)
    if (folder / "bpe.model").exists() and not (folder / _PIECES).exists():
        raise UserError(f"{folder} splits words with bpe.model, which is not supported; packages with {_PIECES} are")
    codes = {"src_lang": metadata.get("from_code"), "tgt_lang": metadata.get("to_code")}
    languages = {name: str(code) for name, code in codes.items() if code}
    return import_ctranslate2(folder / _MODEL, languages=languages, prefix=str(metadata.get("target_prefix") or ""))


def export_argos(out: Path, run: Outgoing) -> list[str]:
    """Write the package `out`, compare its model with the run's, and return lines that report the result.

    Raises `UserError` if CTranslate2 does not support a setting, or if the run does not name its languages.
    """
    if run.tokenizers.src.framing.directions:
        raise UserError(f"a package of Argos Translate cannot begin sources with a language token; {CTRANSLATE2_HINT}")
    data = run.settings.data
    unnamed = [f"data.{side}_lang" for side in ("src", "tgt") if not data.is_changed(f"{side}_lang")]
    if unnamed:
        raise SettingsError(f"a package of Argos Translate names its languages, and the run has no {unnamed[0]}")
    with TemporaryDirectory(prefix="transduce-") as temporary:
        folder = Path(temporary) / f"translate-{data.src_lang}_{data.tgt_lang}"
        (folder / _MODEL).mkdir(parents=True)
        lines = export_ctranslate2(folder / _MODEL, run)
        (folder / _MODEL / "target.spm").unlink()  # Argos joins the pieces of a translation without a model
        (folder / _MODEL / "source.spm").rename(folder / _PIECES)
        metadata = {
            "package_version": "1.0",
            "argos_version": "1.9.0",
            "from_code": data.src_lang,
            "from_name": language_name(data.src_lang),
            "to_code": data.tgt_lang,
            "to_name": language_name(data.tgt_lang),
        }
        write_json(folder / METADATA, metadata)
        write_text(folder / "README.md", f"# {run.settings.name or folder.name}\n\nMade by transduce {__version__}.\n")
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(folder.parent))
    return lines

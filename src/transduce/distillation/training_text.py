"""The text that a run was trained on, read once more as the training has read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transduce.config.settings import DataSettings, Settings, is_remote
from transduce.data.corpus import text_files
from transduce.data.lines import is_missing
from transduce.data.preparation import PairTexts
from transduce.data.word_links import mark_with_links
from transduce.data.workers import Workplace
from transduce.errors import DataError
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.registry import find_task
from transduce.text.tokenizer import load_tokenizers


def text_settings(run: RunFolder, changes: Mapping[str, Any], root: Path | None) -> Settings:
    """The settings to read the text of a run with: with changes of `data`, files in `root`, and no word alignments."""
    values, own = run.settings.data.model_dump(exclude_unset=True), changes.get("data", {})
    merged = {**values, **own} if isinstance(own, Mapping) else own
    data = Settings.from_mapping({"data": merged}).resolve_paths(Path()).data
    if root is not None and text_files(data):
        data = _moved(data, root)
    if not data.train and not data.demo:
        raise DataError(
            f"{run.path} has no training text (it was imported); name the text with data.train = "
            '[{src="a.en", tgt="a.de"}], and data.valid and data.test likewise'
        )
    training = run.settings.training.model_copy(update={"guided_alignment": None})
    return run.settings.model_copy(update={"data": data, "training": training})


def _moved(data: DataSettings, root: Path) -> DataSettings:
    """The same local files below `root`: each path relative to the folder that all of them share."""
    local = [path for path in text_files(data) if not is_remote(path)]
    shared = os.path.commonpath([path.parent for path in local]) if local else ""
    target = Path(os.path.realpath(root))
    return data.with_local_paths(lambda path: target / path.relative_to(shared))


def read_training_text(
    run: RunFolder, settings: Settings, log: Log, *, place: Workplace | None = None, check: bool = True
) -> PairTexts:
    """The sentence pairs of `settings`, cleaned and without what was held out.

    Args:
        run: The run.
        settings: Those of `text_settings`.
        log: For notes about the text.
        place: Where the temporary files are.
        check: Whether the text must be that of the training. This is unknown where its word alignments are missing.

    Raises:
        DataError: A file is missing, or the text is not that of the training.
    """
    task, data = find_task("translation"), settings.data
    for path in text_files(data):
        if is_missing(path):
            raise DataError(f"there is no file {path}; if the training text was moved, name its folder (data)")
    texts: PairTexts = task.read(settings, log, place=place)
    links = run.settings.training.guided_alignment
    if not check or (links is not None and is_missing(links)):
        return texts
    then = run.read_record("data.json").get("fingerprint")
    marks = texts.marks if links is None else [mark_with_links(mark, links) for mark in texts.marks]
    if then not in (None, task.fingerprint(run.settings, load_tokenizers(run), marks)):
        raise DataError(
            f"the training text of {run.path} has changed since its training; restore the files, or name other text "
            "(data.train)"
        )
    return texts

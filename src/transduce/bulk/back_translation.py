"""Back-translation: monolingual text of the target language becomes sentence pairs (Sennrich et al. 2016)."""

from __future__ import annotations

from pathlib import Path

from transduce.bulk.translate import translate_to_folder
from transduce.config.settings import Corpus, Settings
from transduce.logging import Log


def with_back_translations(settings: Settings, folder: Path, log: Log) -> Settings:
    """Translate the texts of `data.monolingual` into the source language, and move the pairs to `data.train`.

    `data.monolingual` of the result is empty, so that a distillation from the run does not translate the texts again.
    The translations are written into `folder`, one subfolder for each text; a killed call resumes. Raises `UserError`
    if a model or a text cannot be used.
    """
    data, pairs = settings.data, list[Corpus]()
    for number, text in enumerate(data.monolingual, 1):
        log.say(f"translating {text.tgt} with {text.model} into {folder}")
        decoding = {"sample": True} if text.sample else {"beam": text.beam}
        [src] = translate_to_folder(
            text.model,
            [text.tgt],
            folder / str(number),
            languages=data.named_languages[::-1],
            device=settings.training.device,
            log=log,
            **decoding,
        )
        pairs.append(Corpus(src=src, tgt=text.tgt, weight=text.weight))
    return settings.with_values("data", train=[*data.train, *pairs], monolingual=())

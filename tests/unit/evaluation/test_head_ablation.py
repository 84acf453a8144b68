"""The rows of `ablate_heads`, against a copy of the model whose output projection lacks the head's columns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu.metrics import BLEU

from text_runs import make_run
from transduce.data.batch import collate
from transduce.data.store import Example
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError
from transduce.evaluation.head_ablation import ablate_heads
from transduce.inspection.inspected_models import TranslationSubject, open_subject
from transduce.logging import Log
from transduce.runs.folder import RunFolder

SRCS = ["a man rides a horse", "two dogs run"]
REFS = ["Ein Mann reitet ein Pferd", "ZWEI Hunde rennen"]


def subject_with(path: Path, section: str, **values: Any) -> TranslationSubject:
    found = open_subject(path, device="cpu")
    assert found.folder is not None
    settings = found.folder.settings.with_values("decoding", max_length=8).with_values(section, **values)
    folder = RunFolder(path, settings, found.folder.manifest)
    return TranslationSubject(found.model, folder, found.tokenizers)


def test_a_row_has_the_loss_and_bleu_of_the_model_without_the_head(tmp_path: Path) -> None:
    run, log = make_run(tmp_path / "run", kind="transformer"), Log(quiet=True)
    subject = subject_with(run, "evaluation", tokenize="char", lowercase=True)
    rows = ablate_heads(subject, SRCS, REFS, tmp_path / "rows", log)
    assert len(rows) == 1 + 3 * 2 * 4 and len({row["loss"] for row in rows}) == len(rows)
    row = next(row for row in rows if row["name"] == "decoder.blocks.1.cross_attention.heads.2")

    model = copy.deepcopy(subject.model)
    attention = model.get_submodule("decoder.blocks.1.cross_attention")
    with torch.no_grad():
        attention.output.weight[:, 2 * attention.d_head : 3 * attention.d_head] = 0
        n, loss = 0, 0.0
        for src, ref in zip(SRCS, REFS, strict=True):
            batch = collate([Example(subject.tokenizers.src.encode(src), subject.tokenizers.tgt.encode(ref))])
            log_probs = model.logits(model(batch.src, batch.tgt_in))[0].double().log_softmax(-1)
            targets = batch.tgt_out[0]
            loss -= float(log_probs[torch.arange(len(targets)), targets].sum())
            n += len(targets)
    assert row["loss"] == pytest.approx(loss / n, rel=1e-5)
    translator = Translator(TorchEngine(model), subject.tokenizers, settings=subject.settings)
    outputs = [one.text for one in translator.translate(SRCS)]
    bleu = BLEU(tokenize="char", lowercase=True).corpus_score(outputs, [REFS]).score
    assert row["bleu"] == pytest.approx(bleu) and bleu != BLEU().corpus_score(outputs, [REFS]).score

    for section, values in (("decoding", {"beam": 2}), ("evaluation", {"tokenize": "intl"})):
        with pytest.raises(DataError, match="other settings"):
            ablate_heads(subject_with(run, section, **values), SRCS, REFS, tmp_path / "rows", log)
    with pytest.raises(DataError, match="name another file"):
        ablate_heads(subject, SRCS, REFS, run / "model.safetensors", log)

"""A language that an imported model lacks, added when fine-tuning."""

from pathlib import Path
from typing import Any

import pytest
import torch

import seq2seqs
from marians import LINES
from oracle import test_t5
from system.commands import assert_refused, sets, succeed, transduce
from transduce import Translator
from transduce.config.settings import Settings
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors
from transduce.tasks.finetune import extend_vocabulary, find_start, save_start_weights
from transduce.text.tokenizer import Tokenizers, load_tokenizers

pytestmark = pytest.mark.usefixtures("few_pieces")
KINDS = {"m2m": ("xx", "de"), "nllb": ("nds_Latn", "deu_Latn"), "madlad": ("nds", "de")}
QUIET = Log(quiet=True)


def start_of(path: Path, kind: str) -> Path:
    """An imported model with random weights."""
    write = test_t5.write_model if kind == "madlad" else seq2seqs.write_model
    write(path / "theirs", kind, 5)  # NLLB has two rows without a piece, as the published models
    assert list(import_run(path / "theirs", path / "start"))
    return path / "start"


@pytest.mark.parametrize("extend", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_token_starts_as_that_of_a_related_language(tmp_path: Path, kind: str, extend: int) -> None:
    path, (code, like) = start_of(tmp_path, kind), KINDS[kind]
    before = load_tokenizers(RunFolder.open(path)).unframed()
    values: dict[str, Any] = {
        "data": {"src_lang": "en", "tgt_lang": code},
        "training": {"start": str(path), "new_language": {"code": code, "like": like}},
        "tokenizer": {"extend": extend},
    }
    start = find_start(Settings.from_mapping(values))
    extended = extend_vocabulary(start, (["Ŧ"] * 9, ["Ŧ"] * 9), QUIET)
    (tmp_path / "saved").mkdir()
    extended.tokenizers.save(tmp_path / "saved")
    loaded = Tokenizers.load(tmp_path / "saved")
    assert loaded.unframed().src.encode_batch(LINES) == before.src.encode_batch(LINES)
    new = loaded.tgt.framing.languages[code]
    assert new == loaded.n_tgt - 1 and (loaded.n_tgt > before.n_tgt + 1) == bool(extend)
    assert {**loaded.tgt.framing.languages, code: 0} == {**before.tgt.framing.languages, code: 0}
    framed = loaded.between("en", code)
    (side,) = {side for side in (framed.src, framed.tgt) if new in side.encode("der Hund")}
    assert new not in loaded.between("en", like).src.encode("der Hund")
    assert side.decode(side.encode("der Hund")) == before.tgt.decode(before.tgt.encode("der Hund"))
    if extend:
        assert before.tgt.unknown("Ŧ") and not loaded.unframed().tgt.unknown("Ŧ")
    save_start_weights(start, extended, start.settings, tmp_path / "tokens")
    weights, old = load_tensors(tmp_path / "tokens" / "start.safetensors"), start.run.load_model()
    for name in ("src_embedding.table.weight", "tgt_embedding.table.weight", "output_embedding.weight"):
        assert torch.equal(weights[name][new], old[name][before.tgt.framing.languages[like]])
        assert torch.equal(weights[name][: before.n_tgt], old[name]) and len(weights[name]) == loaded.n_tgt


def test_the_new_language_is_trained_translated_and_exported(tmp_path: Path) -> None:
    """With adapters, only they and the new row change."""
    start = start_of(tmp_path, "nllb")
    for side in ("en", "nds"):
        (tmp_path / f"text.{side}").write_text("".join(f"{line}\n" for line in LINES))
    asked = [*("train", "--from", start, "--src", tmp_path / "text.en", "--tgt", tmp_path / "text.nds")]
    asked += ["--src-lang", "eng_Latn", "--run", tmp_path / "run"]
    common = sets("training.max_updates=4", "training.valid_updates=2", "training.lr=0.01", "training.average=last")
    common += sets("training.valid_bleu_sentences=0", "data.max_length=30", "decoding.max_length=10")
    language = sets("training.new_language={ code = 'nds_Latn', like = 'deu' }", "training.lora.rank=2")
    done = succeed(*asked, "--tgt-lang", "nds_Latn", *common, *language)
    assert "language nds_Latn: a new token, which starts as that of deu" in done.err
    old, new = (RunFolder.open(run).load_model()["tgt_embedding.table.weight"] for run in (start, tmp_path / "run"))
    like = load_tokenizers(RunFolder.open(start)).tgt.framing.languages["deu_Latn"]
    assert torch.equal(new[:-1], old) and not torch.equal(new[-1], old[like])
    succeed("translate", tmp_path / "run", "a dog", "--src-lang", "en", "--tgt-lang", "nds")
    assert len(Translator.load(tmp_path / "run").between("deu", "eng").translate(["der Hund"])) == 1
    assert any("transformers" in line for line in export_run(tmp_path / "run", "huggingface", tmp_path / "exported"))
    again = list(import_run(tmp_path / "exported", tmp_path / "again"))
    assert any("nds_Latn" in line for line in again)
    tokenizers, exported = (load_tokenizers(RunFolder.open(tmp_path / name)).src.framing for name in ("run", "again"))
    assert tokenizers.languages == exported.languages
    asked[-1] = tmp_path / "no"
    for values, part in (
        ({"code": "deu_Latn", "like": "deu"}, "already has"),
        ({"code": "nds_Latn", "like": "nld"}, "no such language"),
    ):
        given = ", ".join(f"{key} = '{value}'" for key, value in values.items())
        refused = transduce(*asked, "--tgt-lang", "deu", *common, *sets(f"training.new_language={{ {given} }}"))
        assert refused.code == 2 and part in refused.err.splitlines()[-1], refused.err
    assert_refused(transduce(*asked, *sets("training.new_language={ code = 'nds_Latn' }")), "give code", "like")


@pytest.mark.parametrize(
    ("kind", "extend", "refusal"),
    [("madlad", 0, None), ("madlad", 7, None), ("m2m", 0, "'__xx__'"), ("nllb", 7, "other pieces")],
)
def test_added_pieces_and_languages_are_exported_or_refused(
    tmp_path: Path, kind: str, extend: int, refusal: str | None
) -> None:
    start, (code, like) = start_of(tmp_path, kind), KINDS[kind]
    for side in ("src", "tgt"):
        (tmp_path / side).write_text("".join(f"{line} Ŧa ŦŦ\n" for line in LINES))
    values = {"max_updates": 2, "valid_updates": 2, "valid_bleu_sentences": 0, "lr": 0.01, "average": "'last'"}
    succeed(
        *("train", "--from", start, "--src", tmp_path / "src", "--tgt", tmp_path / "tgt", "--run", tmp_path / "run"),
        *("--src-lang", "en", "--tgt-lang", code, *sets(*(f"training.{key}={value}" for key, value in values.items()))),
        *sets(f"training.new_language={{ code = '{code}', like = '{like}' }}", f"tokenizer.extend={extend}"),
        *sets("data.max_length=60", "decoding.max_length=10"),
    )
    asked = ("export", tmp_path / "run", tmp_path / "out", "--to", "huggingface")
    if refusal:
        assert_refused(transduce(*asked), "has no ids for", refusal)
        return
    assert "checked: " in succeed(*asked).out
    assert list(import_run(tmp_path / "out", tmp_path / "again"))
    texts, (ours, again) = [*LINES[::9], "Ŧa ŦŦ"], (Translator.load(tmp_path / name) for name in ("run", "again"))
    assert ours.tokenizers.src.encode_batch(texts) == again.between("en", code).tokenizers.src.encode_batch(texts)
    found = (one.between("en", code).translate(texts, beam=1, max_length=9) for one in (ours, again))
    assert [one.ids for one in next(found)] == [one.ids for one in next(found)]

"""Import of BERT compared with transformers: numbers, gradients and pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from berts import WORDS, make_folder  # noqa: E402
from hard_strings import HARD  # noqa: E402
from transduce.convert.bert import import_bert  # noqa: E402
from transduce.convert.importing import find_importer  # noqa: E402
from transduce.errors import UserError  # noqa: E402
from transduce.models.registry import build_model  # noqa: E402
from transduce.text.special import BOS, EOS, MASK, PAD, UNK  # noqa: E402
from transduce.text.tokenizer import Tokenizers  # noqa: E402

BOUND = 2e-5


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForMaskedLM", "BertModel"])
def test_import_of_a_folder_with_its_vocabulary(tmp_path: Path, architecture: str, old: bool) -> None:
    folder = make_folder(tmp_path / "theirs", architecture, seed=3, hidden_act="gelu")
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if old:
        (folder / "tokenizer.json").unlink()
    found = import_bert(folder)
    ours = build_model(found.settings.model, n_src=len(WORDS), n_tgt=len(WORDS)).eval()
    ours.load_state_dict(found.tensors)
    found.tokenizers.save(tmp_path)
    tokenizer = Tokenizers.load(tmp_path).src
    assert tokenizer.pieces([PAD, UNK, BOS, EOS, MASK]) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    theirs = getattr(transformers, architecture).from_pretrained(folder).eval()
    for text in HARD:
        ids = tokenizer.encode(text)
        their_ids = their_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.pieces(ids) == their_tokenizer.convert_ids_to_tokens(their_ids), text
        if "[PAD]" in text:
            continue  # [PAD] in a text is padding here, and an ordinary token there
        framed = torch.tensor([[BOS, *ids[:18], EOS]])
        their_framed = torch.tensor([[5, *their_ids[:18], 6]])
        with torch.no_grad():
            expected = theirs(their_framed)[0]
            if architecture == "BertModel":
                assert difference(ours(framed)[0], expected) <= BOUND
                continue
            asked, _ = ours(framed, None, torch.arange(framed.numel()))
            order = torch.tensor([WORDS.index(piece) for piece in tokenizer.pieces(range(len(WORDS)))])
            assert difference(ours.logits(asked), expected[0][:, order]) <= BOUND


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "theirs", "BertForMaskedLM", num_hidden_layers=2)
    path = folder / "config.json"
    whole = json.loads(path.read_text())

    def refused(**values: Any) -> str:
        path.write_text(json.dumps({k: v for k, v in (whole | values).items() if v is not ...}))
        with pytest.raises(UserError) as caught:
            import_bert(folder)
        return str(caught.value)

    assert "16 missing: bert.encoder.layer.2.attention.self.query.weight" in refused(num_hidden_layers=3)
    assert "16 unexpected: bert.encoder.layer.1." in refused(num_hidden_layers=1)
    assert "misshapen: bert.encoder.layer.0.intermediate.dense.weight is" in refused(intermediate_size=7)
    message = refused(hidden_act="mish", position_embedding_type="relative_key", hidden_size=...)
    assert all(part in message for part in ("hidden_size is missing", "'mish'; supported", "'relative_key'; supported"))
    assert "word_embeddings.weight is [32, 16], should be [9, 16]" in refused(vocab_size=9)
    path.write_text(json.dumps(whole | {"architectures": ["BertForTokenClassification"]}))
    with pytest.raises(UserError, match=r"supported here: .*BertForMaskedLM"):
        find_importer(folder)
    path.write_text(json.dumps(whole))
    (folder / "tokenizer.json").write_text("{")
    assert "damaged" in _message(folder)
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    assert "has no vocabulary" in _message(folder)


def _message(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        import_bert(folder)
    return str(caught.value)

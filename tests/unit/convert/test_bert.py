"""Import of BERT compared with transformers: numbers, gradients and pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from berts import WORDS, config, make_folder, randomize  # noqa: E402
from hard_strings import HARD  # noqa: E402
from transduce.config.model import ModelSettings  # noqa: E402
from transduce.convert import bert  # noqa: E402
from transduce.convert.bert import import_bert  # noqa: E402
from transduce.convert.weight_map import Rows, read  # noqa: E402
from transduce.errors import UserError  # noqa: E402
from transduce.models.registry import build_model  # noqa: E402
from transduce.text.special import BOS, EOS, MASK, PAD, UNK  # noqa: E402
from transduce.text.tokenizer import Tokenizers  # noqa: E402

BOUND = 2e-5
SAME = Rows(torch.arange(len(WORDS)), len(WORDS))


def twins(architecture: str, seed: int, **options: Any) -> tuple[Any, torch.nn.Module, ModelSettings]:
    """Their model and ours with the same weights and the same ids."""
    theirs = randomize(getattr(transformers, architecture)(config(seed, **options)), seed)
    tensors = {name: tensor.detach() for name, tensor in theirs.state_dict().items() if not name.endswith(bert.BUFFERS)}
    s = bert.model_settings(theirs.config.to_dict() | {"id2label": _text_keys(theirs)}, names=tensors, origin=Path("x"))
    state = read(tensors, bert.entries(s, rows=SAME, names=tensors), origin="x")
    ours = build_model(s, n_src=len(WORDS), n_tgt=len(WORDS)).eval()
    ours.load_state_dict(state)
    return theirs, ours, s


def _text_keys(model: Any) -> dict[str, str]:
    return {str(i): name for i, name in model.config.id2label.items()}


def batch(seed: int, n_segments: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 17, *torch.randint(2, 17, (3,), generator=generator).tolist()]
    ids, segments = torch.zeros(len(lengths), 17, dtype=torch.long), torch.zeros(len(lengths), 17, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, len(WORDS), (length,), generator=generator)
        segments[row, :length] = torch.randint(0, n_segments, (length,), generator=generator)
    return ids, segments


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("seed", range(6))
def test_pretraining_has_the_same_logits_loss_and_gradients(seed: int) -> None:
    theirs, ours, s = twins("BertForPreTraining", seed)
    ids, segments = batch(seed, s.n_segments)
    places = ids.flatten().nonzero()[:, 0][::2]
    labels, follows = torch.full_like(ids, -100), torch.arange(len(ids)) % 2
    labels.view(-1)[places] = ids.view(-1)[places] % (len(WORDS) - 1) + 1
    out = theirs(
        ids, attention_mask=(ids != 0).long(), token_type_ids=segments, labels=labels, next_sentence_label=follows
    )
    asked, is_next = ours(ids, segments, places)
    assert difference(ours.logits(asked), out.prediction_logits.flatten(0, 1)[places]) <= BOUND
    assert difference(is_next, out.seq_relationship_logits) <= BOUND
    loss = F.cross_entropy(ours.logits(asked), labels.view(-1)[places]) + F.cross_entropy(is_next, follows)
    loss.backward()
    out.loss.backward()
    assert difference(loss, out.loss) <= BOUND
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    gradients["cls.predictions.decoder.bias"] = theirs.cls.predictions.bias.grad
    lines = [line for line in bert.entries(s, rows=SAME)]
    own = dict(ours.named_parameters())
    for line in lines:
        names = [n for n in line.theirs if n in gradients] or [n for n in line.also if n in gradients]
        expected = torch.cat([gradients[n] for n in names])
        got = own[line.ours].grad
        assert got is not None and difference(got, expected) <= BOUND, line.ours


@pytest.mark.parametrize("seed", range(4))
def test_masked_and_headless_models_have_the_same_outputs(seed: int) -> None:
    theirs, ours, s = twins("BertForMaskedLM", seed, tie_word_embeddings=seed % 2 == 0)
    ids, segments = batch(seed, s.n_segments)
    mask, places = (ids != 0).long(), ids.flatten().nonzero()[:, 0]
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, token_type_ids=segments).logits.flatten(0, 1)[places]
        asked, is_next = ours(ids, segments, places)
        assert is_next is None and difference(ours.logits(asked), expected) <= BOUND
        theirs, ours, s = twins("BertModel", seed)
        segments = segments % s.n_segments
        out = theirs(ids, attention_mask=mask, token_type_ids=segments)
        hidden, pooled = ours(ids, segments)
    assert difference(hidden[ids != 0], out.last_hidden_state[ids != 0]) <= BOUND
    assert difference(pooled, out.pooler_output) <= BOUND


@pytest.mark.parametrize("seed", range(4))
def test_classifier_has_the_same_logits(seed: int) -> None:
    theirs, ours, s = twins("BertForSequenceClassification", seed, num_labels=2 + seed)
    ids, segments = batch(seed, s.n_segments)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=(ids != 0).long(), token_type_ids=segments).logits
        assert expected.shape[1] == s.n_labels == 2 + seed
        assert difference(ours(ids, segments), expected) <= BOUND


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
    assert "model_type t5" in refused(model_type="t5")
    assert "supported here: model_type bert" in refused(architectures=["BertForTokenClassification"])
    assert "word_embeddings.weight is [32, 16], should be [9, 16]" in refused(vocab_size=9)
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

"""Import of GPT-2 compared with transformers: numbers, pieces and continuations."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from berts import randomize  # noqa: E402
from hard_strings import HARD  # noqa: E402
from transduce.config.decoding import DecodingOptions  # noqa: E402
from transduce.convert.gpt2 import import_gpt2  # noqa: E402
from transduce.convert.importing import import_run  # noqa: E402
from transduce.data.batch import causal  # noqa: E402
from transduce.data.encoding import encode_text  # noqa: E402
from transduce.data.reading import Piece  # noqa: E402
from transduce.decoding.generator import Generator, IncrementalDetokenizer  # noqa: E402
from transduce.errors import UserError  # noqa: E402
from transduce.text.special import EOS, PAD, UNK  # noqa: E402

BOUND = 2e-5
END = "<|endoftext|>"
LINES = [
    "The quick brown fox jumps over a dog.",
    "It isn't; we've  got\tmore\n\nlines, 123 of them.",
    "ünïcödé 猫",
] * 9


def make_folder(path: Path, seed: int = 0, **options: Any) -> Path:
    from tokenizers.implementations import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(LINES, vocab_size=320, special_tokens=[END], show_progress=False)
    path.mkdir(parents=True)
    tokenizer.save_model(str(path))
    draw = random.Random(seed)
    n_heads = draw.choice([1, 2, 4])
    config = transformers.GPT2Config(
        **{
            "vocab_size": tokenizer.get_vocab_size() + 8,
            "n_embd": n_heads * draw.choice([4, 8]),
            "n_layer": draw.choice([1, 2]),
            "n_head": n_heads,
            "n_inner": draw.choice([None, 12]),
            "n_positions": 200,
            "activation_function": draw.choice(["gelu_new", "relu", "gelu"]),
            "attn_implementation": "eager",
            "bos_token_id": 0,
            "eos_token_id": 0,
            **options,
        }
    )
    randomize(transformers.GPT2LMHeadModel(config), seed).save_pretrained(path)
    transformers.GPT2TokenizerFast(vocab=str(path / "vocab.json"), merges=str(path / "merges.txt")).save_pretrained(
        path
    )
    return path


@pytest.mark.parametrize("seed", range(4))
def test_the_same_pieces(tmp_path: Path, seed: int) -> None:
    folder = make_folder(tmp_path / "theirs", seed)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if seed % 2:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)
        if not (folder / "vocab.json").exists():
            their_tokenizer.backend_tokenizer.model.save(str(folder))
    found = import_gpt2(folder)
    tokenizer = found.tokenizers.tgt
    for text in HARD:
        ids, their_ids = tokenizer.encode(text), their_tokenizer(text)["input_ids"]
        assert tokenizer.pieces(ids) == their_tokenizer.convert_ids_to_tokens(their_ids), text
        assert UNK not in ids and PAD not in ids
        if END not in text:
            assert tokenizer.decode(ids) == text
            assert b"".join(tokenizer.bytes_of[i] for i in ids).decode() == text


def test_end_of_text_piece_in_a_text_is_the_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "theirs", 2)
    list(import_run(folder, tmp_path / "run"))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    generator = Generator.load(tmp_path / "run")
    text = f"The quick fox{END}jumps over{END}{END}a dog"
    their_ids = [0, *transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"], 0]
    with torch.no_grad():
        expected = theirs(torch.tensor([their_ids])).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(their_ids[1:])[:, None])[:, 0]
    (found,) = generator.score([text])
    assert torch.tensor(found.token_log_probs).sub(expected).abs().max() <= BOUND * float(expected.abs().max())
    store = encode_text(None, [Piece(text, ends=True)], generator.tokenizer)
    found = generator.evaluate(store)
    assert (found.n_tokens, found.n_bytes) == (len(their_ids) - 1, len(text)) == (store.n_tokens, len(text))
    assert found.nats == pytest.approx(-float(expected.sum()), rel=1e-4)
    targets = list(causal(np.asarray(store.ids)).targets)
    assert targets.count(EOS) == 4 and PAD not in targets
    (going,) = generator.generate([f"The quick{END}a"], DecodingOptions(max_length=8, sample=True, temperature=0))
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(f"The quick{END}a")["input_ids"]
    ids, n = torch.tensor([prompt]), len(prompt)
    for _ in going.ids:
        with torch.no_grad():
            ids = torch.cat([ids, theirs(ids).logits[:, -1:].argmax(-1)], 1)
    assert [generator.tokenizer.theirs[i] for i in going.ids] == ids[0, n:].tolist()


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "theirs", n_layer=1, n_inner=12)
    path = folder / "config.json"
    whole = json.loads(path.read_text())

    def refused(**values: Any) -> str:
        path.write_text(json.dumps(whole | values))
        with pytest.raises(UserError) as caught:
            import_gpt2(folder)
        return str(caught.value)

    assert "12 missing: transformer.h.1.attn.c_attn.weight" in refused(n_layer=2)
    assert "misshapen: transformer.h.0.mlp.c_fc.weight is" in refused(n_inner=13)
    message = refused(scale_attn_by_inverse_layer_idx=True, embd_pdrop=0.3, activation_function="mish")
    assert all(part in message for part in ("scale_attn_by_inverse_layer_idx", "embd_pdrop = 0.3", "'mish'; supported"))


def test_a_vocabulary_that_is_not_byte_level_cannot_be_streamed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = make_folder(tmp_path / "theirs", 2)
    words = {END: 0, "[UNK]": 1, "The": 2, "dog": 3} | {f"w{i}": i for i in range(4, 320)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    list(import_run(folder, tmp_path / "run"))
    generator = Generator.load(tmp_path / "run")
    assert generator.generate(["The dog"], DecodingOptions(max_length=3))[0].ids
    with pytest.raises(UserError, match=r"not byte-level"):
        IncrementalDetokenizer(generator.tokenizer)

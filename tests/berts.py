"""Folders of small random BERT and GPT-2 models, written by transformers."""

import random
from pathlib import Path
from typing import Any

import torch

TEXT = """the a cat dog sat on mat un ##able ##s ##ing run , . ! ? ' e 猫 im possible ##possible hello world""".split()  # noqa: SIM905
WORDS = ["[PAD]", *(f"[unused{i}]" for i in range(3)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TEXT]


def config(seed: int, **options: Any) -> Any:
    """A configuration with random sizes."""
    from transformers import BertConfig

    draw = random.Random(seed)
    n_heads = draw.choice([1, 2, 4])
    return BertConfig(
        **{
            "vocab_size": len(WORDS),
            "hidden_size": n_heads * draw.choice([4, 8]),
            "num_hidden_layers": draw.choice([1, 2, 3]),
            "num_attention_heads": n_heads,
            "intermediate_size": draw.choice([5, 32]),
            "hidden_act": draw.choice(["gelu", "gelu_new", "relu"]),
            "max_position_embeddings": 20,
            "type_vocab_size": draw.choice([1, 2, 3]),
            "layer_norm_eps": draw.choice([1e-12, 1e-5]),
            "attn_implementation": "eager",
            **options,
        }
    )


def randomize(model: Any, seed: int) -> Any:
    """Give every weight a random non-zero value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
            if "LayerNorm.weight" in name or (".ln_" in name and name.endswith("weight")):
                weight.add_(1)
    return model.eval()


def make_folder(path: Path, architecture: str, *, seed: int = 0, **options: Any) -> Path:
    """Write a folder as transformers does, with a WordPiece vocabulary."""
    import transformers

    model = randomize(getattr(transformers, architecture)(config(seed, **options)), seed)
    model.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    transformers.BertTokenizerFast(vocab=str(path / "vocab.txt")).save_pretrained(path)
    return path


def make_gpt2(path: Path, lines: list[str], *, seed: int = 0, **options: Any) -> Path:
    """Write a folder of GPT-2 as transformers does, with a byte-level vocabulary of these lines."""
    import transformers
    from tokenizers.implementations import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    path.mkdir(parents=True)
    files = tokenizer.save_model(str(path))
    n_rows = -(-tokenizer.get_vocab_size() // 8) * 8  # of a round number, as is usual
    sizes = {"vocab_size": n_rows, "n_embd": 16, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | options))
    randomize(model, seed).save_pretrained(path)
    transformers.GPT2TokenizerFast(**dict(zip(("vocab", "merges"), files, strict=True))).save_pretrained(path)
    return path

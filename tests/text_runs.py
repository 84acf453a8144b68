"""Small runs with random weights, for every task except translation."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from marians import LINES, write_run
from oracle.adapter import fitting
from transduce.config.settings import TokenizerSettings
from transduce.text.tokenizer import Tokenizer, Tokenizers
from transduce.text.training import train_tokenizer

SIZES: dict[str, Any] = {
    "d_model": 16, "d_ff": 24, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "max_positions": 48,
}  # fmt: skip
GPT: dict[str, Any] = {"kind": "gpt", "residual": "pre"}
BERT: dict[str, Any] = {
    "kind": "bert", "embedding_norm": True, "scale_embeddings": False, "positions": "learned", "n_segments": 2,
    "output_bias": True, "activation": "gelu",
}  # fmt: skip
TASKS = {
    "gpt": "causal", "transformer-xl": "causal", "bert": "masked", "bert-classifier": "classification",
    "bert-encoder": "encoding", "star-classifier": "classification",
}  # fmt: skip
LABELS = ["no", "yes", "perhaps"]


@cache
def vocabulary(kind: str = "unigram", size: int = 120, **options: Any) -> Tokenizer:
    return train_tokenizer(LINES, TokenizerSettings(kind=kind, **options), vocab_size=size)


def make_run(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    seed: int = 1,
    decoding: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Create a run folder whose weights are all random and non-zero; `options` are model settings, with the kind."""
    task = TASKS.get(options["kind"], "translation")
    exact = task == "causal"
    tokenizer = tokenizer or vocabulary(exact=exact, mask=not exact, size=400 if exact else 120)
    labels = {"labels": LABELS} if task == "classification" else {}
    if labels:
        options |= {"n_labels": len(LABELS)}
    values = {
        "name": "toy",
        "task": task,
        "data": {"context": 40, **labels},
        "model": fitting(**{**SIZES, **options}).model_dump(exclude_unset=True),
        "decoding": decoding or {},
    }
    return write_run(path, values, Tokenizers(tokenizer, tokenizer), seed=seed)

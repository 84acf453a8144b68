"""Folders of small random encoder-decoders with tokens for languages, written by transformers."""

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES

from marians import LINES

TOKENIZERS = {
    "m2m": "M2M100Tokenizer",
    "nllb": "NllbTokenizer",
    "nllb legacy": "NllbTokenizer",
    "mbart": "MBart50Tokenizer",
    "mbart25": "MBartTokenizer",
}
NLLB_CODES = ("ace_Arab", "eng_Latn", "deu_Latn", "zho_Hans", "zho_Hant")
MORE = ["猫 は 本 を 読む .", "Собака читает книгу .", "الكلب يقرأ .", "ο σκύλος διαβάζει", "कुत्ता पढ़ता है", "éàüß ¿qué?"]


@cache
def pieces(kind: str) -> bytes:
    """A SentencePiece model with fairseq's special ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, *MORE * 4]),
        model_writer=model,
        vocab_size=160,
        model_type=kind,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def write_tokenizer(path: Path, kind: str) -> Any:
    """Write the vocabulary of a kind as people find it on the Hub, and return transformers' tokenizer of it."""
    path.mkdir(parents=True)
    if kind == "bart":
        from tokenizers.implementations import ByteLevelBPETokenizer

        made = ByteLevelBPETokenizer()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        made.train_from_iterator([*LINES, *MORE], vocab_size=320, special_tokens=special, show_progress=False)
        made.save_model(str(path))
        config = {"tokenizer_class": "BartTokenizer"}
    else:
        model = pieces("unigram" if kind.startswith("mbart") else "bpe")
        (path / "sentencepiece.bpe.model").write_bytes(model)
        config = {"tokenizer_class": TOKENIZERS[kind]}
        if kind == "m2m":
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            names = [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]
            ids = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *names])}
            (path / "vocab.json").write_text(json.dumps(ids))
        if kind.startswith("nllb"):
            config["legacy_behaviour"] = kind == "nllb legacy"
            config["additional_special_tokens"] = NLLB_CODES
        if kind == "mbart":
            listed = {"additional_special_tokens": FAIRSEQ_LANGUAGE_CODES}
            (path / "special_tokens_map.json").write_text(json.dumps(listed))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if kind.startswith("nllb"):
        tokenizer.save_pretrained(path)  # the ids in its tokenizer.json
    return tokenizer


def write_model(path: Path, kind: str, seed: int, *, eos: float = 3.0, **options: Any) -> Any:
    """Write a random model and its vocabulary; return the model. A larger `eos` makes outputs shorter."""
    draw = random.Random(seed)
    tokenizer = write_tokenizer(path, kind)
    n_ids = {"m2m": len(tokenizer) + 100}.get(kind, len(tokenizer)) + draw.choice([0, 2])
    if kind.startswith("mbart"):
        n_ids = len(tokenizer)
    heads, width = draw.choice([1, 2, 4]), draw.choice([5, 16])
    sides = {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    sides |= {f"{side}_ffn_dim": width for side in ("encoder", "decoder")}
    config: dict[str, Any] = {
        "vocab_size": n_ids,
        "d_model": heads * draw.choice([4, 6, 10]),
        **sides,
        "encoder_layers": draw.randint(1, 3),
        "decoder_layers": draw.randint(1, 2),
        "max_position_embeddings": draw.choice([40, 64]),
        "activation_function": draw.choice(["relu", "gelu", "swish"]),
        "scale_embedding": draw.choice([True, False]),
        "tie_word_embeddings": draw.choice([True, True, False]),
        "decoder_start_token_id": tokenizer.convert_tokens_to_ids("de_DE") if kind == "mbart25" else 2,
        "init_std": 0.3,
        "dtype": "float32",
        **options,
    }
    family = {"m2m": "M2M100", "nllb": "M2M100", "mbart": "MBart", "mbart25": "MBart", "bart": "Bart"}[kind.split()[0]]
    transformers.set_seed(seed)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(
        getattr(transformers, f"{family}Config")(**config)
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)  # biases and norms too
        if family == "M2M100":  # make the end likely, so that searches end
            row = model.lm_head.weight[2]
            model.model.decoder.layer_norm.bias += eos * row / row.square().sum()
        else:
            model.final_logits_bias[0, 2] = eos
    model.save_pretrained(path)
    return model

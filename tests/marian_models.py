"""Small random models in Marian's own files, written without Marian, and their outputs in float64."""

import io
import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from marians import LINES

Weights = dict[str, np.ndarray]
D, FF, HEADS = 32, 64, 4  # multiples of the registers of AVX2
INT8, INT8_BROWSERMT, INT8_AVX2, FLOAT32, TEXT = 0x10001, 0x4101, 0x11001, 0x404, 0x101
"""Marian's types of tensors."""
_SIDES = (("encoder", 2), ("decoder", 1))


@cache
def pieces(n: int = 64) -> bytes:
    """A SentencePiece model with Marian's special ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=n, model_type="bpe", bos_id=-1, eos_id=0,
        unk_id=1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def config(**options: Any) -> dict[str, Any]:
    """The settings in a model. Names in `options` have _ for -."""
    return {
        "type": "transformer", "dim-emb": D, "dim-vocabs": [64, 64], "enc-depth": 2, "dec-depth": 1,
        "dec-cell": "ssru", "transformer-heads": HEADS, "transformer-dim-ffn": FF, "transformer-ffn-depth": 2,
        "transformer-ffn-activation": "swish", "transformer-preprocess": "", "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d", "transformer-postprocess-top": "", "tied-embeddings-all": False,
        "tied-embeddings-src": False, "tied-embeddings": False, "transformer-no-projection": False,
        "transformer-decoder-autoreg": "self-attention", "transformer-tied-layers": [], "version": "v1.12.42 b7be0e964",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }  # fmt: skip


def weights(c: Mapping[str, Any], seed: int = 1) -> Weights:
    """Random weights with the names and shapes of Marian's tensors."""
    draw, w = np.random.default_rng(seed), Weights()

    def add(name: str, *shape: int, scale: float = 0.3, mean: float = 0.0) -> None:
        w[name] = (mean + scale * draw.normal(size=shape)).astype(np.float32)

    def norm(name: str, suffix: str = "") -> None:
        add(f"{name}_ln_scale{suffix}", 1, D, scale=0.1, mean=1.0)
        add(f"{name}_ln_bias{suffix}", 1, D, scale=0.1)

    is_pre, (n_src, n_tgt) = c["transformer-preprocess"] == "n", c["dim-vocabs"]
    shares, ties = (
        c["tied-embeddings-src"] or c["tied-embeddings-all"],
        c["tied-embeddings"] or c["tied-embeddings-all"],
    )
    tables = {"Wemb": n_src} if shares else {"encoder_Wemb": n_src, "decoder_Wemb": n_tgt}
    for table, n in tables.items():
        add(table, n, D, scale=0.2)
    if not ties:
        add("decoder_ff_logit_out_Wt", n_tgt, D)
    if not c.get("output-omit-bias"):
        add("decoder_ff_logit_out_b", 1, n_tgt)
        w["decoder_ff_logit_out_b"][0, 0] = 2.0  # so that searches end
    for side, n_layers in _SIDES:
        if "n" in c["transformer-postprocess-emb"]:
            norm(f"{side}_emb", "_pre")
        if is_pre:
            norm(f"{side}_top")
        for layer in (f"{side}_l{i + 1}" for i in range(n_layers)):
            is_ssru = side == "decoder" and c["transformer-decoder-autoreg"] == "rnn"
            for part in (*(() if is_ssru else ("self",)), *(("context",) if side == "decoder" else ())):
                for matrix in "qkv" if c["transformer-no-projection"] else "qkvo":
                    add(f"{layer}_{part}_W{matrix}", D, D)
                    add(f"{layer}_{part}_b{matrix}", 1, D)
                norm(f"{layer}_{part}_Wo", "_pre" * is_pre)
            if is_ssru:
                add(f"{layer}_rnn_W", D, D)
                add(f"{layer}_rnn_Wf", D, D)
                add(f"{layer}_rnn_bf", 1, D)
                norm(f"{layer}_rnn" + "_ffn" * (not is_pre), "_pre" * is_pre)
            for matrix, inner, outer in (("1", D, FF), ("2", FF, D)):
                add(f"{layer}_ffn_W{matrix}", inner, outer)
                add(f"{layer}_ffn_b{matrix}", 1, outer)
            norm(f"{layer}_ffn_ffn", "_pre" * is_pre)
    return w


# -- files


def _yaml(c: Mapping[str, Any]) -> bytes:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in c.items()).encode() + b"\0"


def write_npz(path: Path, c: Mapping[str, Any], w: Weights) -> None:
    np.savez(path, **w, **{"special:model.yml": np.frombuffer(_yaml(c), np.int8)})


def quantize(w: Weights) -> dict[str, tuple[np.ndarray, np.float32]]:
    """The matrices in 8 bits, with their multipliers."""
    names = [name for name in w if name.endswith("Wemb") or "_W" in name[-3:]]
    multipliers = {name: np.float32(127 / np.abs(w[name]).max()) for name in names}
    return {name: (np.rint(w[name] * m).astype(np.int8), m) for name, m in multipliers.items()}


def write_bin(path: Path, c: Mapping[str, Any], w: Weights, *, kind: int = FLOAT32) -> None:
    """Write *.bin; matrices have the type `kind`, and an embedding has it in browsermt's files only."""
    quantized = {} if kind == FLOAT32 else quantize(w)
    items = []
    for name, value in w.items():
        if name not in quantized or ("Wemb" in name and kind != INT8_BROWSERMT):
            items.append((name, FLOAT32, value.shape, value.tobytes()))
            continue
        matrix, multiplier = quantized[name]
        if kind == INT8_AVX2:  # 8 columns at a time, in parts of 32 rows
            blocks = [
                matrix[i : i + 32, j + k]
                for j in range(0, matrix.shape[1], 8)
                for i in range(0, matrix.shape[0], 32)
                for k in range(8)
            ]
            data = b"".join(block.tobytes() for block in blocks)
        else:
            data = (matrix if "Wemb" in name else matrix.T).tobytes()
        data += struct.pack("<f", multiplier)
        items.append((name, kind, value.shape, data + bytes(-len(data) % 256)))
        if kind == INT8_BROWSERMT:
            items.append((f"{name}_QuantMultA", FLOAT32, (1,), struct.pack("<f", 7.5)))
    text = _yaml(c)
    items.append(("special:model.yml", TEXT, (len(text),), text))
    head = struct.pack("<2Q", 1, len(items))
    for name, number, shape, data in items:
        head += struct.pack("<4Q", len(name) + 1, number, len(shape), len(data))
    head += b"".join(name.encode() + b"\0" for name, *_ in items)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in items)
    padding = -(len(head) + 8) % 256
    path.write_bytes(head + struct.pack("<Q", padding) + bytes(padding) + b"".join(item[3] for item in items))


def make_folder(path: Path, *, kind: int = FLOAT32, seed: int = 1, **options: Any) -> Path:
    """Write a folder as Mozilla's: model, vocabulary, and a shortlist, which is not read."""
    path.mkdir(parents=True)
    c = config(**{"tied-embeddings-all": True, "transformer-decoder-autoreg": "rnn", **options})
    write_bin(path / "model.ende.intgemm.alphas.bin", c, weights(c, seed), kind=kind)
    (path / "vocab.ende.spm").write_bytes(pieces())
    (path / "lex.50.50.ende.s2t.bin").write_bytes(struct.pack("<Q", 0xF11A48D5013417F5) + bytes(40))
    return path


# -- outputs in float64, equation by equation


def log_probs(c: Mapping[str, Any], w: Weights, src: list[int], tgt: list[int]) -> np.ndarray:
    """Log-probabilities of each next token [len(tgt) + 1, V] for ids without their end, which is 0."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    is_pre = c["transformer-preprocess"] == "n"
    suffix = "_pre" if is_pre else ""

    def norm(x: np.ndarray, name: str, suffix: str = suffix) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * w[f"{name}_ln_scale{suffix}"] + w[f"{name}_ln_bias{suffix}"]

    def around(x: np.ndarray, name: str, sublayer: Any) -> np.ndarray:
        return x + sublayer(norm(x, name)) if is_pre else norm(x + sublayer(x), name)

    def embed(rows: np.ndarray, side: str) -> np.ndarray:
        angles = np.arange(len(rows))[:, None] * 10000.0 ** (-np.arange(D // 2) / (D / 2 - 1))
        x = rows * np.sqrt(D) + np.concatenate([np.sin(angles), np.cos(angles)], -1)
        return norm(x, f"{side}_emb", "_pre") if "n" in c["transformer-postprocess-emb"] else x

    def attention(x: np.ndarray, memory: np.ndarray, name: str, *, causal: bool) -> np.ndarray:
        q, k, v = (
            (source @ w[f"{name}_W{part}"] + w[f"{name}_b{part}"]).reshape(len(source), HEADS, -1).transpose(1, 0, 2)
            for part, source in (("q", x), ("k", memory), ("v", memory))
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(D // HEADS)
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1) if causal else 0
        exponents = np.exp(scores - scores.max(-1, keepdims=True))
        context = exponents / exponents.sum(-1, keepdims=True) @ v
        joined = context.transpose(1, 0, 2).reshape(len(x), D)
        return joined if c["transformer-no-projection"] else joined @ w[f"{name}_Wo"] + w[f"{name}_bo"]

    def ssru(x: np.ndarray, name: str) -> np.ndarray:
        state, outputs = np.zeros(D), []
        for now, gate in zip(x @ w[f"{name}_W"], x @ w[f"{name}_Wf"] + w[f"{name}_bf"], strict=True):
            forget = 1 / (1 + np.exp(-gate[0] if gate.ndim > 1 else -gate))
            state = forget * state + (1 - forget) * now
            outputs.append(np.maximum(state, 0))
        return np.array(outputs)

    def feed_forward(x: np.ndarray, name: str) -> np.ndarray:
        inner = x @ w[f"{name}_W1"] + w[f"{name}_b1"]
        is_swish = c["transformer-ffn-activation"] == "swish"
        inner = inner / (1 + np.exp(-inner)) if is_swish else np.maximum(inner, 0)
        return inner @ w[f"{name}_W2"] + w[f"{name}_b2"]

    src_table, tgt_table = (w.get("Wemb", w.get(f"{side}_Wemb")) for side in ("encoder", "decoder"))
    x = embed(src_table[[*src, 0]], "encoder")
    for name in ("encoder_l1", "encoder_l2"):
        x = around(x, f"{name}_self_Wo", lambda y, name=name: attention(y, y, f"{name}_self", causal=False))
        x = around(x, f"{name}_ffn_ffn", lambda y, name=name: feed_forward(y, f"{name}_ffn"))
    memory = norm(x, "encoder_top", "") if is_pre else x
    x, name = embed(np.concatenate([np.zeros((1, D)), tgt_table[tgt]]), "decoder"), "decoder_l1"
    if c["transformer-decoder-autoreg"] == "rnn":
        x = around(x, f"{name}_rnn" if is_pre else f"{name}_rnn_ffn", lambda y: ssru(y, f"{name}_rnn"))
    else:
        x = around(x, f"{name}_self_Wo", lambda y: attention(y, y, f"{name}_self", causal=True))
    x = around(x, f"{name}_context_Wo", lambda y: attention(y, memory, f"{name}_context", causal=False))
    x = around(x, f"{name}_ffn_ffn", lambda y: feed_forward(y, f"{name}_ffn"))
    x = norm(x, "decoder_top", "") if is_pre else x
    ties = c["tied-embeddings"] or c["tied-embeddings-all"]
    logits = x @ (tgt_table if ties else w["decoder_ff_logit_out_Wt"]).T + w.get("decoder_ff_logit_out_b", 0.0)
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)

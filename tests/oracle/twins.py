"""Random models of transformers' Marian, BERT and GPT-2, and ours with the same weights, imported from a folder.

Each function writes a folder with a random configuration, imports it as a user would, and gives both sides the same
batch. Everything that an import supports is drawn: activations, tied matrices or not, one vocabulary or two, padded to
a round number or not, several kinds of heads, odd sizes, one to six layers, rows of one token to the longest.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from marians import tokenizers
from transduce.convert import bert, gpt2, seq2seq, seq2seq_vocabulary
from transduce.convert.importing import IMPORTERS
from transduce.convert.weight_map import Entry, Rows, write
from transduce.models.registry import build_model
from transduce.text.special import BOS, EOS, PAD, UNK

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "swish", "silu")
TINY, LARGER = 2e-5, 1e-4
"""The largest accepted difference of a logit, by size."""


@dataclass
class Found:
    """Outputs of both models: pairs of logits, two losses, and gradients by name."""

    ours: list[Tensor]
    theirs: list[Tensor]
    loss: Tensor
    their_loss: Tensor
    names: dict[str, str] = field(default_factory=dict)  # their parameters whose gradient has another name
    silent: dict[str, int] = field(default_factory=dict)  # rows without a gradient there


@dataclass
class Twins:
    """A model of theirs, ours imported from its folder, and the weight map between them."""

    theirs: Any
    ours: Any
    lines: list[Entry]
    found: Found

    @property
    def kinked(self) -> bool:
        """Whether the activation has a kink, where rounding can change a gradient."""
        config = self.theirs.config
        named = (getattr(config, key, None) for key in ("activation_function", "hidden_act"))
        return "relu" in named

    def differences(self) -> tuple[float, float, float]:
        """Largest differences: of logits; of the loss, relative; of gradients, relative to their tensor's largest."""
        pairs = zip(self.found.ours, self.found.theirs, strict=True)
        logits = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
        self.found.loss.backward()
        self.found.their_loss.backward()
        loss, their_loss = self.found.loss.item(), self.found.their_loss.item()
        return logits, abs(loss - their_loss) / max(1.0, abs(their_loss)), self._gradients()

    def _gradients(self) -> float:
        known = {line.ours for line in self.lines}
        tied = {name: line.ours for line in self.lines for name in line.tied}
        named = ((tied.get(name, name), p.grad) for name, p in self.ours.named_parameters())
        grads = {name: grad for name, grad in named if grad is not None and name in known}
        mine = write(grads, [line for line in self.lines if line.ours in grads])
        expected = {name: p.grad for name, p in self.theirs.named_parameters() if p.grad is not None}
        largest = max(float(grad.abs().max()) for grad in expected.values())
        worst, n_seen = 0.0, 0
        for name, grad in expected.items():
            if not grad.abs().max():
                continue  # sinusoids, and weights that no logit depends on
            got = mine[self.found.names.get(name, name)].reshape(grad.shape)
            if name in self.found.silent:
                rows = torch.arange(len(grad)) != self.found.silent[name]
                got, grad = got[rows], grad[rows]
            # A key's bias has no effect: its gradient is rounding, so it is compared on the scale of the others.
            worst = max(worst, float((got - grad).abs().max()) / max(float(grad.abs().max()), 0.01 * largest))
            n_seen += 1
        assert n_seen >= 10, "gradients were compared"
        return worst


def sizes(draw: random.Random, larger: bool) -> dict[str, int]:
    """Widths, depth, heads, rows of a vocabulary and positions."""
    heads = draw.choice([2, 3, 6, 8] if larger else [1, 2, 3, 4])
    return {
        "heads": heads,
        # not 2: the gradient of a norm over two numbers is only rounding
        "width": heads * draw.choice([16, 24, 31] if larger else [3, 5, 8]),
        "inner": draw.choice([97, 256, 512] if larger else [1, 5, 16, 33]),
        "layers": draw.randint(2, 6) if larger else draw.randint(1, 3),
        "rows": draw.randint(100, 700) if larger else draw.randint(9, 40),
        "longest": draw.choice([48, 77, 128] if larger else [7, 20, 33]),
    }


def randomized(model: Any, seed: int) -> Any:
    """Set all weights to random values on the scale of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.2 if weight.dim() < 2 else min(0.2, 1.5 * weight.shape[-1] ** -0.5)
            fixed = name.endswith("embed_positions.weight")
            if not fixed:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            if weight.dim() == 1 and name.endswith("weight"):
                weight.add_(1)  # a norm
    return model.eval()


def batch(draw: random.Random, allowed: range, longest: int) -> Tensor:
    """Our ids [B, S], padded: a row of one token, the longest row, and rows in between."""
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(4))]
    draw.shuffle(lengths)
    rows = [[draw.choice(allowed) for _ in range(length)] + [PAD] * (longest - length) for length in lengths]
    return torch.tensor(rows)


def brought_in(kind: str, path: Path) -> tuple[Any, Any]:
    """Import a folder and load its model."""
    with mock.patch.object(seq2seq_vocabulary, "_MOST_MISSING", 1.0):  # toys have few pieces
        found = IMPORTERS[kind].importer(path)
    n = found.tokenizers
    ours = build_model(found.settings.model, n_src=n.n_src, n_tgt=n.n_tgt).eval()
    ours.load_state_dict(found.tensors)
    return found, ours


def marian_folder(path: Path, draw: random.Random, *, larger: bool = False, eos: float = 0.0, **options: Any) -> Any:
    """Write a folder of an encoder-decoder, and return its model. A larger `eos` makes outputs shorter."""
    import transformers

    s = sizes(draw, larger)
    share, tie = draw.choice([(True, True), (False, True), (False, False)])
    n_src, n_tgt = s["rows"], s["rows"] if share or draw.random() < 0.5 else draw.randint(8, 60)
    pad = draw.choice([min(n_src, n_tgt) - 1, 2])
    chosen = {
        "d_model": s["width"],
        "encoder_layers": s["layers"],
        "decoder_layers": draw.randint(1, 3),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), s["heads"]),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), s["inner"]),
        "activation_function": draw.choice(ACTIVATIONS),
        "scale_embedding": draw.random() < 0.5,
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        "vocab_size": n_src,
        "decoder_vocab_size": n_tgt,
        "max_position_embeddings": s["longest"],
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), pad),
        **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), 0),
        "attn_implementation": draw.choice(["eager", "sdpa"]),
    }
    seed = draw.randrange(1 << 30)
    theirs = randomized(transformers.MarianMTModel(transformers.MarianConfig(**chosen | options)), seed)
    bias = theirs.final_logits_bias
    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)))
    bias[0, 0] += eos
    theirs.save_pretrained(path)
    for name, n in (("vocab.json", n_src), ("target_vocab.json", n_tgt)):
        pieces = {("</s>", "<unk>")[i] if i < 2 else "<pad>" if i == pad else f"p{i}": i for i in range(n)}
        (path / name).write_text(json.dumps(pieces))
    (path / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": n_src != n_tgt}))
    for side in ("source", "target"):
        (path / f"{side}.spm").write_bytes(tokenizers().src.model)
    return theirs


def marian_rows(config: Any) -> tuple[Rows, Rows]:
    """Their row of each of our ids, of source and target, computed independently."""
    pad, sizes = config.pad_token_id, (config.vocab_size, config.decoder_vocab_size)
    src, tgt = (Rows(torch.tensor([-1, 1, pad, 0, *(i for i in range(2, n) if i != pad)]), n) for n in sizes)
    return src, tgt


def moved(ids: Tensor, rows: Rows, pad: int) -> Tensor:
    """Our ids as theirs."""
    return rows.index[ids].masked_fill(ids == PAD, pad)


def marian_twins(path: Path, seed: int, larger: bool) -> Twins:
    """An encoder-decoder."""
    draw = random.Random(seed)
    theirs = marian_folder(path, draw, larger=larger)
    config, (src, tgt), (found, ours) = theirs.config, marian_rows(theirs.config), brought_in("seq2seq", path)
    pad, longest = config.pad_token_id, config.max_position_embeddings
    ids = batch(draw, range(EOS, src.n_theirs + 1), longest)
    out = batch(draw, range(EOS, tgt.n_theirs + 1), longest)
    tgt_in = torch.cat([torch.full((len(out), 1), BOS), out[:, :-1]], 1)
    real = out != PAD
    given = {"input_ids": moved(ids, src, pad), "decoder_input_ids": moved(tgt_in, tgt, pad)}
    logits = theirs(**given, attention_mask=(ids != PAD).long()).logits[real]
    own = ours.logits(ours(ids, tgt_in))[real]
    here = range(1, tgt.n_theirs + 1)
    tables = ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    outputs = Found(
        [own[:, here]],
        [logits[:, tgt.index[here]]],
        F.cross_entropy(own, out[real]),
        F.cross_entropy(logits, tgt.index[out[real]]),
        silent=dict.fromkeys(tables, pad),
    )
    return Twins(theirs, ours, seq2seq.entries(found.settings.model, src=src, tgt=tgt), outputs)


def words(n: int) -> list[str]:
    """A WordPiece vocabulary; where n is a multiple of 8, shorter than n."""
    special = ["[PAD]", "w0", "[UNK]", "[CLS]", "[SEP]", "w1", "[MASK]"]
    return special + [f"x{i}" for i in range(n - len(special) - (1 if n % 8 == 0 else 0))]


BERTS = ("BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification")


def bert_twins(path: Path, seed: int, larger: bool) -> Twins:
    """An encoder with any head, without one, or without a pooler."""
    import transformers

    draw = random.Random(seed)
    s, architecture = sizes(draw, larger), draw.choice(BERTS)
    config = transformers.BertConfig(
        vocab_size=s["rows"],
        hidden_size=s["width"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        intermediate_size=s["inner"],
        hidden_act=draw.choice(ACTIVATIONS),
        max_position_embeddings=s["longest"],
        type_vocab_size=draw.choice([1, 2, 3]),
        layer_norm_eps=draw.choice([1e-12, 1e-5, 1e-3]),
        tie_word_embeddings=draw.random() < 0.7,
        num_labels=draw.randint(2, 6),
        attn_implementation=draw.choice(["eager", "sdpa"]),
    )
    more = {"add_pooling_layer": draw.random() < 0.6} if architecture == "BertModel" else {}
    theirs = randomized(getattr(transformers, architecture)(config, **more), seed)
    theirs.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(words(s["rows"])) + "\n")
    found, ours = brought_in("bert", path)
    rows = Rows(torch.tensor(found.tokenizers.src.theirs), s["rows"])
    assert [words(s["rows"])[i] for i in rows.index[:5]] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ids = batch(draw, range(UNK, s["rows"]), s["longest"])
    segments = torch.randint(0, config.type_vocab_size, ids.shape, generator=torch.Generator().manual_seed(seed))
    outputs = BERT_HEADS[found.settings.model.kind](theirs, ours, ids, segments, rows)
    names = set(theirs.state_dict())
    lines = bert.entries(found.settings.model, rows=rows, names=names)
    outputs.names = {"cls.predictions.decoder.bias": "cls.predictions.bias"} if config.tie_word_embeddings else {}
    return Twins(theirs, ours, lines, outputs)


def _asked(theirs: Any, ids: Tensor, segments: Tensor, rows: Rows) -> Any:
    return theirs(rows.index[ids], attention_mask=(ids != PAD).long(), token_type_ids=segments)


def _masked(theirs: Any, ours: Any, ids: Tensor, segments: Tensor, rows: Rows) -> Found:
    places = ids.flatten().nonzero()[:, 0]
    out, (asked, follows) = _asked(theirs, ids, segments, rows), ours(ids, segments, places)
    logits = out[0].flatten(0, 1)[places]
    gold, own = (places * 7) % len(rows.index), ours.logits(asked)
    outputs = Found(
        [own], [logits[:, rows.index]], F.cross_entropy(own, gold), F.cross_entropy(logits, rows.index[gold])
    )
    if follows is not None:
        answers = torch.arange(len(ids)) % 2
        outputs.ours.append(follows)
        outputs.theirs.append(out.seq_relationship_logits)
        outputs.loss = outputs.loss + F.cross_entropy(follows, answers)
        outputs.their_loss = outputs.their_loss + F.cross_entropy(out.seq_relationship_logits, answers)
    return outputs


def _labels(theirs: Any, ours: Any, ids: Tensor, segments: Tensor, rows: Rows) -> Found:
    logits, own = _asked(theirs, ids, segments, rows).logits, ours(ids, segments)
    gold = torch.arange(len(ids)) % logits.shape[1]
    return Found([own], [logits], F.cross_entropy(own, gold), F.cross_entropy(logits, gold))


def _bare(theirs: Any, ours: Any, ids: Tensor, segments: Tensor, rows: Rows) -> Found:
    out, (hidden, pooled) = _asked(theirs, ids, segments, rows), ours(ids, segments)
    real = ids != PAD
    outputs = Found([hidden[real]], [out.last_hidden_state[real]], *(x[real].sin().mean() for x in (hidden, out[0])))
    if out.pooler_output is not None:
        outputs.ours.append(pooled)
        outputs.theirs.append(out.pooler_output)
        outputs.loss, outputs.their_loss = (
            outputs.loss + pooled.sin().mean(),
            outputs.their_loss + out.pooler_output.sin().mean(),
        )
    return outputs


BERT_HEADS: dict[str, Callable[..., Found]] = {"bert": _masked, "bert-classifier": _labels, "bert-encoder": _bare}


def gpt2_twins(path: Path, seed: int, larger: bool) -> Twins:
    """A decoder without an encoder."""
    import transformers

    draw = random.Random(seed)
    s, tied, bare = sizes(draw, larger), draw.random() < 0.7, draw.random() < 0.2
    config = transformers.GPT2Config(
        vocab_size=s["rows"],
        n_embd=s["width"],
        n_layer=s["layers"],
        n_head=s["heads"],
        n_inner=draw.choice([None, s["inner"]]),
        n_positions=s["longest"],
        activation_function=draw.choice(ACTIVATIONS),
        layer_norm_epsilon=draw.choice([1e-5, 1e-12, 1e-3]),
        tie_word_embeddings=tied or bare,
        attn_implementation=draw.choice(["eager", "sdpa"]),
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = randomized(transformers.GPT2LMHeadModel(config), seed)
    (theirs.transformer if bare else theirs).save_pretrained(path)
    n = s["rows"] - (3 if s["rows"] % 8 == 0 else 0)
    end = draw.choice([0, n - 1])
    pieces = ["<|endoftext|>" if i == end else chr(0x100 + i) for i in range(n)]
    (path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    found, ours = brought_in("gpt2", path)
    rows = Rows(torch.tensor(found.tokenizers.tgt.theirs), s["rows"])
    assert rows.index[:4].tolist() == [-1, -1, end, end]
    ids = batch(draw, range(EOS, s["rows"] + 3), s["longest"])
    out = torch.cat([ids[:, 1:], torch.full((len(ids), 1), EOS)], 1)
    real = (ids != PAD) & (out != PAD)
    logits = theirs(rows.index[ids].clamp(min=0), attention_mask=(ids != PAD).long()).logits[real]
    own = ours.logits(ours(ids))[real]
    here = range(EOS, s["rows"] + 3)
    outputs = Found(
        [own[:, here]],
        [logits[:, rows.index[here]]],
        F.cross_entropy(own, out[real]),
        F.cross_entropy(logits, rows.index[out[real]]),
    )
    return Twins(theirs, ours, gpt2.entries(found.settings.model, rows=rows), outputs)


FAMILIES: dict[str, Callable[[Path, int, bool], Twins]] = {
    "marian": marian_twins,
    "bert": bert_twins,
    "gpt2": gpt2_twins,
}

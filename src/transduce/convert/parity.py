"""Comparison of another program's model with ours on the same random inputs, with padding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import EncoderSettings
from transduce.convert.weight_map import NEVER, Rows, fixed_bias
from transduce.data.batch import Batch, collate, pad_rows
from transduce.data.store import Example, pack
from transduce.errors import TransduceError, UserError, message_of
from transduce.models.masked_lm import MaskedLM, PooledEncoder, TextEncoder
from transduce.text.special import EOS, PAD, Vocabulary
from transduce.text.tokenizer import Tokenizers

MAX_TOKENS = 24
"""Length of the longest random example, in tokens."""

BOUND = 1e-4
"""Largest accepted difference of a float32 logit or log-probability."""

TEXTS = (
    "",
    "A dog runs.",
    " two  spaces ",
    "ﬁne “quotes” – ½ café",
    "漢字 😀 xyzzy",
    "a\tb",
    "1,000.50 €",
)
"""Strings on which tokenizers tend to differ."""

TIDY_TEXTS = tuple(" ".join(text.split()) for text in TEXTS)
"""Strings for tokenizers that keep the spaces around a text, which SentencePiece does not."""

Difference = tuple[float, float]
"""The largest difference, and the largest compared number."""


UNCHECKED = "not checked: transformers is not installed; pip install transformers, and try again"


def examples(n_src: int, n_tgt: int, *, longest: int = MAX_TOKENS, seed: int = 1) -> Batch:
    """Make random sentence pairs of ordinary ids; the shortest has one token, the longest `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (10,), generator=generator).tolist()]

    def ids(length: int, n_ids: int) -> list[int]:
        return torch.randint(EOS + 1, n_ids, (length,), generator=generator).tolist()

    return collate([Example(ids(k, n_src), ids(lengths[-i], n_tgt)) for i, k in enumerate(lengths, 1)])


def text_examples(s: EncoderSettings, n_ids: int) -> tuple[Tensor, Tensor]:
    """Make random texts and text pairs with their special tokens, padded: ids and segments [B, S]."""
    longest = min(MAX_TOKENS, s.max_positions) - 3  # a pair has three special tokens
    generator = torch.Generator().manual_seed(1)

    def ids(at_most: int) -> list[int]:
        length = int(torch.randint(1, max(at_most, 1) + 1, (), generator=generator))
        return torch.randint(EOS + 1, n_ids, (length,), generator=generator).tolist()

    rows = [pack([]), pack(ids(1) * max(longest, 1))]
    rows += [pack(ids(longest // 2), ids(longest // 2) if s.n_segments > 1 and i % 2 else None) for i in range(10)]
    return pad_rows([row.ids for row in rows]), pad_rows([row.segments for row in rows])


def logits_of(model: Any, *inputs: Tensor) -> Tensor:
    """Return our logits [B, T, V] for a translator's source and target ids, or for a language model's ids."""
    with torch.no_grad():
        return model.logits(model(*inputs)).float()


def head_outputs(model: TextEncoder, ids: Tensor, segments: Tensor | None) -> dict[str, Tensor]:
    """Return the outputs of an encoder's heads by name: for each token [B, S, ...], for the whole text [B, ...]."""
    if isinstance(model, MaskedLM):
        hidden, is_next = model(ids, segments, torch.arange(ids.shape[0] * ids.shape[1]))
        outputs = {"logits": model.logits(hidden).view(*ids.shape, -1)}
        return outputs if is_next is None else outputs | {"next_sentence": is_next}
    if isinstance(model, PooledEncoder):
        return dict(zip(("hidden", "pooled"), model(ids, segments), strict=True))
    return {"logits": model(ids, segments)}


def translator_outputs(
    ours: Any, tokenizers: Tokenizers, src: Rows, tgt: Rows, longest: int, theirs: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits (theirs, ours) of both translators for random pairs of up to `longest` tokens."""
    batch = examples(tokenizers.n_src, tokenizers.n_tgt, longest=min(MAX_TOKENS, longest))

    def their_ids(ids: Tensor, rows: Rows) -> Tensor:
        return rows.index[ids].masked_fill(ids == PAD, theirs.config.pad_token_id)

    read = batch.src
    if ours.language_last:  # transformers expects the first token (the language) last
        n = (read != PAD).sum(1, keepdim=True)
        places = torch.arange(1, read.shape[1] + 1).expand_as(read)
        read = read.gather(1, torch.where(places < n, places, (places - n) % read.shape[1]))
    logits = theirs(
        input_ids=their_ids(read, src),
        attention_mask=(batch.src != PAD).long(),
        decoder_input_ids=their_ids(batch.tgt_in, tgt),
    ).logits
    exists, real = fixed_bias(tgt) == 0, batch.tgt_out != PAD
    yield logits[real][:, tgt.index[exists]], logits_of(ours, batch.src, batch.tgt_in)[real][:, exists]


class NotLoaded(TransduceError):
    """Raised if transformers cannot load a folder."""


def _loaded(cls: Any, folder: Path, **options: Any) -> Any:
    try:
        return cls.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # of any type
        kind = type(error).__name__
        raise NotLoaded(f"transformers cannot load {folder} ({kind}: {message_of(error)[:200]})") from error


def compare_with_transformers(
    out: Path,
    architecture: str,
    vocabularies: Mapping[str, tuple[Vocabulary, Rows]],
    outputs: Callable[[Any], Iterable[tuple[Tensor, Tensor]]],
    *,
    texts: Iterable[str] = TEXTS,
) -> str:
    """Compare a folder, loaded by transformers, with our model; return a line that reports the result.

    `vocabularies`: our vocabulary and its rows for each argument of transformers' tokenizer ("text", "text_target"),
    which must split `texts` as ours does. `outputs`: maps transformers' model to pairs of outputs (its, ours). Raises
    `TransduceError` if token ids or outputs differ.
    """
    try:
        import transformers
    except ImportError:
        return UNCHECKED
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        # Marian's tokenizer imports sacremoses but does not use it
        warnings.filterwarnings("ignore", message=".*sacremoses")
        tokenizer = _loaded(transformers.AutoTokenizer, out)
    for argument, (vocabulary, rows) in vocabularies.items():
        for text in texts:
            their_ids = tokenizer(**{argument: text}, add_special_tokens=False)["input_ids"]
            if their_ids != rows.index[torch.tensor(vocabulary.encode(text), dtype=torch.long)].tolist():
                raise TransduceError(f"the tokenizer of transformers is not the same: it splits {text!r} differently")
    options = {"output_loading_info": True, "attn_implementation": "eager", "dtype": torch.float32}
    theirs, report = _loaded(getattr(transformers, architecture), out, **options)
    if wrong := {key: sorted(names) for key in ("missing_keys", "unexpected_keys") if (names := report.get(key))}:
        raise TransduceError(f"transformers does not find the weights that it needs: {wrong}")
    with torch.no_grad():
        difference = compare(outputs(theirs.eval()))
    return settle(f"outputs of transformers {transformers.__version__}", difference)


def compare(pairs: Iterable[tuple[Tensor, Tensor]]) -> Difference:
    """Compute the largest difference and the largest value over all pairs of tensors (theirs, ours).

    Logits that our model rules out only need to be ruled out in the other tensor. Raises `UserError` if neither tensor
    is finite.
    """
    difference, size, compared = 0.0, 0.0, False
    for theirs, ours in pairs:
        compared = True
        if not any(bool(outputs.isfinite().all()) for outputs in (theirs, ours)):
            raise UserError("the model's outputs are not finite numbers: its weights are damaged, or too large")
        real = ours > NEVER / 2
        if not bool((theirs[~real] <= NEVER / 2).all()):
            difference = math.inf
            continue
        apart = (theirs - ours)[real].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        difference, size = max(difference, float(apart.max())), max(size, float(ours[real].abs().max()))
    assert compared, "nothing was compared"
    return difference, size


def settle(what: str, largest: Difference) -> str:
    """Return a line that reports a comparison; `TransduceError` if the difference exceeds the bound.

    The bound applies to logits up to 32; for larger ones it grows with them, as the spacing of float32 does.
    """
    difference, size = largest
    bound = BOUND * max(1.0, size / 32)
    if not difference <= bound:
        raise TransduceError(f"the model is not the same: {what} differ by {difference:.2e}, more than {bound:.1g}")
    return f"checked: {what}: largest difference {difference:.1e} (bound {bound:.0e})"

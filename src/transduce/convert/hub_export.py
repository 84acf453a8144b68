"""Export of language models as transformers' GPT-2, and of encoders as its BERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import BertEncoderSettings, BertSettings, EncoderSettings, GPTSettings, ModelSettings
from transduce.convert import bert, gpt2
from transduce.convert.base import Outgoing
from transduce.convert.normalize import normalize, with_biases
from transduce.convert.parity import (
    MAX_TOKENS,
    UNCHECKED,
    Check,
    compare_all,
    compare_tokenizer,
    examples,
    head_outputs,
    logits_of,
    settle,
    text_examples,
)
from transduce.convert.requirements import Expressible, inexpressible
from transduce.convert.tokenizer_json import tokenizer_json
from transduce.convert.weight_map import Rows, write
from transduce.errors import TransduceError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, MASK, PAD, UNK, Vocabulary
from transduce.text.tokenizer import Tokenizer

_GPT2_SPECIAL = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
_BERT_SPECIAL = {"pad_token": PAD, "unk_token": UNK, "cls_token": BOS, "sep_token": EOS}


def export_gpt2(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for GPT2LMHeadModel, compare it if transformers is installed, and return lines on the result.

    Raises `UserError` where the architecture lacks one of the settings, `TransduceError` where the models differ.
    """
    s, tensors = run.settings.model, dict(run.tensors)
    assert isinstance(s, GPTSettings)
    _check_expressible(s, gpt2.EXPRESSIBLE, "GPT-2")
    rows = _rows(run.tokenizers.tgt)
    bias = tensors.pop("output_bias", None)  # GPT-2 has none: ours may only rule out ids that do not exist there
    if bias is not None and bool(bias.any()) and not torch.equal(bias, gpt2.fixed_bias(rows)):
        raise UserError("transformers' GPT-2 cannot express model.output_bias = true (its numbers are not zero here)")
    _merge_ends(tensors, rows, one_end=s.one_end)
    model, tensors = normalize(s, tensors)
    entries = gpt2.entries(model, rows=rows, prefix="transformer.")
    out.mkdir()
    begin, end = int(rows.index[BOS]), int(rows.index[EOS])
    write_json(out / "config.json", gpt2.config_of(model, n=rows.n_theirs, begin=begin, end=end))
    generation: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    if never := [i for i in (int(rows.index[PAD]), begin) if i >= 0 and i != end]:
        generation["suppress_tokens"] = never
    write_json(out / "generation_config.json", generation)
    write_tensors(out / "model.safetensors", write(with_biases(tensors, entries), entries))
    frame = {} if run.settings.data.documents == "file" else {"single": "<s> $A", "pair": "<s> $A $B:1"}
    _write_tokenizer(out, run.tokenizers.tgt, _GPT2_SPECIAL, frame=frame, longest=s.max_positions)
    _write_card(out, run, "GPT2LMHeadModel")
    return [_compare_gpt2(out, run, rows).line()]


def export_bert(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for transformers' BERT with the heads of the run; the rest is as in `export_gpt2`."""
    s = run.settings.model
    assert isinstance(s, EncoderSettings)
    _check_expressible(s, bert.EXPRESSIBLE, "BERT")
    rows = _rows(run.tokenizers.tgt)
    model, tensors = normalize(s, run.tensors)
    entries = bert.entries(model, rows=rows, prefix="" if isinstance(s, BertEncoderSettings) else "bert.")
    out.mkdir()
    labels, pad = run.settings.data.labels, int(rows.index[PAD])
    write_json(out / "config.json", bert.config_of(model, n=rows.n_theirs, pad=pad, labels=labels))
    theirs = write(with_biases(tensors, entries), entries)
    if isinstance(model, BertSettings) and model.tie == "none":  # there are two biases then, of which one is used
        theirs["cls.predictions.bias"] = theirs["cls.predictions.decoder.bias"].clone()
    write_tensors(out / "model.safetensors", theirs)
    special = _BERT_SPECIAL | ({"mask_token": MASK} if run.settings.task == "masked" else {})
    frame = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B:1 </s>:1"}
    longest = s.max_positions
    if run.settings.task == "classification":  # its texts are truncated as in training
        longest = min(run.settings.data.max_length, longest)
    _write_tokenizer(out, run.tokenizers.tgt, special, frame=frame, longest=longest)
    _write_card(out, run, bert.architecture_of(s))
    return [_compare_bert(out, run, rows).line()]


def _check_expressible(s: ModelSettings, expressible: Expressible, name: str) -> None:
    if lacking := inexpressible(s, expressible):
        raise UserError(f"transformers' {name} cannot express {', '.join(lacking)}; use --to onnx")


# -- ids and vocabularies


def _rows(vocabulary: Vocabulary) -> Rows:
    """Their id of each of ours: that of the imported tokenizer.json, or the same."""
    if isinstance(vocabulary, HubTokenizer):
        index = torch.tensor(vocabulary.theirs)
        return Rows(index, int(index.max()) + 1)
    return Rows(torch.arange(vocabulary.vocab_size), vocabulary.vocab_size)


def _merge_ends(tensors: dict[str, Tensor], rows: Rows, *, one_end: bool) -> None:
    """Make the vectors of beginning and end one where they are one piece there.

    With `one_end` the beginning is read as the end, so that its own vector is not used.
    """
    if int(rows.index[BOS]) != int(rows.index[EOS]):
        if one_end:
            raise UserError("transformers' GPT-2 cannot express model.one_end = true with two pieces; use --to onnx")
        return
    for name in ("embedding.table.weight", "output_embedding.weight"):
        if one_end:
            tensors[name] = tensors[name].clone()
            tensors[name][BOS] = tensors[name][EOS]
        elif not torch.equal(tensors[name][BOS], tensors[name][EOS]):
            raise UserError(
                "the vectors of the beginning and the end of a text differ, as after training, and the vocabulary has "
                "one piece for both: import the model and train again (it then has model.one_end = true), or --to onnx"
            )


def _write_tokenizer(
    out: Path, vocabulary: Vocabulary, special: Mapping[str, int], *, frame: dict[str, str], longest: int
) -> None:
    """Write tokenizer.json and tokenizer_config.json. `special`: our id for each of transformers' special tokens."""
    if isinstance(vocabulary, HubTokenizer):
        content, theirs = vocabulary.model, vocabulary.theirs
    else:
        assert isinstance(vocabulary, Tokenizer), "such a model has no other vocabulary"
        content, theirs = tokenizer_json(vocabulary, frame=frame), list(range(vocabulary.vocab_size))
    (out / "tokenizer.json").write_bytes(content)
    segments = ["token_type_ids"] if "cls_token" in special else []
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", *segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **{key: vocabulary.pieces([i])[0] for key, i in special.items() if theirs[i] >= 0},
    }
    write_json(out / "tokenizer_config.json", config)


def _write_card(out: Path, run: Outgoing, architecture: str) -> None:
    text = (
        f"# {run.settings.name or 'A model'}\n\nExported by transduce.\n\n```python\n"
        f"from transformers import AutoTokenizer, {architecture}\n\n"
        f'tokenizer, model = AutoTokenizer.from_pretrained("THIS"), {architecture}.from_pretrained("THIS")\n'
        'print(model(**tokenizer("...", return_tensors="pt")))\n```\n'
    )
    write_text(out / "README.md", text)


# -- comparison with the model


def _compare_gpt2(out: Path, run: Outgoing, rows: Rows) -> Check:
    """Compare token ids and logits with those of transformers."""
    if (theirs := _load(out, "GPT2LMHeadModel", run, rows)) is None:
        return UNCHECKED
    longest = min(MAX_TOKENS, run.settings.model.max_positions - 1)
    ids, known = examples(8, run.tokenizers.n_tgt, longest=longest).tgt_in, rows.index >= 0
    ids = ids.where(known[ids], EOS)  # an imported vocabulary may lack some
    mask = (ids != PAD) | ~known[PAD]
    with torch.no_grad():
        found = theirs(input_ids=rows.index[ids], attention_mask=mask.long()).logits
    compared = known & ~_is_duplicate(rows)
    ours = logits_of(run.model, ids)
    return _settled([(found[..., rows.index[compared]][mask], ours[..., compared][mask])])


def _compare_bert(out: Path, run: Outgoing, rows: Rows) -> Check:
    """Compare token ids and the outputs of the heads with those of transformers."""
    s = run.settings.model
    assert isinstance(s, EncoderSettings)
    if (theirs := _load(out, bert.architecture_of(s), run, rows)) is None:
        return UNCHECKED
    ids, segments = text_examples(s, run.tokenizers.n_tgt)
    mask = ids != PAD
    with torch.no_grad():
        found = theirs(input_ids=rows.index[ids], attention_mask=mask.long(), token_type_ids=segments)
        expected = head_outputs(run.model, ids, segments)
    logits = "prediction_logits" if isinstance(s, BertSettings) and s.next_sentence else "logits"
    their_names = {"next_sentence": "seq_relationship_logits", "hidden": "last_hidden_state", "pooled": "pooler_output"}
    compared = []
    for name, ours in expected.items():
        real = mask if ours.dim() == 3 else slice(None)
        other = found[their_names.get(name, logits)][real]
        per_piece = isinstance(s, BertSettings) and name == "logits"
        compared.append((other[..., rows.index] if per_piece else other, ours[real]))
    return _settled(compared)


def _settled(compared: Sequence[tuple[Tensor, Tensor]]) -> Check:
    import transformers

    return settle(f"outputs of transformers {transformers.__version__}", compare_all(compared))


def _load(out: Path, architecture: str, run: Outgoing, rows: Rows) -> Any:
    """The model as transformers loads it, after comparing its tokenizer; None if transformers is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()
    tokenizer, vocabulary = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True), run.tokenizers.tgt
    compare_tokenizer(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], vocabulary, rows)
    loaded, report = getattr(transformers, architecture).from_pretrained(
        out, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    wrong = {key: sorted(names) for key in ("missing_keys", "unexpected_keys") if (names := report.get(key))}
    if wrong:
        raise TransduceError(f"transformers does not find the weights that it needs: {wrong}")
    return loaded.eval()


def _is_duplicate(rows: Rows) -> Tensor:
    """Which of our ids share their id with a later one of ours, which is the one that is exported."""
    index = rows.index.tolist()
    last = {row: i for i, row in enumerate(index)}
    return torch.tensor([last[row] != i for i, row in enumerate(index)])

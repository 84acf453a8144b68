"""A language model as transformers' GPT-2, an encoder as its BERT: folders that load there without code of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import BertSettings, EncoderSettings, GPTSettings
from transduce.convert import bert, gpt2
from transduce.convert.check import LONGEST, TEXTS, Check, compare_all, examples, outputs_of, settle, text_examples
from transduce.convert.exporting import Outgoing
from transduce.convert.normalize import for_table, plain_form
from transduce.convert.requirements import inexpressible
from transduce.convert.tokenizer_json import tokenizer_json
from transduce.convert.vocabulary import Rows
from transduce.convert.weight_map import write
from transduce.errors import TransduceError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, MASK, PAD, UNK, Vocabulary
from transduce.text.tokenizer import Tokenizer

_NAMES = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
_BERT_NAMES = {"pad_token": PAD, "unk_token": UNK, "cls_token": BOS, "sep_token": EOS}


def export_gpt2(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for GPT2LMHeadModel, check it where transformers is there, and tell what was found.

    Raises `UserError` where the architecture lacks one of the settings, `TransduceError` where the check fails.
    """
    model, tensors = run.settings.model, dict(run.tensors)
    assert isinstance(model, GPTSettings)
    if lacking := inexpressible(model, gpt2.NEEDED):
        raise UserError(f"transformers' GPT-2 cannot express {', '.join(lacking)}; --to onnx takes it")
    rows, vocabulary = _rows(run.tokenizers.tgt), run.tokenizers.tgt
    _check_bias(tensors, rows)
    tensors.pop("output_bias", None)
    _join_twins(tensors, rows, one_end=model.one_end)
    s, tensors = plain_form(model, tensors)
    lines = gpt2.lines(s, rows=rows, prefix="transformer.")
    out.mkdir()
    begin, end = int(rows.index[BOS]), int(rows.index[EOS])
    write_json(out / "config.json", gpt2.config_of(s, n=rows.n_theirs, begin=begin, end=end))
    generation: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    unwritten = [i for i in (int(rows.index[PAD]), begin) if i >= 0 and i != end]
    write_json(out / "generation_config.json", generation | ({"suppress_tokens": unwritten} if unwritten else {}))
    write_tensors(out / "model.safetensors", write(for_table(tensors, lines), lines))
    frame = {} if run.settings.data.documents == "file" else {"single": "<s> $A", "pair": "<s> $A $B:1"}
    _write_tokenizer(out, vocabulary, _NAMES, frame=frame, longest=s.max_positions)
    _write_card(out, run, "GPT2LMHeadModel")
    return [_check_gpt2(out, run, rows).line()]


def export_bert(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for transformers' BERT with the heads that the run has, and check and tell in the same way."""
    model, tensors = run.settings.model, dict(run.tensors)
    assert isinstance(model, EncoderSettings)
    if lacking := inexpressible(model, bert.NEEDED):
        raise UserError(f"transformers' BERT cannot express {', '.join(lacking)}; --to onnx takes it")
    rows, vocabulary = _rows(run.tokenizers.tgt), run.tokenizers.tgt
    s, tensors = plain_form(model, tensors)
    lines = bert.lines(s, rows=rows, prefix="" if s.kind == "bert-encoder" else "bert.")
    out.mkdir()
    labels, pad = run.settings.data.labels, int(rows.index[PAD])
    write_json(out / "config.json", bert.config_of(s, n=rows.n_theirs, pad=pad, labels=labels))
    theirs = write(for_table(tensors, lines), lines)
    if isinstance(s, BertSettings) and s.tie == "none":  # of two biases that it keeps then only one counts
        theirs["cls.predictions.bias"] = theirs["cls.predictions.decoder.bias"].clone()
    write_tensors(out / "model.safetensors", theirs)
    names = _BERT_NAMES | ({"mask_token": MASK} if run.settings.task == "masked" else {})
    frame = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B:1 </s>:1"}
    labelled = run.settings.task == "classification"  # its texts are cut as here; others as far as positions go
    longest = min(run.settings.data.max_length, s.max_positions) if labelled else s.max_positions
    _write_tokenizer(out, vocabulary, names, frame=frame, longest=longest)
    _write_card(out, run, bert.architecture_of(s))
    return [_check_bert(out, run, rows).line()]


# -- ids and vocabularies


def _rows(vocabulary: Vocabulary) -> Rows:
    """Their id of each of ours: the library's, where the vocabulary is one of its own; else the same."""
    if isinstance(vocabulary, HubTokenizer):
        index = torch.tensor(vocabulary.theirs)
        return Rows(index, int(index.max()) + 1)
    return Rows(torch.arange(vocabulary.vocab_size), vocabulary.vocab_size)


def _check_bias(tensors: Mapping[str, Tensor], rows: Rows) -> None:
    """GPT-2 has no bias on its logits: ours must do nothing but rule out ids that are not there."""
    bias = tensors.get("output_bias")
    if bias is not None and not torch.equal(bias, torch.tensor(gpt2.never(rows))) and bool(bias.any()):
        raise UserError("transformers' GPT-2 cannot express model.output_bias = true (its numbers are not zero here)")


def _join_twins(tensors: dict[str, Tensor], rows: Rows, *, one_end: bool) -> None:
    """Where the beginning and the end of a text are one piece there, they must be one vector here, or be read as one:
    then that of the beginning does nothing.
    """
    if int(rows.index[BOS]) != int(rows.index[EOS]):
        if one_end:
            raise UserError("transformers' GPT-2 cannot express model.one_end = true with two pieces; --to onnx may")
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
    out: Path, vocabulary: Vocabulary, names: Mapping[str, int], *, frame: dict[str, str], longest: int
) -> None:
    """tokenizer.json and tokenizer_config.json. `names`: our id of each special piece that transformers asks for."""
    if isinstance(vocabulary, HubTokenizer):
        content, theirs = vocabulary.model, vocabulary.theirs
    else:
        assert isinstance(vocabulary, Tokenizer), "no such model has another"
        content, theirs = tokenizer_json(vocabulary, frame=frame), list(range(vocabulary.vocab_size))
    (out / "tokenizer.json").write_bytes(content)
    special = {key: vocabulary.pieces([i])[0] for key, i in names.items() if theirs[i] >= 0}
    segments = ["token_type_ids"] if "cls_token" in names else []
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", *segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **special,
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


# -- the check


def _check_gpt2(out: Path, run: Outgoing, rows: Rows) -> Check:
    """Logits and token ids of transformers beside ours."""
    if (theirs := _open(out, "GPT2LMHeadModel", run, rows)) is None:
        return _UNCHECKED
    longest = min(LONGEST, run.settings.model.max_positions - 1)
    ids = examples(8, run.tokenizers.n_tgt, longest=longest).tgt_in
    known = rows.index >= 0
    ids = ids.where(known[ids], EOS)  # of an imported vocabulary only what it has
    with torch.no_grad():
        ours = run.model.logits(run.model(ids)).float()
        mask = (ids != PAD) | ~known[PAD]
        found = theirs(input_ids=rows.index[ids], attention_mask=mask.long()).logits
    there = known & ~_twin(rows)
    return _settled([(found[..., rows.index[there]][mask], ours[..., there][mask])])


def _check_bert(out: Path, run: Outgoing, rows: Rows) -> Check:
    """What the heads give, and token ids, of transformers beside ours."""
    s = run.settings.model
    assert isinstance(s, EncoderSettings)
    if (theirs := _open(out, bert.architecture_of(s), run, rows)) is None:
        return _UNCHECKED
    ids, segments = text_examples(s, run.tokenizers.n_tgt)
    mask = ids != PAD
    with torch.no_grad():
        found = theirs(input_ids=rows.index[ids], attention_mask=mask.long(), token_type_ids=segments)
    names = {
        "bert": {
            "logits": "prediction_logits" if isinstance(s, BertSettings) and s.next_sentence else "logits",
            "next_sentence": "seq_relationship_logits",
        },
        "bert-encoder": {"hidden": "last_hidden_state", "pooled": "pooler_output"},
        "bert-classifier": {"logits": "logits"},
    }[s.kind]
    compared = []
    for name, ours in outputs_of(run.model, ids, segments).items():
        real = mask if ours.dim() == 3 else slice(None)
        other = found[names[name]][real]
        compared.append((other[..., rows.index] if s.kind == "bert" and name == "logits" else other, ours[real]))
    return _settled(compared)


_UNCHECKED = Check("transformers is not installed; pip install transformers, and export again")


def _settled(compared: Sequence[tuple[Tensor, Tensor]]) -> Check:
    import transformers

    return settle(f"outputs of transformers {transformers.__version__}", compare_all(compared))


def _open(out: Path, architecture: str, run: Outgoing, rows: Rows) -> Any:
    """The model as transformers loads it, its tokenizer compared; None where transformers is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()
    tokenizer, vocabulary = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True), run.tokenizers.tgt
    for text in TEXTS:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found != rows.index[torch.tensor(vocabulary.encode(text), dtype=torch.long)].tolist():
            raise TransduceError(f"the exported tokenizer is not the same: it cuts {text!r} otherwise")
    loaded, told = getattr(transformers, architecture).from_pretrained(
        out, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    wrong = {key: sorted(names) for key in ("missing_keys", "unexpected_keys") if (names := told.get(key))}
    if wrong:
        raise TransduceError(f"transformers does not find the weights that it looks for: {wrong}")
    return loaded.eval()


def _twin(rows: Rows) -> Tensor:
    """Our ids that share their id with a later one of ours, which is the one that is written."""
    index = rows.index.tolist()
    last = {row: i for i, row in enumerate(index)}
    return torch.tensor([last[row] != i for i, row in enumerate(index)])

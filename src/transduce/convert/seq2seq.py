"""Encoder-decoders that transformers builds like BART: Marian, M2M-100 and NLLB, mBART, BART.

They share one weight map. A family has the properties that its class in transformers fixes, whatever config.json
says. The decoder starts with pad in Marian, with the target's language in mBART-25, and with eos in the other families,
whose models read our BOS as EOS (`model.one_end`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.config.decoding import DecodingSettings
from transduce.config.model import NORM_EPSILONS
from transduce.config.settings import DataSettings, Settings, TokenizerSettings
from transduce.convert import format_limits, parity, weight_map
from transduce.convert.folder import Imported, Outgoing, languages_in, read_object, read_weights
from transduce.convert.format_limits import CTRANSLATE2_HINT, EXPRESSIBLE_IN_TRANSFORMERS, ConfigFormat, Expressible
from transduce.convert.seq2seq_vocabulary import (
    NULL,
    ExportedVocabulary,
    marian_vocabulary,
    multilingual_vocabulary,
    puts_language_last,
    read_marian,
    read_multilingual,
)
from transduce.convert.weight_map import NEVER, TIES, Entry, Rows, block_layers
from transduce.errors import UserError
from transduce.nn.positions import halves
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.special import BOS, EOS, PAD
from transduce.text.tokenizer import Tokenizers

BUFFERS = ("embed_positions.weights", "model.encoder.version", "model.decoder.version")
"""Ends of tensor names in older files that hold no weights."""

_POSITIONS, _SHARED, _BIAS = "embed_positions.weight", "model.shared.weight", "final_logits_bias"
_EMBEDDINGS = (_SHARED, "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


def _format(only: Mapping[str, tuple[Any, ...]], **defaults: Any) -> ConfigFormat:
    """Return the keys of a family's config.json. `only`: see `ConfigFormat`.

    `defaults`: defaults of the family's configuration class that differ from BART's.
    """
    return ConfigFormat(
        sizes={
            "d_model": "d_model",
            "encoder_layers": "n_encoder_layers",
            "decoder_layers": "n_decoder_layers",
            **{f"{side}_attention_heads": "n_heads" for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": "d_ff" for side in ("encoder", "decoder")},
            "vocab_size": None,
            "max_position_embeddings": "max_positions",
        },
        values={
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "activation_dropout": "activation_dropout",
            "scale_embedding": "scale_embeddings",
        },
        activation="activation_function",
        defaults={
            "activation_function": "gelu",
            "scale_embedding": False,
            "share_encoder_decoder_embeddings": True,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            **defaults,
        },
        only={"is_encoder_decoder": (True,), **only},
        equal=(("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads")),
    )


def _norms(*, pre: bool, embedding: bool) -> dict[str, tuple[bool, ...]]:
    """Return a family's keys for norms in config.json, as older versions of transformers write them."""
    return {"normalize_before": (pre,), "add_final_layer_norm": (pre,), "normalize_embedding": (embedding,)}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with one class in transformers.

    `settings`: values of our settings that have no key in config.json. `has_bias`: the logits have a bias.
    `has_languages`: texts begin with tokens for languages.
    """

    architecture: str
    format: ConfigFormat
    settings: Mapping[str, Any]
    has_bias: bool = True
    has_languages: bool = False

    @property
    def expressible(self) -> Expressible:
        """For settings of ours, the values that the family supports."""
        positions = self.settings["positions"]
        return {
            **EXPRESSIBLE_IN_TRANSFORMERS,
            "residual": (self.settings["residual"],),
            "norm_eps": (None, NORM_EPSILONS["layer"]),
            "embedding_norm": (self.settings["embedding_norm"],),
            "tie": ("three_way", "two_way", "none"),
            "positions": ("sinusoidal", positions) if positions == "sinusoidal_halves" else (positions,),
            "bias": (True,),
            "n_encoder_layers": range(1, format_limits.MAX_LAYERS + 1),
            "language_last": (False, True) if self.has_languages else (False,),
        }


FAMILIES = {
    "marian": Family(
        "MarianMTModel",
        _format({**_norms(pre=False, embedding=False), "static_position_embeddings": (True,)}),
        {"residual": "post", "positions": "sinusoidal_halves", "embedding_norm": False},
    ),
    "m2m_100": Family(
        "M2M100ForConditionalGeneration",
        _format({}, activation_function="relu", scale_embedding=True, attention_dropout=0.1, decoder_start_token_id=2),
        {"residual": "pre", "positions": "sinusoidal_fairseq", "embedding_norm": False},
        has_bias=False,
        has_languages=True,
    ),
    "mbart": Family(
        "MBartForConditionalGeneration",
        _format({**_norms(pre=True, embedding=True), "static_position_embeddings": (False,)}),
        {"residual": "pre", "positions": "learned", "embedding_norm": True},
        has_languages=True,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        _format(
            {**_norms(pre=False, embedding=True), "static_position_embeddings": (False,)}, decoder_start_token_id=2
        ),
        {"residual": "post", "positions": "learned", "embedding_norm": True},
    ),
}
"""Families by model_type."""
ARCHITECTURES = {model_type: (family.architecture,) for model_type, family in FAMILIES.items()}
_ENDS = {"pad_token_id": 1, "eos_token_id": 2}  # defaults of all families but Marian

ENCODER_BLOCK = block_layers(
    self_attention=("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.out_proj", "self_attn_layer_norm"),
    feed_forward=("fc1", "fc2", "final_layer_norm"),
)
_CROSS_ATTENTION = block_layers(
    cross_attention=(
        "encoder_attn.q_proj",
        "encoder_attn.k_proj encoder_attn.v_proj",
        "encoder_attn.out_proj",
        "encoder_attn_layer_norm",
    )
)
DECODER_BLOCK = (*ENCODER_BLOCK, *_CROSS_ATTENTION)


def model_settings(config: Mapping[str, Any], *, origin: Path) -> TransformerSettings:
    """Convert a complete config.json to our settings; `UserError` lists everything that is not supported."""
    family, problems = FAMILIES[config["model_type"]], list[str]()
    is_marian = config["model_type"] == "marian"
    share, tie = bool(config["share_encoder_decoder_embeddings"]), bool(config["tie_word_embeddings"])
    if is_marian and share and not tie:
        problems.append("share_encoder_decoder_embeddings = true with tie_word_embeddings = false is not supported")
    pad, start, eos = (config.get(f"{key}_token_id") for key in ("pad", "decoder_start", "eos"))
    allowed = (pad,) if is_marian else (pad, eos)
    is_free = config["model_type"] == "mbart"  # `read_multilingual` checks it
    if type(pad) is not int or not (is_free or (type(start) is int and start in allowed)):
        wanted = "pad" if is_marian else "pad or the end"
        problems.append(f"decoder_start_token_id = {start}, pad_token_id = {pad}: the decoder must start with {wanted}")
    family.format.check(config, origin=origin, optional_sizes=("decoder_vocab_size",), more=problems)
    own = {**family.settings, "tie": TIES[share and tie, tie], "output_bias": True, "one_end": start == eos != pad}
    return format_limits.model_from(TransformerSettings, family.format.read(config) | own, origin=origin)


def family_of(s: TransformerSettings) -> str:
    """Return the model_type of the family with these settings; Marian's if no family matches."""
    fitting = (kind for kind, f in FAMILIES.items() if all(getattr(s, key) == f.settings[key] for key in f.settings))
    return next(fitting, "marian")


def config_of(s: TransformerSettings, kind: str, vocabulary: ExportedVocabulary) -> dict[str, Any]:
    """Return a config.json for a model of ours, without the keys that all families have. `kind`: model_type."""
    family, own = FAMILIES[kind], dict[str, Any]()
    if kind == "marian":
        own = {"decoder_vocab_size": vocabulary.tgt.n_theirs, "share_encoder_decoder_embeddings": s.ties_inputs}
        own[_OWN] = {"positions": s.positions}
    return {
        **family.format.write(s),
        **own,
        "architectures": [family.architecture],
        "model_type": kind,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "tie_word_embeddings": s.ties_output,
        **{key: values[0] for key, values in family.format.only.items()},
        "bos_token_id": vocabulary.bos,
        "forced_eos_token_id": int(vocabulary.tgt.index[EOS]),
    }


def entries(s: TransformerSettings, *, src: Rows, tgt: Rows) -> list[Entry]:
    """Return the weight map for these settings. `src`, `tgt`: the file's embedding row for each of our ids."""
    layers = ENCODER_BLOCK, DECODER_BLOCK
    return [
        *weight_map.translator_embedding_entries(s, _EMBEDDINGS, src=src, tgt=tgt),
        Entry("output_bias", (_BIAS,), (tgt.n_theirs,), rows=tgt.index, filler=NEVER),
        # positions begin at 2, as in fairseq
        *weight_map.stack_entries(s, "model.{}.", "layers.{}.", layers, positions=_POSITIONS, n_skipped=2),
    ]


def column_order(s: TransformerSettings) -> Tensor | None:
    """Our column for each of transformers' columns if our sinusoids have another order, else None."""
    return halves(s.d_model) if s.positions == "sinusoidal" else None


_OWN = "transduce"
"""The key in an exported config.json for values that only this package reads: the kind of positions."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "do_sample": (None, False),
    "num_beam_groups": (None, 1),
    "suppress_tokens": (None, []),
}
"""Options of transformers' search that ours lacks, with the values that have no effect."""

# -- import


def import_seq2seq(folder: Path) -> Imported:
    """Read a folder with config.json, weights and a vocabulary.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    config = read_object(folder / "config.json")
    kind = config["model_type"]
    ends = {} if kind == "marian" else _ENDS
    config = {**FAMILIES[kind].format.defaults, **ends, **config}
    model = model_settings(config, origin=folder / "config.json")
    tokenizer_config = read_object(folder / "tokenizer_config.json", optional=True)
    sinusoids = () if model.positions == "learned" else (_POSITIONS,)
    tensors = read_weights(folder, without=(*BUFFERS, *sinusoids))
    notes = [f"found: {FAMILIES[kind].architecture}, {model.summary}", weight_map.type_note(tensors)]
    n_src, n_tgt = config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]
    _complete(tensors, kind, model, n_tgt)
    sizes = entries(model, src=Rows.of_size(n_src), tgt=Rows.of_size(n_tgt))
    weight_map.check(tensors, sizes, origin=folder)  # before tensors with the sizes of config.json are allocated
    if kind == "marian":
        src, tgt, tokenizers = read_marian(folder, config, tokenizer_config, tie=model.tie, notes=notes)
    else:
        src, tokenizers = read_multilingual(folder, config, tokenizer_config, notes=notes)
        tgt, last = src, puts_language_last(config, tokenizer_config)
        model = model.model_copy(update={"language_last": last})
    match config.get(_OWN):
        case {"positions": "sinusoidal"}:
            model = model.model_copy(update={"positions": "sinusoidal"})
    order = column_order(model)
    state = weight_map.read(tensors, entries(model, src=src, tgt=tgt), origin=folder, order=order)
    output_bias = weight_map.complete_output_bias(state, tgt)
    if kind == "marian" and output_bias:  # its bias is trained, even if all numbers are zero
        output_bias = True
    model = model.model_copy(update={"output_bias": output_bias})
    framing = tokenizers.src.framing
    languages = _languages_of(tokenizer_config, None if kind == "marian" else framing.languages)
    if framing.directions:
        languages["tgt_lang"] = framing.directions[0][1]  # mBART-25, with one target
    settings = translator_settings(model, tokenizers, config, tgt, folder=folder, languages=languages, notes=notes)
    compare = partial(compared, folder, FAMILIES[kind].architecture, tokenizers, src, tgt, model.max_positions - 1)
    return Imported(settings, tokenizers, state, tuple(notes), compare)


def translator_settings(
    model: TransformerSettings,
    tokenizers: Tokenizers,
    config: Mapping[str, Any],
    tgt: Rows,
    *,
    folder: Path,
    languages: Mapping[str, str],
    notes: list[str],
) -> Settings:
    """Return the settings of an imported translator. Options of transformers' search that ours lacks become a note."""
    generation = read_object(folder / "generation_config.json", optional=True)
    never_generated = {config["pad_token_id"], int(tgt.index[PAD])}
    framing = tokenizers.tgt.framing
    rules = _ignored_rules({**config, **generation}, never_generated, tgt, framing.ids if framing.tgt else ())
    if rules:
        notes.append(f"not taken over, as the search here has no such rule: {', '.join(rules)}")
    kept: Any = tokenizers.src.kind
    return Settings(
        data=DataSettings(**languages, max_length=model.max_positions),
        tokenizer=TokenizerSettings(kind=kept, vocab_size=max(tokenizers.n_src, 8), joint=model.ties_inputs),
        model=model,
        decoding=_decoding_of(config, generation, model.max_positions),
    )


def compared(
    folder: Path, architecture: str, tokenizers: Tokenizers, src: Rows, tgt: Rows, longest: int, model: Any
) -> str:
    """Compare our model with a folder that transformers loads; return a line that reports the result."""
    vocabularies = {"text": (tokenizers.src.with_frame(()), src)}
    if architecture == FAMILIES["marian"].architecture:
        vocabularies["text_target"] = tokenizers.tgt.with_frame(()), tgt
    keep_spaces = (FAMILIES[kind].architecture for kind in ("marian", "bart"))
    texts = parity.TEXTS if architecture in keep_spaces else parity.TIDY_TEXTS
    if tokenizers.tgt.framing.directions:  # transformers 5 omits the normalization of mBART-25's SentencePiece
        texts = tuple(unicodedata.normalize("NFKC", text) for text in texts)
    outputs = partial(parity.translator_outputs, model, tokenizers, src, tgt, longest)
    return parity.compare_with_transformers(folder, architecture, vocabularies, outputs, texts=texts)


def _complete(tensors: dict[str, Tensor], kind: str, model: TransformerSettings, n_tgt: int) -> None:
    """Add tensors that a file may leave out; remove a shared embedding that the model does not use."""
    tensors[_BIAS] = tensors.get(_BIAS, torch.zeros(n_tgt)).squeeze(0)  # transformers writes [1, V]
    if kind != "marian" and model.tie == "none" and (shared := tensors.pop(_SHARED, None)) is not None:
        for side in ("encoder", "decoder"):
            tensors.setdefault(f"model.{side}.embed_tokens.weight", shared)


def _languages_of(tokenizer_config: Mapping[str, Any], known: Collection[str] | None) -> dict[str, str]:
    """Return src_lang and tgt_lang as named by a tokenizer's configuration.

    `known`: languages of a multilingual model; None for Marian.
    """
    if known is None:
        return languages_in(tokenizer_config, {"src_lang": "source_lang", "tgt_lang": "target_lang"})
    named = languages_in(tokenizer_config, {"src_lang": "src_lang", "tgt_lang": "tgt_lang"})
    return {ours: code for ours, code in named.items() if code in known}


def _ignored_rules(
    asked: Mapping[str, Any], never_generated: set[int], tgt: Rows, framing_ids: Collection[int]
) -> list[str]:
    """List the options of transformers' search that our search does not follow.

    `never_generated`: ids that our search does not generate either. `framing_ids`: our ids that may begin a
    translation.
    """
    neutral = _NEUTRAL | {
        "forced_eos_token_id": (None, int(tgt.index[EOS])),
        "forced_bos_token_id": (None, *(int(tgt.index[i]) for i in framing_ids)),
    }
    rules = [f"{key} = {repr(asked[key])[:40]}" for key, values in neutral.items() if asked.get(key) not in values]
    words = asked.get("bad_words_ids") or []
    if not isinstance(words, list) or any(word not in [[i] for i in never_generated] for word in words):
        rules.append(f"bad_words_ids = {repr(words)[:40]}")
    return rules


def _decoding_of(config: Mapping[str, Any], generation: Mapping[str, Any], longest: int) -> DecodingSettings:
    """Convert transformers' search settings to decoding settings; missing values get our defaults.

    Transformers' max_length counts the decoder's start token.
    """
    keys = {
        "num_beams": "beam",
        "length_penalty": "length_penalty",
        "max_length": "max_length",
        "no_repeat_ngram_size": "no_repeat_ngram",
    }
    values = {}
    for key, ours in keys.items():
        if (value := generation.get(key, config.get(key))) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"generation_config.json or config.json: {key} = {repr(value)[:40]} is not a number")
        if key in ("num_beams", "max_length") and not value >= 1:
            raise UserError(f"generation_config.json or config.json: {key} = {value}; at least 1 is needed")
        values[ours] = value
    values["max_length"] = max(1, min(values.get("max_length", DecodingSettings().max_length + 1), longest) - 1)
    return Settings.from_mapping({"decoding": values}, origin="generation_config.json").decoding


# -- export


def export_seq2seq(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, compare it with the model if transformers is installed, and return lines on the result.

    Raises `UserError` if the family does not support a setting, `TransduceError` if the outputs differ.
    """
    s = run.settings.model
    assert isinstance(s, TransformerSettings)
    if run.tokenizers.src.framing.directions and not s.language_last:
        raise UserError(
            f"transformers has no tokenizer that writes language tokens as this run does; {CTRANSLATE2_HINT}"
        )
    kind = family_of(s) if run.tokenizers.src.framing.ids else "marian"
    family, name = FAMILIES[kind], f"transformers' {FAMILIES[kind].architecture}"
    format_limits.check_expressible(s, family.expressible, name)
    if kind == "marian":
        vocabulary = marian_vocabulary(run, s, keep_null=not _pad_is_unused(run.tensors))
    else:
        vocabulary = multilingual_vocabulary(run, s, kind)
    src, tgt = vocabulary.src, vocabulary.tgt
    config = config_of(s, kind, vocabulary)
    tensors = run.tensors if family.has_bias else weight_map.without_bias(run.tensors, tgt, name)
    tensors = weight_map.with_one_end(tensors) if s.one_end else tensors
    theirs = weight_map.write(tensors, entries(s, src=src, tgt=tgt), order=column_order(s))
    bias = theirs.pop(_BIAS)[None]
    theirs |= {_BIAS: bias} if family.has_bias else {}
    if kind != "marian" and s.tie == "none":
        theirs[_SHARED] = theirs["model.encoder.embed_tokens.weight"].clone()
    return write_translator(out, run, config, theirs, vocabulary)


def write_translator(
    out: Path, run: Outgoing, config: Mapping[str, Any], tensors: Mapping[str, Tensor], vocabulary: ExportedVocabulary
) -> list[str]:
    """Write a translator's folder, and compare it with the model if transformers is installed.

    `config`: the config.json without the keys that all families have.
    """
    s, src, tgt, decoding = run.settings.model, vocabulary.src, vocabulary.tgt, run.settings.decoding
    assert isinstance(s, TransformerSettings)
    start, end, null = (int(tgt.index[i]) for i in (BOS, EOS, PAD))
    ids = {"pad_token_id": vocabulary.pad, "decoder_start_token_id": start, "eos_token_id": end}
    generation_config = {
        **ids,
        "forced_eos_token_id": end,
        "bad_words_ids": [[i] for i in dict.fromkeys([vocabulary.pad, null]) if i >= 0],
        "num_beams": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        # transformers' max_length counts the decoder's start token
        "max_length": min(decoding.max_length + 1, s.max_positions),
    }
    write_json(out / "config.json", {**config, **ids, "vocab_size": src.n_theirs, "dtype": "float32"})
    write_json(out / "generation_config.json", generation_config)
    vocabulary.write(out)
    (architecture,) = config["architectures"]
    write_tensors(out / "model.safetensors", tensors)
    write_text(out / "README.md", _card(run.settings, vocabulary.tokenizer_class, architecture))
    return [compared(out, architecture, run.tokenizers, src, tgt, s.max_positions - 1, run.model)]


def _pad_is_unused(tensors: Mapping[str, Tensor]) -> bool:
    """Whether our PAD has zero vectors and is never generated, so that its row can be left out."""
    bias = tensors.get("output_bias")
    tables = (tensors[f"{name}.weight"] for name in ("src_embedding.table", "tgt_embedding.table", "output_embedding"))
    return bias is not None and float(bias[PAD]) == NEVER and not any(bool(table[PAD].any()) for table in tables)


def _card(settings: Settings, tokenizer: str, model: str) -> str:
    src, tgt = settings.data.src_lang, settings.data.tgt_lang
    return (
        f"# {settings.name or 'A translator'}\n\nFrom `{src}` to `{tgt}`, exported by transduce.\n\n```python\n"
        f"from transformers import {model}, {tokenizer}\n\n"
        f'tokenizer, model = {tokenizer}.from_pretrained("THIS"), {model}.from_pretrained("THIS")\n'
        'outputs = model.generate(**tokenizer(["..."], return_tensors="pt", padding=True))\n'
        "print(tokenizer.batch_decode(outputs, skip_special_tokens=True))\n```\n"
        + (_MARIAN_NOTES if model == "MarianMTModel" else "")
    )


_MARIAN_NOTES = f"""
The decoder starts from the vector of `<pad>`, which need not be zero. CTranslate2's converter for Marian models assumes
that it is: export the run as a CTranslate2 model instead.
`{NULL}` in the vocabulary is a row that is never generated.
"""

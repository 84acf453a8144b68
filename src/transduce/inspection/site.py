"""The inspection page that computes in the reader's browser, with the model in 8 bits and its vocabularies.

The record of one sentence, without its numbers, supplies all texts; the page computes the numbers for any sentence.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transduce.config.architectures import GPTSettings, TransformerSettings
from transduce.errors import SettingsError
from transduce.inspection.inspected_models import Subject
from transduce.inspection.inspection import Inspection, inspect_sentence
from transduce.inspection.page import page_of_model
from transduce.inspection.recorded_modules import RecordedModule
from transduce.runs.folder import RunFolder
from transduce.text.special import EOS, Vocabulary
from transduce.text.tokenizer import Tokenizer, parse_model

MOST_BYTES = 6_000_000
"""Maximum size of a page that contains a model."""
_COMPUTED: dict[str, tuple[object, ...]] = {
    "positions": (
        "sinusoidal",
        "sinusoidal_halves",
        "sinusoidal_fairseq",
        "sinusoidal_marian",
        "learned",
        "rotary",
        "none",
    ),
    "feed_forward": ("plain", "gated"),
    "projection": ("full",),
    "encoder_pattern": ("full",),
    "decoder_pattern": ("full",),
    "decoder_self": ("attention",),
    "source": ("tokens",),
    "source_end": (True,),
    "language_last": (False,),
}
"""Values of settings for which the page has code. Settings that are not listed may have any value."""


def site_page(subject: Subject, examples: Sequence[str] = ()) -> str:
    """Return one HTML file that contains a model, inspects any sentence and needs no network.

    The weights of the model are rounded to 8 bits, in place: the page shows the rounded model.

    `examples`: sentences that the page offers as a start.

    Raises:
        SettingsError: The page cannot compute this model, or would be too large.
    """
    _check(subject)
    weights = quantize(subject.model)
    src, tgt = (_sample_of(one) for one in (subject.tokenizers.src, subject.tokenizers.tgt))
    inspection = inspect_sentence(subject, src, tgt if subject.reads_pairs else None)
    template = _without_numbers(inspection, subject.model)
    model = template["model"]
    model["settings"]["weights"] = "8 bits"
    entry = {"name": model["name"], "kind": model["kind"], "task": model["task"], "together": False}
    options = ("beam", "length_penalty", "max_length", "no_repeat_ngram")
    without = inspection.slow["without"]()
    page = page_of_model(
        {
            "models": [{**entry, "examples": list(examples)}],
            "template": template,
            "model": _model_data(subject, weights),
            "tokenizers": [vocabulary_data(one) for one in _vocabularies(subject)],
            "decoding": {name: getattr(subject.settings, name) for name in options},
            "longest": subject.longest,
            "groups": [{name: group[name] for name in ("group", "title", "off")} for group in without],
            "saliency": [{**view, "values": None} for view in inspection.slow["saliency"]()],
        }
    )
    if len(page) > MOST_BYTES:
        raise SettingsError(
            f"{subject.name}: its page would have {len(page) / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:.0f} MB are "
            "allowed; export a smaller model, such as one with model.preset = 'tiny'"
        )
    return page


def sample_texts(folder: RunFolder) -> list[str]:
    """Return up to five texts from the samples of a run's report, from short to long."""
    sets = folder.read_record("samples.json").get("sets", [])
    samples = [sample for examples in sets for sample in examples["samples"]]
    texts = sorted(dict.fromkeys(sample.get("src", sample.get("prompt", "")) for sample in samples), key=len)
    return texts[:: len(texts) // 5 + 1]


def _settings(subject: Subject) -> TransformerSettings | GPTSettings:
    assert subject.folder is not None
    settings = subject.folder.settings.model
    if not isinstance(settings, (TransformerSettings, GPTSettings)):
        raise SettingsError(f"model.kind = '{settings.kind}': this page computes transformer and gpt only")
    return settings


def _check(subject: Subject) -> None:
    """Raise `SettingsError` unless the page's code supports this model and can tokenize its text."""
    settings = _settings(subject)
    for name, values in _COMPUTED.items():
        if (value := getattr(settings, name, values[0])) not in values:
            allowed = ", ".join(map(str, values))
            raise SettingsError(f"model.{name} = {value!r}: the page cannot compute this; it can compute {allowed}")
    for vocabulary in _vocabularies(subject):
        kind = vocabulary.algorithm if isinstance(vocabulary, Tokenizer) else vocabulary.kind
        if kind not in _ALGORITHMS:
            raise SettingsError(
                f"tokenizer.kind = '{kind}': the page cannot read its text; {', '.join(_ALGORITHMS)} can"
            )
        if vocabulary.framing.ids:
            raise SettingsError("data.languages: the page cannot choose languages; export a model of one direction")


def _vocabularies(subject: Subject) -> list[Vocabulary]:
    """Return the vocabularies of the source and of the target, or a single one if they are equal."""
    src, tgt = subject.tokenizers.src, subject.tokenizers.tgt
    return [src] if src is tgt else [src, tgt]


# --- weights ----------------------------------------------------------------------------------------------------------


def quantize(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Round the matrices of a model to 8 bits with a scale per row, in place; return all weights as plain data."""
    weights = dict[str, dict[str, Any]]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weights[name] = _float_data(weight)
                continue
            scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
            levels = (weight / scales).round()
            weight.copy_(levels * scales)
            data = {"data": _encoded(levels.to(torch.int8)), "scales": _encoded(scales.float())}
            weights[name] = {"shape": list(weight.shape), **data}
    return weights


def _float_data(values: Tensor) -> dict[str, Any]:
    return {"shape": list(values.shape), "data": _encoded(values.detach().float())}


def _encoded(values: Tensor | np.ndarray) -> str:
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _model_data(subject: Subject, weights: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the weights, the position vectors, and the settings that the page's code needs."""
    settings, model = _settings(subject), subject.model
    names = {id(weight): name for name, weight in model.named_parameters()}
    uses = dict(model.named_parameters(remove_duplicate=False))
    uses |= {"output.weight": model.output_weight, "output.bias": model.output_bias}
    is_translator = isinstance(settings, TransformerSettings)
    embeddings = {"encoder": "src_embedding", "decoder": "tgt_embedding"} if is_translator else {"decoder": "embedding"}
    for name in embeddings.values():
        if (vectors := model.get_submodule(f"{name}.positions").vectors(subject.longest + 1)) is not None:
            weights[f"{name}.positions"] = _float_data(vectors)
    return {
        **settings.model_dump(),
        "weights": weights,
        "aliases": {name: names[id(weight)] for name, weight in uses.items() if id(weight) in names},
        "embeddings": embeddings,
        "n_layers": dict(zip(embeddings, settings.depth[-len(embeddings) :], strict=True)),
        "epsilon": settings.epsilon,
        "scale": model.get_submodule(embeddings["decoder"]).scale,
        "n_kv_heads": settings.n_kv_heads or settings.n_heads,
        "d_key": settings.key_width,
        "d_value": settings.value_width,
    }


# --- vocabularies -----------------------------------------------------------------------------------------------------

_ALGORITHMS = ("unigram", "bpe", "char")


def vocabulary_data(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the pieces with scores and types, the normalization rules, and the data for decoding tokens to text."""
    assert isinstance(vocabulary, Tokenizer)
    proto = parse_model(vocabulary.model)
    spec = proto.normalizer_spec
    return {
        "pieces": [piece.piece for piece in proto.pieces],
        "types": "".join(str(piece.type) for piece in proto.pieces),
        "scores": _encoded(np.array([piece.score for piece in proto.pieces], dtype=np.float32)),
        "rules": base64.b64encode(spec.precompiled_charsmap).decode("ascii"),
        "dummy_prefix": spec.add_dummy_prefix,
        "collapses": spec.remove_extra_whitespaces,
        "algorithm": vocabulary.algorithm,
        "exact": vocabulary.exact,
        "keeps_spaces": vocabulary.keeps_spaces,
        "has_placeholders": vocabulary.has_placeholders,
        "unknown": proto.trainer_spec.unk_surface,
    }


# --- the record without numbers ---------------------------------------------------------------------------------------


def _sample_of(vocabulary: Vocabulary) -> str:
    """Return a text of at least three pieces that the vocabulary can read."""
    words = [vocabulary.decode([i]) for i in range(EOS + 1, vocabulary.vocab_size)]
    return " ".join([word for word in words if word.isalnum()][:3])


def _without_numbers(inspection: Inspection, model: nn.Module) -> dict[str, Any]:
    """Return the record without arrays; products have a formula in place of operands."""
    record = inspection.to_json(views=[*inspection.recorded, "parts"])
    for mask in record["masks"]:
        del mask["mask"]
    for view, names in {"attention": ("weights", "labels"), "positions": ("table", "dots")}.items():
        record[view] = [{key: value for key, value in one.items() if key not in names} for one in record[view]]
    record["lens"]["layers"] = [{"title": layer["title"]} for layer in record["lens"]["layers"]]
    record["lens"]["changes"] = [{"title": change["title"]} for change in record["lens"]["changes"]]
    for part, data in zip(inspection.parts, record["parts"], strict=True):
        data["values"] = list(_formulas(part, data["values"], model))
    return record


def _formulas(part: RecordedModule, values: Sequence[dict[str, Any]], model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the values of a part with the formulas of their products."""
    names = {weight.untyped_storage().data_ptr(): name for name, weight in model.named_parameters()}
    for value in values:
        kept = {key: value[key] for key in ("name", "title", "axes", "rows", "columns", "softmax", "text", "line")}
        how, kept["how"] = part.point(value["name"]).product, None
        if how is not None:
            right = None if how.weight else f"{part.name}.{how.right}"
            kept["how"] = {"left": f"{part.name}.{how.left}", "right": right, "weight": None}
            kept["how"] |= {"scaled": how.scaled, "transposed": how.transposed}
        if how is not None and how.weight is not None and (rows := how.weight(part.module)) is not None:
            weight = rows[0]
            name = names.get(weight.untyped_storage().data_ptr(), "output.weight")  # the logits use selected rows
            first = weight.storage_offset() // weight.shape[1]
            kept["how"]["weight"] = {"name": name, "first": first, "count": len(weight)}
        yield kept

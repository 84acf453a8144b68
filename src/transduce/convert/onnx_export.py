"""A run as ONNX graphs for onnxruntime, its vocabularies beside them, and a JSON file that tells how to use both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import EncoderSettings, ModelSettings, Settings
from transduce.convert.check import (
    LONGEST,
    Difference,
    compare_all,
    examples,
    logits_of,
    outputs_of,
    settle,
    text_examples,
)
from transduce.convert.exporting import Outgoing
from transduce.convert.requirements import inexpressible
from transduce.data.batch import Batch
from transduce.errors import UserError
from transduce.models.registry import ARCHITECTURES
from transduce.runs.atomic import write_json
from transduce.text.hub import HubTokenizer
from transduce.text.pieces import PieceTokenizer
from transduce.text.special import BOS, EOS, MASK, PAD, UNK, Vocabulary

HOW = "transduce.json"
"""The file that tells how the graphs are used."""


def export_onnx(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, check it against the model, and tell what was found. onnx and onnxruntime are needed.

    What is quantized is checked before that, in float32; how far quantization moves it is told, too.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'transduce[interchange]'") from None
    from transduce.convert.onnx_layers import NEEDED

    s = run.settings.model
    if lacking := inexpressible(s, NEEDED):
        raise UserError(f"the ONNX export cannot express {', '.join(lacking)}")
    out.mkdir()
    how = _describe(run.settings) | _write_graphs(out, s, run) | _write_vocabularies(out, run)
    write_json(out / HOW, how)
    what = f"outputs of onnxruntime {onnxruntime.__version__}"
    told = [settle(f"{what}, float32", CHECKS[ARCHITECTURES[s.kind].shape](out, how, run)).line()]
    if run.quantization is not None:
        for graph in _graphs(how):
            _quantize(out / graph["file"])
        moved, _ = CHECKS[ARCHITECTURES[s.kind].shape](out, how, run)
        told.append(f"{run.quantization} moves outputs by {moved:.2f} at most")
    return told


def _graphs(how: dict[str, Any]) -> list[dict[str, Any]]:
    return [how[name] for name in ("encoder", "decoder") if name in how]


def _write_graphs(out: Path, s: ModelSettings, run: Outgoing) -> dict[str, Any]:
    """Write the graphs of the model; of each its file, inputs, outputs, and what it carries from step to step."""
    from transduce.convert import onnx_models

    told: dict[str, dict[str, Any]] = {}
    for name, make in onnx_models.GRAPHS[ARCHITECTURES[s.kind].shape].items():
        drawn = make(s, run.tensors)
        inputs, outputs = drawn.graph.save(out / f"{name}.onnx")
        told[name] = {"file": f"{name}.onnx", "inputs": inputs, "outputs": outputs}
        if drawn.state:
            told[name]["state"] = drawn.state
    return told


def _write_vocabularies(out: Path, run: Outgoing) -> dict[str, Any]:
    both = run.tokenizers
    if run.settings.task == "translation":
        sides = {"source": both.src, "target": both.tgt}
        return {name: _write_vocabulary(out, name, vocabulary) for name, vocabulary in sides.items()}
    return {"tokenizer": _write_vocabulary(out, "tokenizer", both.tgt)}


def _write_vocabulary(out: Path, name: str, vocabulary: Vocabulary) -> dict[str, str]:
    """Write a vocabulary's files and tell them: what cuts the text, and a list that makes ids of what comes of it."""
    if isinstance(vocabulary, HubTokenizer):
        (out / f"{name}.json").write_bytes(vocabulary.model)
        write_json(out / f"{name}.ids.json", vocabulary.theirs)
        return {"library": "tokenizers", "file": f"{name}.json", "ids": f"{name}.ids.json"}
    (out / f"{name}.spm").write_bytes(vocabulary.model)
    told = {"library": "sentencepiece", "file": f"{name}.spm"}
    if isinstance(vocabulary, PieceTokenizer):
        write_json(out / f"{name}.pieces.json", vocabulary.pieces(range(vocabulary.vocab_size)))
        told["pieces"] = f"{name}.pieces.json"
    return told


def _describe(settings: Settings) -> dict[str, Any]:
    """What a program must know besides the graphs' inputs and outputs."""
    from transduce.convert.onnx_graph import OPSET

    s = settings.model
    told: dict[str, Any] = {
        "task": settings.task,
        "opset": OPSET,
        "special": {"pad": PAD, "unknown": UNK, "begin": BOS, "end": EOS},
        "longest": s.max_positions if s.positions == "learned" else None,
    }
    own = DESCRIPTIONS[settings.task](settings)
    return told | own | {"special": told["special"] | own.get("special", {})}


def _describe_translator(settings: Settings) -> dict[str, Any]:
    decoding = settings.decoding
    return {
        "append_to_source": [EOS],
        "begin_target": [BOS],
        "never_written": [PAD, BOS],
        "beam": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "max_length": decoding.max_length,
    }


def _describe_language_model(settings: Settings) -> dict[str, Any]:
    begins = settings.data.documents != "file"
    return {"begin": [BOS] if begins else [], "never_written": [PAD, BOS], "context": settings.data.context}


def _describe_encoder(settings: Settings) -> dict[str, Any]:
    return {"before_text": [BOS], "behind_text": [EOS]}


def _describe_masked(settings: Settings) -> dict[str, Any]:
    return {"special": {"mask": MASK}} | _describe_encoder(settings)


def _describe_classifier(settings: Settings) -> dict[str, Any]:
    return {"labels": list(settings.data.labels or ())} | _describe_encoder(settings)


DESCRIPTIONS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "translation": _describe_translator,
    "causal": _describe_language_model,
    "masked": _describe_masked,
    "classification": _describe_classifier,
    "encoding": _describe_encoder,
}


# -- the check


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _translator_difference(out: Path, how: dict[str, Any], run: Outgoing) -> Difference:
    """Sources of many lengths with their padding, and each of some alone without: encoder, then cached steps."""
    encoder, decoder = (_session(out / graph["file"]) for graph in _graphs(how))
    n_src, n_tgt = run.tokenizers.n_src, run.tokenizers.n_tgt
    batch = examples(n_src, n_tgt, longest=_longest(run.settings.model))

    def given(src: Tensor) -> dict[str, Any]:
        source = {"ids": src.numpy(), "mask": (src != PAD).numpy()}
        return {"mask": source["mask"]} | dict(zip(how["encoder"]["outputs"], encoder.run(None, source), strict=True))

    return _steps_difference(decoder, how, batch, logits_of(run.model, batch), given)


def _language_model_difference(out: Path, how: dict[str, Any], run: Outgoing) -> Difference:
    batch = examples(8, run.tokenizers.n_tgt, longest=_longest(run.settings.model))
    with torch.no_grad():
        expected = run.model.logits(run.model(batch.tgt_in)).float()
    return _steps_difference(_session(out / how["decoder"]["file"]), how, batch, expected, lambda src: {})


def _longest(s: ModelSettings) -> int:
    return min(LONGEST, s.max_positions - 1) if s.positions == "learned" else LONGEST


def _steps_difference(
    decoder: Any, how: dict[str, Any], batch: Batch, expected: Tensor, given: Callable[[Tensor], dict[str, Any]]
) -> Difference:
    """Cached steps beside one forward of ours: the whole batch, and its first two sentences, each alone."""
    compared = [(batch.src, batch.tgt_in, expected)]
    for row in (0, 1):
        src, ids = (side[row : row + 1, : int((side[row] != PAD).sum())] for side in (batch.src, batch.tgt_in))
        compared.append((src, ids, expected[row : row + 1, : ids.shape[1]]))
    return compare_all(
        (found, reference[:, begin:end])
        for src, ids, reference in compared
        for begin, end, found in _stepped(decoder, how["decoder"]["state"], ids, given(src))
    )


def _stepped(
    decoder: Any, first: dict[str, Any], ids: Tensor, fixed: dict[str, Any]
) -> Iterator[tuple[int, int, Tensor]]:
    """Logits of ids [B, T]: of three at once, as of a prompt, then one by one; and from where to where they are."""
    shapes = {name: [len(ids) if n == "batch" else int(n) for n in axes] for name, axes in first.items()}
    state = {name: torch.zeros(shape).numpy() for name, shape in shapes.items()}
    at = 0
    while at < ids.shape[1]:
        end = at + 3 if not at else at + 1
        logits, *new = decoder.run(None, {"ids": ids[:, at:end].numpy(), **fixed, **state})
        state, begin, at = dict(zip(state, new, strict=True)), at, min(end, ids.shape[1])
        yield begin, at, torch.from_numpy(logits)


def _encoder_difference(out: Path, how: dict[str, Any], run: Outgoing) -> Difference:
    """Texts of many lengths with their padding."""
    session, s = _session(out / how["encoder"]["file"]), run.settings.model
    assert isinstance(s, EncoderSettings)
    ids, segments = text_examples(s, run.tokenizers.n_tgt)
    inputs = {"ids": ids.numpy(), "mask": (ids != PAD).numpy(), "segments": segments.numpy()}
    names = how["encoder"]["outputs"]
    found = session.run(None, {name: inputs[name] for name in how["encoder"]["inputs"]})
    expected = outputs_of(run.model, ids, segments)
    pairs = [(torch.from_numpy(value), expected[name]) for name, value in zip(names, found, strict=True)]
    real = ids != PAD
    return compare_all((value[real], ours[real]) if ours.dim() == 3 else (value, ours) for value, ours in pairs)


CHECKS: dict[str, Callable[[Path, dict[str, Any], Outgoing], Difference]] = {
    "encoder-decoder": _translator_difference,
    "decoder": _language_model_difference,
    "encoder": _encoder_difference,
}


def _quantize(path: Path) -> None:
    """Matrices in int8, activations as they come (onnxruntime's dynamic quantization)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logger, level = logging.getLogger(), logging.getLogger().level
    logger.setLevel(logging.ERROR)  # it advises a pass that these graphs do not need
    whole = path.with_suffix(".float32")
    try:
        path.rename(whole)
        beside = (path.parent / f"{path.stem}.weights").exists()
        quantize_dynamic(whole, path, weight_type=QuantType.QInt8, use_external_data_format=beside)
    finally:
        logger.setLevel(level)
        whole.unlink(missing_ok=True)
        (path.parent / f"{path.stem}.weights").unlink(missing_ok=True)  # the new ones lie in another file

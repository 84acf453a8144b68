"""Export a run as ONNX graphs for onnxruntime, with its vocabularies and a JSON file that says how to use both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import EncoderSettings
from transduce.config.model import AttentionSettings
from transduce.config.settings import Settings
from transduce.convert import parity
from transduce.convert.folder import Outgoing
from transduce.convert.onnx_graphs import OPSET, graphs_of, quiet
from transduce.errors import UserError
from transduce.runs.atomic import write_json
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, MASK, PAD, UNK, Vocabulary
from transduce.text.tokenizer import PieceTokenizer

DESCRIPTION = "transduce.json"
"""The file that says how to use the graphs."""


def export_onnx(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, compare it with the model, and return lines that report the result.

    The comparison is made in float32. With quantization a second line reports how far the outputs move.
    Raises `UserError` where onnx, onnxruntime or onnxscript is not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'transduce[interchange]'") from None
    description: dict[str, Any] = _describe(run.settings) | {"opset": OPSET}
    settings = run.settings.model
    assert isinstance(settings, AttentionSettings)
    for name, graph in graphs_of(run.model, settings).items():
        graph.save(out / f"{name}.onnx")
        description[name] = {"file": f"{name}.onnx", "inputs": list(graph.inputs), "outputs": list(graph.outputs)}
        if graph.state:
            description[name]["state"] = graph.state
    sides = {"source": run.tokenizers.src, "target": run.tokenizers.tgt}
    if run.settings.task != "translation":
        sides = {"tokenizer": run.tokenizers.tgt}
    description |= {name: _write_vocabulary(out, name, vocabulary) for name, vocabulary in sides.items()}
    write_json(out / DESCRIPTION, description)
    difference = _decoder_difference if "decoder" in description else _encoder_difference
    what = f"outputs of onnxruntime {onnxruntime.__version__}, float32"
    lines = [parity.settle(what, difference(out, description, run))]
    if run.quantization is not None:
        for name in ("encoder", "decoder"):
            if name in description:
                _quantize(out / description[name]["file"])
        moved, _ = difference(out, description, run)
        lines.append(f"{run.quantization} moves outputs by {moved:.2f} at most")
    return lines


def _write_vocabulary(out: Path, name: str, vocabulary: Vocabulary) -> dict[str, str]:
    """Write the tokenizer's file and, for an imported one, the list that maps its results to our ids."""
    if isinstance(vocabulary, HubTokenizer):
        (out / f"{name}.json").write_bytes(vocabulary.model)
        write_json(out / f"{name}.ids.json", vocabulary.theirs)
        return {"library": "tokenizers", "file": f"{name}.json", "ids": f"{name}.ids.json"}
    (out / f"{name}.spm").write_bytes(vocabulary.model)
    found = {"library": "sentencepiece", "file": f"{name}.spm"}
    if isinstance(vocabulary, PieceTokenizer):
        write_json(out / f"{name}.pieces.json", vocabulary.pieces(range(vocabulary.vocab_size)))
        found["pieces"] = f"{name}.pieces.json"
    return found


def _describe(settings: Settings) -> dict[str, Any]:
    """The facts that a program needs in addition to the inputs and outputs of the graphs."""
    s, decoding, data = settings.model, settings.decoding, settings.data
    special = {"pad": PAD, "unknown": UNK, "begin": BOS, "end": EOS}
    if settings.task == "masked":
        special["mask"] = MASK
    found: dict[str, Any] = {"task": settings.task, "special": special, "longest": s.position_limit}
    if settings.task == "translation":
        found |= {"append_to_source": [EOS], "begin_target": [BOS], "never_written": [PAD, BOS]}
        return found | decoding.model_dump(include={"beam", "length_penalty", "max_length"})
    if settings.task == "causal":
        begin = [] if data.documents == "file" else [BOS]
        return found | {"begin": begin, "never_written": [PAD, BOS], "context": data.context}
    found |= {"before_text": [BOS], "behind_text": [EOS]}
    if settings.task == "classification":
        found["labels"] = list(data.labels or ())
    return found


# -- comparison with the model


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _decoder_difference(out: Path, description: dict[str, Any], run: Outgoing) -> parity.Difference:
    """Compare cached steps with one forward pass, for a padded batch."""
    s, n_tgt, fixed = run.settings.model, run.tokenizers.n_tgt, {}
    longest = parity.MAX_TOKENS if s.position_limit is None else min(parity.MAX_TOKENS, s.position_limit - 1)
    if "encoder" in description:
        batch = parity.examples(run.tokenizers.n_src, n_tgt, longest=longest)
        source = {"ids": batch.src.numpy(), "mask": (batch.src != PAD).numpy()}
        found = _session(out / description["encoder"]["file"]).run(None, source)
        fixed = {"mask": source["mask"]} | dict(zip(description["encoder"]["outputs"], found, strict=True))
        expected = parity.logits_of(run.model, batch.src, batch.tgt_in)
    else:
        batch = parity.examples(8, n_tgt, longest=longest)
        expected = parity.logits_of(run.model, batch.tgt_in)
    decoder = _session(out / description["decoder"]["file"])
    steps = _steps(decoder, description["decoder"]["state"], batch.tgt_in, fixed)
    return parity.compare((found, expected[:, begin:end]) for begin, end, found in steps)


def _steps(
    decoder: Any, first: dict[str, Any], ids: Tensor, fixed: dict[str, Any]
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield logits of parts of ids [B, T] with their begin and end: three tokens as of a prompt, then one by one."""
    shapes = {name: [len(ids) if n == "batch" else int(n) for n in shape] for name, shape in first.items()}
    state = {name: torch.zeros(shape).numpy() for name, shape in shapes.items()}
    begin = 0
    while begin < ids.shape[1]:
        end = min(begin + (1 if begin else 3), ids.shape[1])
        logits, *new = decoder.run(None, {"ids": ids[:, begin:end].numpy(), **fixed, **state})
        yield begin, end, torch.from_numpy(logits)
        state, begin = dict(zip(state, new, strict=True)), end


def _encoder_difference(out: Path, description: dict[str, Any], run: Outgoing) -> parity.Difference:
    """Compare the outputs of the head on padded texts of many lengths."""
    encoder, s = description["encoder"], run.settings.model
    assert isinstance(s, EncoderSettings)
    ids, segments = parity.text_examples(s, run.tokenizers.n_tgt)
    inputs = {"ids": ids.numpy(), "mask": (ids != PAD).numpy(), "segments": segments.numpy()}
    found = _session(out / encoder["file"]).run(None, {name: inputs[name] for name in encoder["inputs"]})
    with torch.no_grad():
        expected = parity.head_outputs(run.model, ids, segments)
    real = ids != PAD
    pairs = [(torch.from_numpy(value), expected[name]) for name, value in zip(encoder["outputs"], found, strict=True)]
    return parity.compare((value[real], ours[real]) if ours.dim() == 3 else (value, ours) for value, ours in pairs)


def _quantize(path: Path) -> None:
    """Store matrices in int8; activations are quantized as the graph runs (onnxruntime's dynamic quantization)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # it recommends a pre-processing step that these graphs do not need
    with quiet(None), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        data = path.with_name(f"{path.name}.data")
        result = Path(folder) / path.name
        quantize_dynamic(path, result, weight_type=QuantType.QInt8, use_external_data_format=data.exists())
        data.unlink(missing_ok=True)
        for file in result.parent.iterdir():
            file.replace(path.with_name(file.name))

"""Marian's own models, *.npz and *.bin, with their vocabularies: OPUS-MT, and Mozilla's and browsermt's in 8 bits.

A model contains its settings as `special:model.yml`. In *.bin, a matrix may be quantized for intgemm: a weight q of 8
or 16 bits with the multiplier m of its matrix stands for q / m. The decoder starts from a vector of zeros, which
becomes the vector of our BOS.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.config.settings import DataSettings, Settings, TokenizerSettings
from transduce.convert import weight_map
from transduce.convert.folder import Imported, read_bytes
from transduce.convert.format_limits import ConfigFormat, model_from
from transduce.convert.seq2seq_vocabulary import piece_tokenizer, read_pieces
from transduce.convert.weight_map import NEVER, TIES, Entry, Layer, Rows, block_layers
from transduce.errors import RunFolderError, UserError, needing
from transduce.runs import atomic
from transduce.text.tokenizer import Tokenizers

SUFFIXES = (".npz", ".bin")

FORMAT = ConfigFormat(
    sizes={
        "dim-emb": "d_model",
        "transformer-dim-ffn": "d_ff",
        "transformer-heads": "n_heads",
        "enc-depth": "n_encoder_layers",
        "dec-depth": "n_decoder_layers",
    },
    values={},
    activation="transformer-ffn-activation",
    defaults={
        "transformer-ffn-activation": "swish",
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "",
        "transformer-decoder-autoreg": "self-attention",
    },
    only={
        "type": ("transformer",),
        "right-left": (False,),
        "transformer-ffn-depth": (2,),
        "transformer-decoder-ffn-depth": (0, 2),
        "transformer-tied-layers": ([],),
        "transformer-pool": (False,),
        "transformer-rnn-projection": (False,),
        "transformer-disable-position-embeddings": (False,),
        "ulr": (False,),
        "lemma-dim-emb": (0,),
    },
)

_NORMS = {("", "an", ""): "post", ("n", "a", "n"): "pre"}
"""Our `residual` by Marian's operations (except dropout) before a sub-layer, after it, and after a stack."""
_NORMED_KEYS, _EXACT_GELU = (1, 10, 24), (1, 12, 3)
"""The first versions of Marian that normalize keys and values before self-attention, and that compute GELU by erf."""

# In names, * stands for a layer's weight (W) or bias (b), or for a norm's scale or bias.
_SELF_ATTENTION = ("self_*q self_*k self_*v", "self_*o")
_SSRU = Layer("self_attention.gate_value", "rnn_*f rnn_*", "stream stream")
_CROSS_ATTENTION = ("context_*q", "context_*k context_*v", "context_*o")
_FEED_FORWARD = ("ffn_*1", "ffn_*2")
_OUTPUT, _BIAS = "decoder_ff_logit_out_W", "decoder_ff_logit_out_b"


# -- settings and weights


def model_settings(config: Mapping[str, Any], *, origin: Path) -> TransformerSettings:
    """Convert a complete `special:model.yml` to our settings; `UserError` lists everything that is not supported."""
    problems = list[str]()
    before, after, top, embedding = (
        str(config[f"transformer-{name}"]).replace("d", "")
        for name in ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")
    )
    residual = _NORMS.get((before, after, top))
    if residual is None or embedding not in ("", "n"):
        problems.append(
            f"transformer-preprocess, -postprocess, -postprocess-top = {before!r}, {after!r}, {top!r} without d, and "
            f"-emb = {embedding!r}; supported: '', 'an', '' (post-norm) or 'n', 'a', 'n' (pre-norm), and '' or 'n'"
        )
    version = tuple(map(int, re.findall(r"\d+", str(config.get("version")).split(" ")[0])))
    if residual == "pre" and version < _NORMED_KEYS:
        problems.append("pre-norm of a version before 1.10.24, which does not normalize keys and values")
    if config["transformer-ffn-activation"] == "gelu" and version < _EXACT_GELU:
        problems.append("transformer-ffn-activation = 'gelu' of a version before 1.12.3, which approximates it")
    own = {"self-attention": "attention", "rnn": "ssru"}.get(config["transformer-decoder-autoreg"])
    if own is None or (own == "ssru" and config.get("dec-cell") != "ssru"):
        cell = f" with dec-cell = {config.get('dec-cell')!r}" if own else ""
        problems.append(
            f"transformer-decoder-autoreg = {config['transformer-decoder-autoreg']!r}{cell}; supported: "
            "self-attention, and rnn with dec-cell = ssru"
        )
    if config.get("transformer-decoder-dim-ffn") not in (None, 0, config.get("transformer-dim-ffn")):
        problems.append("transformer-decoder-dim-ffn differs from transformer-dim-ffn")
    sizes = config.get("dim-vocabs")
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(n) is not int or not 0 < n < 1 << 24 for n in sizes):
        problems.append(f"dim-vocabs = {repr(sizes)[:40]}; two vocabularies are needed, of a source and a target")
    FORMAT.check(config, origin=origin, more=problems)
    values = {
        "residual": residual,
        "norm_eps": 1e-6,
        "embedding_norm": embedding == "n",
        "positions": "sinusoidal_marian",
        "decoder_self": own,
        "tie": TIES[_ties(config, "tied-embeddings-src"), _ties(config, "tied-embeddings")],
        "output_bias": True,
    }
    return model_from(TransformerSettings, FORMAT.read(config) | values, origin=origin)


def _ties(config: Mapping[str, Any], key: str) -> bool:
    return bool(config.get("tied-embeddings-all") or config.get(key))


def entries(s: TransformerSettings, *, src: Rows, tgt: Rows) -> Iterator[Entry]:
    """Yield the weight map for these settings. `src`, `tgt`: the file's embedding row for each of our ids."""
    names = "Wemb", "encoder_Wemb", "decoder_Wemb", f"{_OUTPUT}t"
    yield from weight_map.translator_embedding_entries(s, names, src=src, tgt=tgt)
    yield Entry("output_bias", (_BIAS,), (tgt.n_theirs,), rows=tgt.index, filler=NEVER)
    norm = "{}_ln_*" + "_pre" * (s.residual == "pre")
    own = block_layers(self_attention=(*_SELF_ATTENTION, norm.format("self_Wo")))
    rest = block_layers(feed_forward=(*_FEED_FORWARD, norm.format("ffn_ffn")))
    cross = block_layers(cross_attention=(*_CROSS_ATTENTION, norm.format("context_Wo")))
    ssru = (
        _SSRU,
        Layer("self_attention_residual.norm", norm.format("rnn" if s.residual == "pre" else "rnn_ffn"), "stream"),
    )
    layers = (*own, *rest), (*(ssru if s.decoder_self == "ssru" else own), *cross, *rest)
    for entry in weight_map.stack_entries(
        s, "{}_", "l{}_", layers, norms=("emb_ln_*_pre", "top_ln_*"), first=1, transposed=True
    ):
        yield replace(entry, theirs=tuple(map(_name, entry.theirs)), also=())


def _name(name: str) -> str:
    """Convert a name such as "self_*q.weight" to Marian's form, such as "self_Wq"."""
    layer, _, part = name.rpartition(".")
    parts = {"weight": "scale", "bias": "bias"} if "_ln_" in layer else {"weight": "W", "bias": "b"}
    return layer.replace("*", parts[part])


def _complete(tensors: dict[str, Tensor], config: Mapping[str, Any], s: TransformerSettings) -> None:
    """Remove multipliers of activations; add weights that our layers need and the file may lack."""
    for name in [name for name in tensors if name.endswith("_QuantMultA")]:
        del tensors[name]
    if (untransposed := tensors.pop(_OUTPUT, None)) is not None:
        tensors.setdefault(f"{_OUTPUT}t", untransposed.t())
    tensors.setdefault(_BIAS, torch.zeros(config["dim-vocabs"][1]))
    for side, n_layers in (("encoder", s.n_encoder_layers), ("decoder", s.n_decoder_layers)):
        for layer in (f"{side}_l{number + 1}" for number in range(n_layers)):
            if f"{layer}_rnn_W" in tensors:
                tensors.setdefault(f"{layer}_rnn_b", torch.zeros(s.d_model))
            for name in (
                (f"{layer}_self", f"{layer}_context") if config.get("transformer-no-projection") is True else ()
            ):
                query = tensors.get(f"{name}_Wq")
                if query is not None and query.shape == (s.d_model, s.d_model):
                    tensors |= {f"{name}_Wo": torch.eye(s.d_model), f"{name}_bo": torch.zeros(s.d_model)}


# -- vocabularies


def _vocabulary_ids(path: Path) -> dict[str, int]:
    """Read the ids of the pieces in a SentencePiece model or a YAML file."""
    if path.suffix == ".spm":
        return {piece: i for i, piece in enumerate(read_pieces(path))}
    if path.suffix not in (".yml", ".yaml", ".json"):
        raise UserError(f"{path}: vocabularies in *.spm and *.yml are supported, not *{path.suffix}")
    return read_yaml(path)


def _read_vocabularies(paths: Sequence[Path], sizes: Sequence[int], notes: list[str]) -> tuple[Rows, Rows, Tokenizers]:
    """Read rows and tokenizers of both sides. A YAML file with ids has its SentencePiece model beside it."""
    sides = []
    for path, spm, n in zip(paths, ("source.spm", "target.spm"), sizes, strict=True):
        ids = _vocabulary_ids(path)
        if not {"<unk>", "</s>"} <= ids.keys():
            raise UserError(f"{path}: the vocabulary lacks <unk> or </s>")
        rows = weight_map.rows_of(ids, [-1, ids["<unk>"], -1, ids["</s>"]], n=n, origin=path)
        model = path if path.suffix == ".spm" else path.with_name(spm)
        if not model.exists():
            raise UserError(
                f"{model} is missing: {path.name} lists pieces, into which a text is split by a SentencePiece model; "
                "other programs, such as subword-nmt, are not supported"
            )
        sides.append((rows, piece_tokenizer(model, ids, rows, notes, source=path), model))
    (src, src_tokenizer, src_model), (tgt, tgt_tokenizer, tgt_model) = sides
    is_one = paths[0] == paths[1] and src_model == tgt_model
    return src, tgt, Tokenizers(src_tokenizer, src_tokenizer if is_one else tgt_tokenizer)


# -- import


def import_marian(source: Path) -> Imported:
    """Import a model file, or the only model of a folder, with the vocabularies beside it.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    path = find_model(source)
    decoder = _decoder_settings(path)
    paths = _vocabulary_paths(path, decoder)
    config, tensors = read_model(path)
    config = {**FORMAT.defaults, **config}
    model, sizes = model_settings(config, origin=path), config.get("dim-vocabs", [])
    type_note = weight_map.type_note(tensors)
    tensors = {name: tensor.flatten() if len(tensor) == 1 else tensor for name, tensor in tensors.items()}
    _complete(tensors, config, model)
    weight_map.check(tensors, [*entries(model, src=Rows.of_size(sizes[0]), tgt=Rows.of_size(sizes[1]))], origin=path)
    version = str(config.get("version", "an unknown version")).split(" ")[0][:40]
    notes = [f"found: a translator of Marian ({version}), {model.summary}", type_note]
    src, tgt, tokenizers = _read_vocabularies(paths, sizes, notes)
    if model.ties_inputs and src.index.tolist() != tgt.index.tolist():
        raise UserError(f"{path} has one embedding, and {paths[0].name} and {paths[1].name} are two vocabularies")
    state = weight_map.read(tensors, [*entries(model, src=src, tgt=tgt)], origin=path)
    settings = Settings(
        data=DataSettings(**_languages(path, paths)),
        tokenizer=TokenizerSettings(
            kind="marian", vocab_size=max(tokenizers.n_src, 8), joint=tokenizers.src is tokenizers.tgt
        ),
        model=model.model_copy(update={"output_bias": weight_map.complete_output_bias(state, tgt)}),
        decoding=_decoding(decoder, notes),
    )
    return Imported(settings, tokenizers, state, tuple(notes))


def find_model(source: Path) -> Path:
    """Return the model file: `source` itself or, for a folder, the model that decoder.yml names, or the only one."""
    if not source.is_dir():
        return source
    paths = models_in(source)
    if len(paths) > 1 and (source / "decoder.yml").exists():
        paths = [path for path in paths if path.name in _names(read_yaml(source / "decoder.yml"), "models")] or paths
    if len(paths) > 1:
        raise UserError(f"{source} has {len(paths)} models: {', '.join(path.name for path in paths)}; give one of them")
    return paths[0]


def _names(decoder: Mapping[str, Any], key: str) -> list[str]:
    """Return file names from the settings of Marian's decoder, without their folders, which exist elsewhere."""
    return [Path(str(name)).name for name in decoder.get(key) or ()]


def _decoder_settings(model: Path) -> Mapping[str, Any]:
    """Read the settings of Marian's decoder beside a model; empty if they are for another model."""
    folder = model.parent
    for path in sorted({*folder.glob("*decoder.yml"), *folder.glob("config*.yml")}):
        settings = read_yaml(path)
        if _names(settings, "models") == [model.name]:
            return settings
    return {}


def _vocabulary_paths(model: Path, decoder: Mapping[str, Any]) -> list[Path]:
    """Find the vocabularies of source and target: named by the decoder's settings, or else the folder's *.spm files."""
    folder = model.parent
    if names := _names(decoder, "vocabs"):
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.spm"), key=lambda path: not path.name.startswith(("src", "source")))
        paths = paths * 2 if len(paths) == 1 else paths
    if len(paths) != 2 or (not names and paths[0] != paths[1] and not paths[0].name.startswith(("src", "source"))):
        raise UserError(
            f"{folder} needs the vocabularies of {model.name}: one *.spm, or two, of which the source's name begins "
            "with src; or a decoder.yml that names them"
        )
    return paths


def _languages(model: Path, vocabularies: Sequence[Path]) -> dict[str, str]:
    """Return src_lang and tgt_lang from names of Mozilla's files: model.enru.intgemm.alphas.bin with vocab.enru.spm."""
    parts = set(model.name.split(".")).intersection(*(path.name.split(".") for path in vocabularies))
    pairs = [part for part in parts if re.fullmatch("[a-z]{4}", part)]
    return {"src_lang": pairs[0][:2], "tgt_lang": pairs[0][2:]} if len(pairs) == 1 else {}


def _decoding(decoder: Mapping[str, Any], notes: list[str]) -> Any:
    keys = {"beam-size": "beam", "normalize": "length_penalty"}
    values = {ours: decoder[theirs] for theirs, ours in keys.items() if theirs in decoder}
    if decoder.get("word-penalty"):
        notes.append(f"not followed: word-penalty = {repr(decoder['word-penalty'])[:40]}")
    return Settings.from_mapping({"decoding": values}, origin="the decoder's settings").decoding


# -- files, which are untrusted

CONFIG = "special:model.yml"
_MOST_BYTES = 16 << 30
_VERSION = (1).to_bytes(8, "little")
"""The first bytes of a Marian model in *.bin. Shortlists and CTranslate2's model.bin begin differently."""
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error)
_NUMBERS = {0x101: "i1", 0x402: "f2", 0x404: "f4", 0x408: "f8"}
"""NumPy's types by the numbers of Marian's `Type`."""
_INTGEMM = {
    0x4101: ("i1", 0),  # types of the forks of browsermt and Mozilla
    0x4102: ("i2", 0),
    0x10001: ("i1", 0),
    0x10002: ("i2", 0),
    0x18001: ("i1", 16),  # SSSE3
    0x11001: ("i1", 32),  # AVX2
    0x12001: ("i1", 64),  # AVX-512
    0x13001: ("i1", 64),
    0x14002: ("i2", 16),  # SSE2
    0x11002: ("i2", 32),
    0x12002: ("i2", 64),
}
"""Quantized types: NumPy's type, and bytes per register of the instruction set that the layout is for (0: plain order).
"""


def models_in(folder: Path) -> list[Path]:
    """List the files in a folder that may be models of Marian."""
    paths = [path for path in sorted(folder.glob("*.npz")) if not path.name.endswith(".optimizer.npz")]
    return paths + [path for path in sorted(folder.glob("*.bin")) if _starts_like_a_model(path)]


def _starts_like_a_model(path: Path) -> bool:
    with atomic.reading(path), path.open("rb") as file:
        return file.read(len(_VERSION)) == _VERSION


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the settings and tensors of a model; `RunFolderError` if it is damaged or not Marian's."""
    read = _read_npz if path.suffix == ".npz" else _read_bin
    try:
        tensors = read(path)
        text = tensors.pop(CONFIG).numpy().tobytes()
    except (*_DAMAGE, ValueError, TypeError, KeyError, EOFError, RuntimeError) as error:
        why = f"it has no {CONFIG}" if isinstance(error, KeyError) else error
        raise RunFolderError(f"{path} is damaged, or not a model of Marian: {why}") from None
    return read_yaml(path, text.rstrip(b"\0")), tensors


def _read_npz(path: Path) -> dict[str, Tensor]:
    with atomic.reading(path), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in arrays.items()}


def _read_bin(path: Path) -> dict[str, Tensor]:
    content, position = memoryview(atomic.read_bytes(path, most=_MOST_BYTES)), 0

    def take(n_bytes: int) -> memoryview:
        nonlocal position
        if position + n_bytes > len(content):
            raise ValueError("it is truncated")
        position += n_bytes
        return content[position - n_bytes : position]

    if take(8) != _VERSION:
        raise ValueError("it does not begin like one")
    (n_tensors,) = struct.unpack("<Q", take(8))
    headers = list(struct.iter_unpack("<4Q", take(32 * n_tensors)))  # sizes of name, type, shape and data
    names = [bytes(take(header[0])).rstrip(b"\0").decode("utf-8") for header in headers]
    shapes = [np.frombuffer(take(4 * header[2]), "<i4").tolist() for header in headers]
    take(*struct.unpack("<Q", take(8)))  # padding
    tensors = {}
    for name, shape, (_, kind, _, n_bytes) in zip(names, shapes, headers, strict=True):
        if any(size < 1 for size in shape):
            raise ValueError(f"{name[:200]} has the shape {shape[:9]}")
        tensors[name] = torch.from_numpy(_decode(name, kind, shape, take(n_bytes)))
    return tensors


def _decode(name: str, kind: int, shape: list[int], content: memoryview) -> np.ndarray:
    if kind in _NUMBERS:
        return np.frombuffer(content, f"<{_NUMBERS[kind]}", math.prod(shape)).reshape(shape).copy()
    if kind not in _INTGEMM:
        raise ValueError(
            f"{name[:200]} has type {kind:#x}, which is packed for FBGEMM or unknown; use the model in *.npz"
        )
    dtype, register = _INTGEMM[kind]
    flat = np.frombuffer(content, f"<{dtype}", math.prod(shape))
    (multiplier,) = struct.unpack_from("<f", content, flat.nbytes)
    if not 0 < multiplier < math.inf:
        raise ValueError(f"{name[:200]} has the quantization multiplier {multiplier}")
    values, n_columns = flat.astype(np.float32) / np.float32(multiplier), shape[-1]
    if "Wemb" in name:
        return values.reshape(shape)
    if not register:
        return values.reshape(n_columns, -1).T.copy()
    # stored order: groups of 8 columns; in a group, parts of rows as long as a register; in a part, its columns
    n_rows = register // flat.itemsize
    return values.reshape(n_columns // 8, -1, 8, n_rows).transpose(1, 3, 0, 2).reshape(shape)


def read_yaml(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """Read a YAML file, or `text`, a part of it, as values by name. Raises `RunFolderError`.

    Keys stay strings: a piece of a vocabulary may be "no" or "1".
    """
    with needing("interchange", "Marian's settings need PyYAML"):
        import yaml
    try:
        values = yaml.load(read_bytes(path) if text is None else text, Loader=yaml.CBaseLoader)
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise RunFolderError(f"{path} is damaged: line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: characters that YAML does not allow
        raise RunFolderError(f"{path} is damaged: {' '.join(str(error).split()[:20])}") from None
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} is damaged: it is not a mapping")
    return {
        str(name): [_typed(item) for item in value] if isinstance(value, list) else _typed(value)
        for name, value in values.items()
    }


def _typed(value: Any) -> Any:
    """Convert a string that is a number or a truth value; other values stay."""
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value

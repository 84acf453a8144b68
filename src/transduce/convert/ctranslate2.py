"""CTranslate2: import and export of translators, and of packages of Argos Translate, zip files with such a model.

One weight map serves both directions. The import reads the files without the library. The export uses its model
specifications, but not its converter for Marian models, which starts the decoder from a zero vector.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from transduce import __version__
from transduce.config.architectures import TransformerSettings
from transduce.config.model import NORM_EPSILONS
from transduce.config.settings import DataSettings, Settings, TokenizerSettings
from transduce.convert import weight_map
from transduce.convert.ctranslate2_files import ModelFiles, dotted, read_model, read_vocabularies
from transduce.convert.folder import Imported, Outgoing, languages_in, read_object
from transduce.convert.format_limits import CTRANSLATE2_HINT, Expressible, check_expressible, model_from, position_table
from transduce.convert.parity import MAX_TOKENS, NotLoaded, compare, examples, logits_of, settle
from transduce.convert.seq2seq_vocabulary import language_codes, piece_tokenizer
from transduce.convert.weight_map import NEVER, TIES, Entry, Rows, block_layers
from transduce.errors import RunFolderError, SettingsError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.text.languages import language_name
from transduce.text.special import BOS, EOS, PAD, Framing
from transduce.text.tokenizer import Tokenizers

QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")

_ACTIVATIONS = {0: "relu", 1: "gelu_tanh", 2: "silu", 3: "gelu"}
"""Our activation for each number of `ctranslate2.specs.Activation`."""
_SINUSOIDS = ("sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "sinusoidal_marian")
_LARGEST_ERROR = 1e-4
"""Largest error of sinusoids computed in float32 by another program. A table in 16 bits becomes learned positions."""
EXPRESSIBLE: Expressible = {
    "positions": (*_SINUSOIDS, "learned", "none"),
    "feed_forward": ("plain", "gated"),
    "activation": tuple(_ACTIVATIONS.values()),
    "one_end": (False,),
    "language_last": (False,),
}
_SIDES = ("encoder", "decoder")
_POSITIONS = "position_encodings.encodings"
_PROJECTION_BIAS = "decoder.projection.bias"
_EMBEDDINGS = {
    "src_embedding.table.weight": "encoder.embeddings_0.weight",
    "tgt_embedding.table.weight": "decoder.embeddings.weight",
    "output_embedding.weight": "decoder.projection.weight",
}


# -- the weight map

_SELF_ATTENTION = ("self_attention.linear_0", "self_attention.linear_1", "self_attention.layer_norm")
_CROSS_ATTENTION = (*(f"attention.linear_{i}" for i in range(3)), "attention.layer_norm")
_EXPAND = {"plain": "ffn.linear_0", "gated": "ffn.linear_0 ffn.linear_0_noact"}


def entries(s: TransformerSettings, *, src: Rows, tgt: Rows) -> list[Entry]:
    """Return the weight map for these settings, with all biases, including biases that the model lacks."""
    tensors = []
    for ours, theirs in _EMBEDDINGS.items():
        rows = src if ours.startswith("src") else tgt
        tensors.append(Entry(ours, (theirs,), (rows.n_theirs, s.d_model), rows=rows.index))
    tensors.append(Entry("output_bias", (_PROJECTION_BIAS,), (tgt.n_theirs,), rows=tgt.index, filler=NEVER))
    feed_forward = (_EXPAND[s.feed_forward], "ffn.linear_1", "ffn.layer_norm")
    block = block_layers(self_attention=_SELF_ATTENTION, feed_forward=feed_forward)
    layers = block, (*block, *block_layers(cross_attention=_CROSS_ATTENTION))
    return [*tensors, *weight_map.stack_entries(s, "{}.", "layer_{}.", layers, positions=_POSITIONS)]


def _is_ours(entry: Entry, s: TransformerSettings) -> bool:
    """Whether our model has this tensor. It has no biases if `bias` is false, and RMSNorm never has a bias."""
    is_bias = entry.ours.endswith(".bias")
    return not is_bias or (s.bias and not (s.norm == "rms" and entry.ours.endswith("norm.bias")))


# -- import


@dataclass(frozen=True, slots=True)
class _Special:
    """CTranslate2's special pieces. `source_end`: sources end with `end`; `adds_end`: the library appends it."""

    unknown: str
    start: str
    end: str
    source_end: bool
    adds_end: bool

    @classmethod
    def of(cls, files: ModelFiles) -> _Special:
        """Read the special pieces from config.json; pieces that it does not name have their usual names.

        If the library does not append the end to a source, its caller may. Callers do so if the decoder starts with the
        end or with padding, as in transformers, but not if it starts with <s>, as in OpenNMT-py.
        """
        config, flags = files.config, files.numbers
        unknown, bos, end = (
            str(config.get(f"{key}_token") or usual)
            for key, usual in (("unk", "<unk>"), ("bos", "<s>"), ("eos", "</s>"))
        )
        start = str(config.get("decoder_start_token") or (bos if flags.get("with_target_bos", 1) else end))
        if flags.get("decoder.start_from_zero_embedding"):
            start = ""  # the decoder starts from zeros, without a piece, as ours does if BOS has no row
        adds_end = bool(config.get("add_source_eos", flags.get("with_source_eos", 0)))
        return cls(unknown, start, end, adds_end or start != "<s>", adds_end)

    def rows(self, pieces: Sequence[str], origin: Path) -> Rows:
        """Map our ids to CTranslate2's rows: padding, unknown, BOS, EOS, then the other pieces in their order."""
        ids = {piece: i for i, piece in enumerate(pieces)}
        if missing := {self.unknown, self.start, self.end} - {"", *ids}:
            raise UserError(f"{origin}: the vocabulary lacks {', '.join(sorted(missing))}")
        pad = next((ids[piece] for piece in ("<pad>", "<blank>") if piece in ids and piece != self.start), -1)
        special = [pad, ids[self.unknown], ids.get(self.start, -1), ids[self.end]]
        return weight_map.rows_of(ids, special, n=len(pieces), origin=origin, spare=len(pieces) - len(ids))


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """The vocabularies of source and target: CTranslate2's pieces, and its row for each of our ids.

    `end`: the token that callers append to a source, or None.
    """

    pieces: tuple[Sequence[str], Sequence[str]]
    rows: tuple[Rows, Rows]
    end: str | None = None

    def tokens(self, side: int, ids: Sequence[int]) -> list[str]:
        """Convert our ids to CTranslate2's pieces, without padding, BOS and EOS. `side`: 0 source, 1 target."""
        return [self.pieces[side][int(self.rows[side].index[i])] for i in ids if i not in (PAD, BOS, EOS)]


def import_ctranslate2(folder: Path, *, languages: Mapping[str, str] | None = None, prefix: str = "") -> Imported:
    """Read a folder with model.bin, vocabularies, and the SentencePiece models of both sides.

    `languages`: values of src_lang and tgt_lang. `prefix`: the piece that begins each translation, if any. `UserError`
    lists everything that is missing, damaged, contradictory or not supported.
    """
    files, pieces = read_model(folder), read_vocabularies(folder)
    special = _Special.of(files)
    model = _settings(files, special, folder)
    tensors = dict(files.tensors)
    if model.positions != "learned":
        for side in _SIDES:
            del tensors[f"{side}.{_POSITIONS}"]
    expected = entries(model, src=Rows.of_size(len(pieces[0])), tgt=Rows.of_size(len(pieces[1])))
    for entry in expected:
        if entry.ours.endswith("bias"):  # OpenNMT-py has biases in some layers
            tensors |= {name: torch.zeros(entry.shape) for name in entry.theirs if name not in tensors}
    weight_map.check(tensors, expected, origin=folder)
    rows = special.rows(pieces[0], folder), special.rows(pieces[1], folder)
    ours = [entry for entry in entries(model, src=rows[0], tgt=rows[1]) if _is_ours(entry, model)]
    state = weight_map.read(tensors, ours, origin=folder)
    source, target, output = (state[name] for name in _EMBEDDINGS)
    tie = TIES[torch.equal(source, target), torch.equal(target, output)]
    model = model.model_copy(update={"tie": tie, "output_bias": weight_map.complete_output_bias(state, rows[1])})
    notes = [f"found: a translator of CTranslate2, {model.summary}"]
    if not model.source_end:
        notes.append(
            f"a source has no {special.end}, as in OpenNMT-py, since a translation starts with {special.start}"
        )
    tokenizers = _tokenizers(folder, pieces, rows, prefix, notes)
    settings = Settings(
        data=DataSettings(**(languages or {}), max_length=model.max_positions),
        tokenizer=TokenizerSettings(kind="marian", vocab_size=max(tokenizers.n_src, 8), joint=pieces[0] is pieces[1]),
        model=model,
    )
    sides = _Sides(pieces, rows, special.end if model.source_end and not special.adds_end else None)
    return Imported(settings, tokenizers, state, tuple(notes), partial(_compared, folder, sides, model))


_FFN = "encoder.layer_0.ffn"
_IGNORED = ("alignment_layer", "alignment_heads", "embeddings_merge", "start_from_zero_embedding")
"""Ends of names of numbers in model.bin that do not change the model, or that are read elsewhere."""


def _settings(files: ModelFiles, special: _Special, folder: Path) -> TransformerSettings:
    """Convert a model's variables to our settings; `UserError` lists everything that is not supported."""
    tensors, numbers = files.tensors, dict(files.numbers)
    table, contract = (tensors.get(f"{name}.weight") for name in ("encoder.embeddings_0", f"{_FFN}.linear_1"))
    positions = [tensors[name] for side in _SIDES if (name := f"{side}.{_POSITIONS}") in tensors]
    problems = [] if files.spec == "TransformerSpec" else [f"it is a {files.spec[:80]} and not a TransformerSpec"]
    if table is None or contract is None or table.dim() != 2 or contract.dim() != 2:
        raise UserError(f"{folder}: {'; '.join([*problems, 'it has no encoder with embeddings and layers'])}")
    if len(positions) < 2 or any(vectors.shape[1:] != table.shape[1:] for vectors in positions):
        problems.append("encoder and decoder need position_encodings, one vector for each position")
    usual = {"num_heads": numbers.pop("num_heads", 8), "pre_norm": 1, "activation": 0, "scale_embeddings": 1}
    common = dict[str, float]()
    for name, default in usual.items():
        encoder, decoder = (numbers.pop(f"{side}.{name}", default) for side in _SIDES)
        common[name] = encoder
        if encoder != decoder:
            problems.append(f"{name} is {encoder} in the encoder and {decoder} in the decoder")
    if common["activation"] not in _ACTIVATIONS:
        problems.append(f"activation {common['activation']} is none of {', '.join(_ACTIVATIONS.values())}")
    others = {name: value for name, value in numbers.items() if value and not name.startswith("with_")}
    problems += [f"{name} = {value}" for name, value in others.items() if not name.endswith(_IGNORED)]
    if problems:
        raise UserError(f"{folder} is not supported: {'; '.join(problems)}")
    # An int is a flag (scale or not); a float is the factor itself.
    is_flag, scale = isinstance(common["scale_embeddings"], int), common["scale_embeddings"]
    if not is_flag and not any(math.isclose(scale, factor, rel_tol=1e-5) for factor in (1.0, table.shape[1] ** 0.5)):
        raise UserError(f"{folder} is not supported: scale_embeddings = {scale}, neither 1 nor the root of d_model")
    norm = "layer" if f"{_FFN}.layer_norm.bias" in tensors else "rms"
    biases = (value for name, value in tensors.items() if name.endswith(".bias") and name != _PROJECTION_BIAS)
    model = model_from(
        TransformerSettings,
        {
            "d_model": table.shape[1],
            "d_ff": contract.shape[1],
            "n_heads": int(common["num_heads"]),
            "n_encoder_layers": _n_layers(tensors, "encoder"),
            "n_decoder_layers": _n_layers(tensors, "decoder"),
            "residual": "pre" if common["pre_norm"] else "post",
            "norm": norm,
            "norm_eps": files.config.get("layer_norm_epsilon") or NORM_EPSILONS["layer"],
            "embedding_norm": "encoder.layernorm_embedding.weight" in tensors,
            "scale_embeddings": bool(scale) if is_flag else scale != 1.0 or table.shape[1] == 1,
            "feed_forward": "gated" if f"{_FFN}.linear_0_noact.weight" in tensors else "plain",
            "activation": _ACTIVATIONS[int(common["activation"])],
            "bias": any(bool(bias.any()) for bias in biases),
            "output_bias": True,
            "source_end": special.source_end,
            "one_end": special.start == special.end,
            "positions": "learned",
            "max_positions": min(map(len, positions)),
        },
        origin=folder,
    )
    return model.model_copy(update={"positions": _positions(model, positions)})


def _n_layers(tensors: Mapping[str, Tensor], side: str) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{side}.layer_") and ".ffn." in name})


def _positions(model: TransformerSettings, tables: Sequence[Tensor]) -> str:
    """Name the positional scheme that computes these vectors; `learned` if no scheme does."""
    for positions in ("none", *_SINUSOIDS):
        ours = position_table(model.model_copy(update={"positions": positions}))
        n = min(1024, len(ours), *map(len, tables))
        if all(torch.allclose(theirs[:n].float(), ours[:n], rtol=0, atol=_LARGEST_ERROR) for theirs in tables):
            return positions
    return "learned"


SOURCE_MODELS = ("source.spm", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model", "spiece.model")


def _tokenizers(
    folder: Path, pieces: Sequence[Sequence[str]], rows: Sequence[Rows], prefix: str, notes: list[str]
) -> Tokenizers:
    """Make tokenizers from SentencePiece models in the folder, or beside it as in packages of Argos Translate."""
    candidates = [parent / name for parent in (folder, folder.parent) for name in SOURCE_MODELS]
    source = next((path for path in candidates if path.is_file()), None)
    if source is None:
        raise UserError(
            f"{folder} has no SentencePiece model, which splits a text; copy it there as {SOURCE_MODELS[1]}"
        )
    target = source.with_name("target.spm") if source.with_name("target.spm").is_file() else source
    made = []
    for path, side, index in zip((source, target), pieces, rows, strict=True):
        ids = {piece: i for i, piece in enumerate(side)}
        ours = {row: i for i, row in enumerate(index.index.tolist())}
        codes = language_codes(ids, ours)
        framing = Framing(codes, ("src",), ("tgt",)) if codes else Framing()
        if prefix:
            if prefix not in ids:
                raise UserError(f"{folder}: target_prefix {prefix!r} is not in the vocabulary")
            framing = Framing({}, (), (ours[ids[prefix]],))
        made.append(piece_tokenizer(path, ids, index, notes, source=folder, framing=framing))
    return Tokenizers(made[0], made[0] if pieces[0] is pieces[1] and source == target else made[1])


def _compared(folder: Path, sides: _Sides, s: TransformerSettings, model: Any) -> str:
    """Compare our model with CTranslate2's in float32; return a line that reports the result."""
    try:
        import ctranslate2
    except ImportError:
        return "not checked: ctranslate2 is not installed; pip install ctranslate2, and try again"
    try:
        pairs = _log_probs(folder, model, sides, s, compute_type="float32")
    except (RuntimeError, ValueError) as error:
        raise NotLoaded(f"ctranslate2 cannot load {folder}: {error}") from None
    return settle(f"log-probabilities of ctranslate2 {ctranslate2.__version__}, float32", compare(pairs))


# -- export


def export_ctranslate2(out: Path, run: Outgoing) -> list[str]:
    """Write the folder `out`, compare it with the model, and return lines that report the result.

    The comparison is made in float32. With quantization, a second line reports how far it moves log-probabilities.
    Raises `UserError` if CTranslate2 is not installed or does not support a setting.
    """
    s, tokenizers = run.settings.model, run.tokenizers
    assert isinstance(s, TransformerSettings)
    check_expressible(s, EXPRESSIBLE, "CTranslate2")
    try:
        import ctranslate2
    except ImportError:
        raise UserError("ctranslate2 is not installed: pip install ctranslate2") from None
    pieces = tokenizers.src.pieces(range(tokenizers.n_src)), tokenizers.tgt.pieces(range(tokenizers.n_tgt))
    if any(len(set(side)) < len(side) for side in pieces):
        raise UserError("the vocabulary contains a piece twice, which CTranslate2 does not support")
    n_src, n_tgt = map(len, pieces)
    sides = _Sides(pieces, (Rows(torch.arange(n_src), n_src), Rows(torch.arange(n_tgt), n_tgt)))

    def log_probs(quantization: str | None) -> list[tuple[Tensor, Tensor]]:
        spec = _spec(s, sides, run.tensors)
        spec.validate()
        spec.optimize(quantization=quantization)
        spec.save(str(out))
        return _log_probs(out, run.model, sides, s, never=(PAD, BOS))

    what = f"log-probabilities of ctranslate2 {ctranslate2.__version__}"
    lines = [settle(f"{what}, float32", compare(log_probs(None)))]
    if run.quantization not in (None, "float32"):
        moved = torch.cat([(theirs - ours)[ours > NEVER / 2].abs() for theirs, ours in log_probs(run.quantization)])
        lines.append(
            f"{run.quantization} moves log-probabilities by {moved.mean():.4f} on average, {moved.max():.4f} at most"
        )
    for name, side in (("source.spm", tokenizers.src), ("target.spm", tokenizers.tgt)):
        (out / name).write_bytes(side.model)
    return lines


def _spec(s: TransformerSettings, sides: _Sides, tensors: Mapping[str, Tensor]) -> Any:
    """Return CTranslate2's model specification with our weights."""
    from ctranslate2.specs import common_spec, model_spec, transformer_spec

    activations = {name: common_spec.Activation(number) for number, name in _ACTIVATIONS.items()}
    spec = transformer_spec.TransformerSpec.from_config(
        (s.n_encoder_layers, s.n_decoder_layers),
        s.n_heads,
        pre_norm=s.residual == "pre",
        activation=activations[s.activation],
        layernorm_embedding=s.embedding_norm,
        ffn_glu=s.feed_forward == "gated",
        rms_norm=s.norm == "rms",
    )
    weights = weight_map.write(tensors, entries(s, src=sides.rows[0], tgt=sides.rows[1]))
    weights[_PROJECTION_BIAS][[PAD, BOS]] = NEVER  # never generated
    for side, stack in zip(_SIDES, (spec.encoder, spec.decoder), strict=True):
        weights.setdefault(f"{side}.{_POSITIONS}", position_table(s))
        stack.scale_embeddings = s.d_model**0.5 if s.scale_embeddings else 1.0

    def fill(part: Any, name: str, value: Any) -> None:
        if (weight := weights.get(dotted(name))) is not None:
            # copied: quantization changes it in place
            setattr(part, name.rpartition("/")[2], weight.clone().numpy())

    model_spec.visit_spec(spec, fill)
    spec.register_source_vocabulary(sides.pieces[0])
    spec.register_target_vocabulary(sides.pieces[1])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = "<unk>", "<s>", "</s>"
    spec.config.decoder_start_token = "<s>"
    spec.config.add_source_eos = s.source_end
    spec.config.layer_norm_epsilon = s.epsilon
    return spec


def _log_probs(
    folder: Path,
    model: Any,
    sides: _Sides,
    s: TransformerSettings,
    *,
    compute_type: str = "default",
    never: Sequence[int] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Score random targets; return (CTranslate2's, our) log-probabilities of the tokens for each sentence.

    `never`: our ids that CTranslate2's model rules out.
    """
    import ctranslate2

    engine = ctranslate2.Translator(
        str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=1
    )
    n_src, n_tgt = (len(rows.index) for rows in sides.rows)
    batch = examples(n_src, n_tgt, longest=min(MAX_TOKENS, s.max_positions - 1))
    logits = logits_of(model, batch.src, batch.tgt_in)
    logits[..., list(never)] = NEVER
    expected = logits.log_softmax(-1).gather(-1, batch.tgt_out[..., None])[..., 0]
    end = [] if sides.end is None else [sides.end]
    src = [[*sides.tokens(0, row), *end] for row in batch.src.tolist()]
    tgt = [sides.tokens(1, row) for row in batch.tgt_in.tolist()]
    theirs = [torch.tensor(score.log_probs) for score in engine.score_batch(src, tgt)]
    return [(row, ours[: len(row)]) for row, ours in zip(theirs, expected, strict=True)]


ARGOS_SUFFIX, ARGOS_METADATA = ".argosmodel", "metadata.json"
_MODEL, _PIECES = "model", "sentencepiece.model"


@contextmanager
def unpacked(package: Path) -> Iterator[Path]:
    """Unpack a package of Argos Translate temporarily, and yield the folder in it. Raises `UserError`."""
    with TemporaryDirectory(prefix="transduce-") as temporary:
        try:
            with zipfile.ZipFile(package) as archive:
                archive.extractall(temporary)  # never writes outside the folder
        except (zipfile.BadZipFile, OSError, RuntimeError) as error:
            raise RunFolderError(f"{package} is damaged, or not a package of Argos Translate: {error}") from None
        folders = [path.parent for path in Path(temporary).glob(f"*/{ARGOS_METADATA}")]
        if len(folders) != 1:
            raise RunFolderError(
                f"{package} is no package of Argos Translate: it needs one folder with {ARGOS_METADATA}"
            )
        yield folders[0]


def import_argos(folder: Path) -> Imported:
    """Read an unpacked package of Argos Translate. Raises `UserError`, also if it tokenizes without SentencePiece."""
    metadata = read_object(folder / ARGOS_METADATA)
    if (folder / "bpe.model").exists() and not (folder / _PIECES).exists():
        raise UserError(f"{folder} splits words with bpe.model, which is not supported; packages with {_PIECES} are")
    languages = languages_in(metadata, {"src_lang": "from_code", "tgt_lang": "to_code"})
    return import_ctranslate2(folder / _MODEL, languages=languages, prefix=str(metadata.get("target_prefix") or ""))


def export_argos(out: Path, run: Outgoing) -> list[str]:
    """Write the package `out` for Argos Translate, compare its model with the run, and return lines on the result.

    Raises `UserError` if CTranslate2 does not support a setting, or if the run does not name its languages.
    """
    if run.tokenizers.src.framing.directions:
        raise UserError(f"a package of Argos Translate cannot begin sources with a language token; {CTRANSLATE2_HINT}")
    data = run.settings.data
    unnamed = [f"data.{side}_lang" for side in ("src", "tgt") if not data.is_changed(f"{side}_lang")]
    if unnamed:
        raise SettingsError(f"a package of Argos Translate names its languages, and the run has no {unnamed[0]}")
    with TemporaryDirectory(prefix="transduce-") as temporary:
        folder = Path(temporary) / f"translate-{data.src_lang}_{data.tgt_lang}"
        (folder / _MODEL).mkdir(parents=True)
        lines = export_ctranslate2(folder / _MODEL, run)
        (folder / _MODEL / "target.spm").unlink()  # Argos joins the pieces of a translation without a model
        (folder / _MODEL / "source.spm").rename(folder / _PIECES)
        metadata = {
            "package_version": "1.0",
            "argos_version": "1.9.0",
            "from_code": data.src_lang,
            "from_name": language_name(data.src_lang),
            "to_code": data.tgt_lang,
            "to_name": language_name(data.tgt_lang),
        }
        write_json(folder / ARGOS_METADATA, metadata)
        write_text(folder / "README.md", f"# {run.settings.name or folder.name}\n\nMade by transduce {__version__}.\n")
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(folder.parent))
    return lines

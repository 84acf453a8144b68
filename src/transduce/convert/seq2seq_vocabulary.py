"""Vocabularies of transformers' encoder-decoders: Marian's, and multilingual ones with language tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from transduce.config.architectures import TransformerSettings
from transduce.convert import hub_folder
from transduce.convert.folder import Outgoing, read_bytes, read_object
from transduce.convert.weight_map import Rows, rows_of
from transduce.errors import RunFolderError, UserError
from transduce.runs.atomic import write_json
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, PAD, SPECIAL_PIECES, UNK, Framing, Vocabulary
from transduce.text.tokenizer import PieceTokenizer, Tokenizers, parse_model

NULL = "<null>"
"""The name of our PAD in an exported vocabulary that must keep PAD's row for an identical re-import."""


_SPECIAL = {"unk_token": "<unk>", "eos_token": "</s>"}

_MOST_MISSING = 0.2  # maximum share of a SentencePiece model's pieces without an id


@dataclass(frozen=True, slots=True, eq=False)
class ExportedVocabulary:
    """A vocabulary for transformers: its row for each of our ids, its ids of pad and bos, and its files."""

    src: Rows
    tgt: Rows
    pad: int
    bos: int | None
    tokenizer_class: str
    files: Mapping[str, Any] = field(default_factory=dict)  # bytes, or an object that becomes JSON

    def write(self, out: Path) -> None:
        for name, content in self.files.items():
            if isinstance(content, bytes):
                (out / name).write_bytes(content)
            else:
                write_json(out / name, content)


# -- Marian: pieces of SentencePiece, and a list of ids


def read_marian(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], *, tie: str, notes: list[str]
) -> tuple[Rows, Rows, Tokenizers]:
    """Read rows and tokenizers of both sides, from their lists of ids and their SentencePiece models."""
    separate = tie != "three_way"
    n_src, n_tgt = config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]
    two = bool(tokenizer_config.get("separate_vocabs"))
    if (n_src != n_tgt or two) and not (separate and two):
        raise UserError(
            f"{folder / 'config.json'}: vocab_size {n_src}, decoder_vocab_size {n_tgt}: two vocabularies need "
            "separate_vocabs in tokenizer_config.json, and embeddings that are not shared"
        )
    unk, eos = (str(tokenizer_config.get(key) or default) for key, default in _SPECIAL.items())
    sides = []
    tgt_name = "target_vocab.json" if two else "vocab.json"
    for name, spm, n in (("vocab.json", "source.spm", n_src), (tgt_name, "target.spm", n_tgt)):
        path, ids, eos_id = folder / name, read_object(folder / name), config.get("eos_token_id")
        if unk not in ids or ids.get(eos) != eos_id:
            raise UserError(f"{path}: needs {unk}, and {eos} with id {eos_id} as in config.json")
        special = ids[unk], config["pad_token_id"], ids[eos]
        if len(set(special)) < len(special) or not all(0 <= i < n for i in special):
            raise UserError(f"{path}: unknown, pad and end of sentence need three ids within 0 .. {n - 1}: {special}")
        rows = rows_of(ids, [ids.get(NULL, -1), *special], n=n, origin=path)
        sides.append((rows, piece_tokenizer(folder / spm, ids, rows, notes, source=path)))
    (src, src_tokenizer), (tgt, tgt_tokenizer) = sides
    return src, tgt, Tokenizers(src_tokenizer, tgt_tokenizer)


def _pieces_of(model: bytes) -> list[str]:
    return [piece.piece for piece in parse_model(model).pieces]


def read_pieces(spm: Path) -> list[str]:
    """Read the pieces of a SentencePiece model in the order of their ids."""
    content = read_bytes(spm)
    try:
        return _pieces_of(content)
    except Exception as error:  # errors of the protocol buffers' reader
        raise RunFolderError(f"{spm} is damaged: {type(error).__name__}") from None


def piece_tokenizer(
    spm: Path, ids: Mapping[str, int], rows: Rows, notes: list[str], *, source: Path, framing: Framing | None = None
) -> PieceTokenizer:
    """Make a tokenizer from a SentencePiece model and separate ids of its pieces. `source`: the file with the ids."""
    names = {i: piece for piece, i in ids.items()}
    others = [names.get(i, f"<unnamed {i}>") for i in rows.index[len(SPECIAL_PIECES) :].tolist()]
    pieces = [*SPECIAL_PIECES, *others]
    try:
        tokenizer = PieceTokenizer(read_bytes(spm), pieces).with_framing(framing or Framing())
    except ValueError as error:
        raise RunFolderError(f"{spm} is damaged: {error}") from None
    _check_pieces(tokenizer, spm.name, source, notes)
    return tokenizer


def _check_pieces(tokenizer: PieceTokenizer, spm: str, path: Path, notes: list[str]) -> None:
    """Note SentencePiece pieces that have no id and become unknown. `path`: the file with the ids.

    Raise `UserError` if more than a fifth of the pieces have no id.
    """
    pieces = [piece.piece for piece in parse_model(tokenizer.model).pieces if piece.type == piece.NORMAL]
    missing = set(pieces).difference(tokenizer.pieces(range(tokenizer.vocab_size)))
    if len(missing) > _MOST_MISSING * len(pieces):
        raise UserError(
            f"{path}: {len(missing):,} of {len(pieces):,} pieces of {spm} have no id in it; these files are not of one "
            "model: take both from the same folder"
        )
    if missing:
        notes.append(f"{len(missing):,} of {len(pieces):,} pieces of {spm} have no id in {path.name}: they are unknown")


def ids_and_rows(pieces: Sequence[str], *, keep_null: bool, pad_last: bool) -> tuple[dict[str, int], Rows]:
    """Make Marian's vocab.json for our pieces: eos 0, unk 1, pad last or third, the other pieces in our order."""
    pad, null = [("<pad>", BOS)], [(NULL, PAD)] if keep_null else []
    others = [(piece, i) for i, piece in enumerate(pieces) if i > EOS]
    head = [("</s>", EOS), ("<unk>", UNK)]
    order = [*head, *others, *null, *pad] if pad_last else [*head, *pad, *others, *null]
    ids = {piece: row for row, (piece, _) in enumerate(order)}
    if len(ids) < len(order):
        raise UserError(
            f"the vocabulary contains a piece twice, or one of {NULL}, <pad>, <unk>, </s> as an ordinary piece"
        )
    index = torch.full((len(pieces),), -1)
    index[torch.tensor([i for _, i in order])] = torch.arange(len(order))
    return ids, Rows(index, len(order))


def marian_vocabulary(run: Outgoing, s: TransformerSettings, *, keep_null: bool) -> ExportedVocabulary:
    """Make Marian's vocabulary for a run's pieces. `keep_null`: add a row for our PAD."""
    sides, data = (run.tokenizers.src, run.tokenizers.tgt), run.settings.data
    src_pieces, tgt_pieces = (side.pieces(range(side.vocab_size)) for side in sides)
    shared = src_pieces == tgt_pieces
    (src_ids, src), (tgt_ids, tgt) = (
        ids_and_rows(pieces, keep_null=keep_null, pad_last=shared) for pieces in (src_pieces, tgt_pieces)
    )
    tokenizer_config = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": data.src_lang,
        "target_lang": data.tgt_lang,
        "model_max_length": s.max_positions,
        "separate_vocabs": not shared,
        **_SPECIAL,
        "pad_token": "<pad>",
    }
    files = {"tokenizer_config.json": tokenizer_config, "vocab.json": src_ids}
    files |= {} if shared else {"target_vocab.json": tgt_ids}
    files |= {"source.spm": sides[0].model, "target.spm": sides[1].model}
    return ExportedVocabulary(src, tgt, int(tgt.index[BOS]), None, "MarianTokenizer", files)


# -- M2M-100, NLLB, mBART and BART: fairseq's special ids, and tokens that name languages

SPM = "sentencepiece.bpe.model"
_FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
_M2M = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
_MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_WMT21 = "en ha is ja cs ru zh de"
_SPARE = 8  # rows that fairseq adds after a vocabulary
_CODES = {  # each tokenizer's form of the token of a language
    "M2M100Tokenizer": re.compile(r"__(\w+?)__"),
    "NllbTokenizer": re.compile(r"([a-z]{3}_[A-Z][a-z]{3})"),
    "MBart50Tokenizer": re.compile(r"([a-z]{2}_[A-Z]{2})"),
}


def language_codes(ids: Mapping[str, int], ours: Mapping[int, int]) -> dict[str, int]:
    """Return our id of each language's token. `ours`: our id for each id of the imported vocabulary."""
    matches = ((pattern.fullmatch(piece), i) for piece, i in ids.items() for pattern in _CODES.values())
    return {match[1]: ours[i] for match, i in matches if match is not None}


def _is_mbart_25(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether a model is mBART-25. mBART-50 has the same model_type, but another tokenizer class."""
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    return config["model_type"] == "mbart" and not str(named).startswith("MBart50")


def puts_language_last(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether a source ends with its language's token, after EOS: in mBART-25, and in older versions of NLLB."""
    return _is_mbart_25(config, tokenizer_config) or bool(tokenizer_config.get("legacy_behaviour"))


def read_multilingual(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], *, notes: list[str]
) -> tuple[Rows, Tokenizers]:
    """Read rows and tokenizers, from SentencePiece with ids, tokenizer.json, or the files of byte-level BPE."""
    n, content, is_mbart_25 = config["vocab_size"], None, _is_mbart_25(config, tokenizer_config)
    if (folder / SPM).exists():
        ids = _piece_ids(folder, tokenizer_config, _MBART if is_mbart_25 else "")
        added: Mapping[str, int] = ids
    else:
        content = hub_folder.read_tokenizer(folder, [*_FAIRSEQ, "<mask>"], instead_of=SPM)
        ids = hub_folder.ids_of(content, origin=folder)
        added = {token["content"]: token["id"] for token in json.loads(content)["added_tokens"]}
    if any(ids.get(piece) is None for piece in _FAIRSEQ):
        raise UserError(f"{folder}: the vocabulary lacks one of {', '.join(_FAIRSEQ)}")
    ends: list[Any] = [config.get(f"{key}_token_id") for key in ("pad", "decoder_start", "eos")]
    pad, start, eos = ends
    named = f"pad_token_id = {pad}, eos_token_id = {eos}, decoder_start_token_id = {start}"
    start = ids.get(str(tokenizer_config.get("tgt_lang")), -1) if start is None and is_mbart_25 else start
    if not all(type(i) is int and 0 <= i < n for i in (pad, start, eos)):
        hint = "; mBART-25 starts with the token of its target language: give its id" if is_mbart_25 else ""
        raise UserError(f"{folder / 'config.json'}: {named}: not ids within 0 .. {n - 1}{hint}")
    if not is_mbart_25 and start not in (pad, eos):
        raise UserError(f"{folder / 'config.json'}: {named}: the decoder must start with pad or the end")
    special = [-1 if start == pad else pad, ids["<unk>"], start, eos]
    if len({pad, ids["<unk>"], eos, ids["<s>"]}) < 4:
        raise UserError(f"{folder}: unknown, pad, beginning and end need four ids")
    rows = rows_of(ids, special, n=n, origin=folder, spare=_SPARE)
    ours = {row: i for i, row in enumerate(rows.index.tolist())}
    codes = language_codes(added, ours)
    if config["model_type"] == "bart":
        framing = Framing({}, (ours[ids["<s>"]],), (ours[ids["<s>"]],))
    elif codes:
        framing = Framing(codes, ("src",), ("tgt",))
        if is_mbart_25:
            target = next((code for code, i in codes.items() if i == BOS), None)
            if target is None:
                raise UserError(
                    f"{folder}: decoder_start_token_id = {start}: mBART-25 starts with the token of its target language"
                )
            framing = Framing(codes, ("src",), (), tuple((code, target) for code in codes if code != target))
        notes.append(f"{len(codes)} languages: {', '.join(sorted(codes))}")
    else:
        raise UserError(f"{folder}: the vocabulary has no tokens for languages, such as __en__, eng_Latn or en_XX")
    if content is not None:
        vocabulary: Vocabulary = HubTokenizer(content, rows.index.tolist()).with_framing(framing)
    else:
        vocabulary = piece_tokenizer(folder / SPM, ids, rows, notes, source=folder / "vocab.json", framing=framing)
    return rows, Tokenizers(vocabulary, vocabulary)


def _piece_ids(folder: Path, tokenizer_config: Mapping[str, Any], codes: str) -> dict[str, int]:
    """Return ids of pieces and language tokens. M2M-100 lists its pieces; other models have fairseq's order.

    `codes`: language tokens, separated by spaces, for folders that list none.
    """
    if (folder / "vocab.json").exists():
        return _m2m_ids(read_object(folder / "vocab.json"), tokenizer_config)
    ids = _fairseq_ids(read_pieces(folder / SPM))
    if (folder / hub_folder.TOKENIZER).exists():
        added = read_object(folder / hub_folder.TOKENIZER).get("added_tokens") or []
        return ids | {str(token.get("content")): token.get("id") for token in added}
    decoder = tokenizer_config.get("added_tokens_decoder")
    if isinstance(decoder, dict) and len(decoder) > len(_FAIRSEQ) + 1:
        return ids | {str(token.get("content")): int(i) for i, token in decoder.items()}
    listed = {**read_object(folder / "special_tokens_map.json", optional=True), **tokenizer_config}
    names = listed.get("extra_special_tokens") or listed.get("additional_special_tokens") or codes.split()
    names = [name.get("content") if isinstance(name, dict) else name for name in names]
    names = [str(name) for name in names if name not in ids]
    if tokenizer_config.get("tokenizer_class") == "NllbTokenizer":
        names = [*names, "<mask>"]
    return ids | {name: len(ids) + i for i, name in enumerate(names)}


def _m2m_ids(ids: Mapping[str, int], tokenizer_config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids in vocab.json, followed by the ids of the languages."""
    codes = (_WMT21 if tokenizer_config.get("language_codes") == "wmt21" else _M2M).split()
    return {**ids, **{f"__{code}__": len(ids) + i for i, code in enumerate(codes)}}


def _fairseq_ids(pieces: Sequence[str]) -> dict[str, int]:
    return _FAIRSEQ | {piece: i + 1 for i, piece in enumerate(pieces) if i > 2}


def multilingual_vocabulary(run: Outgoing, s: TransformerSettings, kind: str) -> ExportedVocabulary:
    """Return the unchanged vocabulary of an imported model. `kind`: its model_type."""
    vocabulary, tokenizers = run.tokenizers.src, run.tokenizers
    framing = vocabulary.framing
    if not tokenizers.is_one:
        raise UserError(f"transformers' {kind} needs a vocabulary that was imported from it, and this one was not")
    codes = {code: code if i == BOS else vocabulary.pieces([i])[0] for code, i in framing.languages.items()}
    token = next(iter(codes.values()), "")
    tokenizer = next((name for name, pattern in _CODES.items() if pattern.fullmatch(token)), "BartTokenizer")
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    own: dict[str, Any] = {**names, "tokenizer_class": tokenizer, "model_max_length": s.max_positions}
    if s.language_last and framing.tgt:
        own["legacy_behaviour"] = True
    elif s.language_last:
        own["tokenizer_class"] = tokenizer = "MBartTokenizer"
    data = run.settings.data
    own |= {key: code for key in ("src_lang", "tgt_lang") if (code := getattr(data, key)) in codes}
    if isinstance(vocabulary, HubTokenizer):
        rows = hub_folder.their_rows(run)
        files: dict[str, Any] = {hub_folder.TOKENIZER: vocabulary.model, "tokenizer_config.json": own}
        bos = int(rows.index[int(framing.src[0])]) if kind == "bart" else 0
        return ExportedVocabulary(rows, rows, int(rows.index[PAD if s.one_end else BOS]), bos, tokenizer, files)
    n = vocabulary.vocab_size - 1  # one piece starts the decoder and ends a text
    special, ids = ("<pad>", "<unk>", "</s>", "</s>") if s.one_end else ("", "<unk>", "<pad>", "</s>"), dict(_FAIRSEQ)
    if (target := next((code for code, i in framing.languages.items() if i == BOS), None)) is not None:
        n, special = n + 1, ("<pad>", "<unk>", target, "</s>")
        ids[target] = len(_fairseq_ids(_pieces_of(vocabulary.model))) + list(codes).index(target)
    rows = rows_of({"": n - 1}, [ids.get(piece, -1) for piece in special], n=n, origin="")
    pieces = dict(zip(rows.index.tolist(), vocabulary.pieces(range(vocabulary.vocab_size)), strict=True))
    pieces |= {i: piece for piece, i in ids.items()}
    n_named = 1 + max(i for i in range(n) if not pieces[i].startswith("<unnamed"))
    files = _piece_files(vocabulary.model, [pieces[i] for i in range(n_named)], [*codes.values()], own)
    return ExportedVocabulary(rows, rows, _FAIRSEQ["<pad>"], 0, tokenizer, files)


def _piece_files(spm: bytes, named: Sequence[str], codes: Sequence[str], own: dict[str, Any]) -> dict[str, Any]:
    """Return the files of a vocabulary whose pieces have the ids of their order in `named`.

    `own`: the content of tokenizer_config.json, which is completed. `UserError` if a piece cannot have its id.
    """
    files: dict[str, Any] = {SPM: spm, "tokenizer_config.json": own}
    if own["tokenizer_class"] == "M2M100Tokenizer":
        first_language = min(map(named.index, codes))
        files["vocab.json"] = {piece: i for i, piece in enumerate(named[:first_language])}
        own["language_codes"] = "m2m100" if len(codes) > 8 else "wmt21"
        ids = _m2m_ids(files["vocab.json"], own)
    else:
        added = {*_FAIRSEQ, *codes, "<mask>"}
        own["added_tokens_decoder"] = {
            str(i): {"content": piece, "special": True, "normalized": False, "lstrip": piece == "<mask>"}
            for i, piece in enumerate(named)
            if piece in added or piece.startswith("<unnamed")  # a row before the row of a new language
        }
        own |= {"extra_special_tokens": [*codes], "mask_token": "<mask>"}
        ids = _fairseq_ids(_pieces_of(spm))
        ids |= {token["content"]: int(i) for i, token in own["added_tokens_decoder"].items()}
    missing = [piece for i, piece in enumerate(named) if ids.get(piece) != i and not piece.startswith("<unnamed")]
    if missing:
        raise UserError(
            f"transformers' {own['tokenizer_class']} has no ids for {missing[0]!r} and other pieces or languages that "
            "were added to the vocabulary; translate with transduce"
        )
    return files

"""Fuzz case number N: a file of an original, a mutation, whether the checksum is updated, and the command that reads it."""

# ruff: noqa: E501  (long tables of strange values)
from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutations import ARRAYS, BYTES, JSON, JSONL, PIECES, TENSORS, TEXT, TMX, TOML, Mutation
from fuzz.originals import BULK, PACK
from system.commands import sets
from transduce.data.lines import zstd

Command = Callable[[Path, Path], list[str]]
"""Makes the arguments of a command from the case's folder and the damaged file."""

_SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of file: its places in an original and the commands that read it. `weight`: how often it is chosen."""

    kind: str
    original: str
    files: tuple[str, ...]  # patterns
    command: Command
    weight: int = 10
    quick: bool = False  # part of --quick


@dataclass(frozen=True, slots=True)
class Case:
    """A mutation in a folder."""

    kind: str
    damage: str
    file: Path
    arguments: list[str]
    sealed: bool  # the file has a checksum that was not updated: it must not load unless it is unchanged
    linked: bool  # the file was replaced by a link, a pipe or the like


def _translate(folder: Path, file: Path) -> list[str]:
    return ["translate", str(folder / "finished"), str(folder.parent / "in.txt"), "--beam", "1", "--max-length", "3"]


def _bulk(folder: Path, file: Path) -> list[str]:
    return [*BULK, str(folder / "finished"), str(folder / "lines.txt"), "--output-dir", str(folder / "bulk")]


def _fill(folder: Path, file: Path) -> list[str]:
    return ["fill", str(folder / "finished"), "the cat <mask> on the mat"]


def _generate(folder: Path, file: Path) -> list[str]:
    return ["generate", str(folder / "finished"), "--prompt", "the cat", "--max-length", "3"]


def _classify(folder: Path, file: Path) -> list[str]:
    return ["classify", str(folder / "finished"), str(folder.parent / "in.txt")]


def _train(state: str) -> Command:
    def command(folder: Path, file: Path) -> list[str]:
        return [*json.loads((folder / "command.json").read_text()), "--run", str(folder / state)]

    return command


def _import(kind: str) -> Command:
    return lambda folder, file: ["import", kind, str(folder / "theirs"), str(folder / "made_now")]


def _recipe(folder: Path, file: Path) -> list[str]:
    return ["train", str(file), "--dry-run", "--run", str(folder / "none")]


_CHEAP = ("tokenizer.kind=char", "tokenizer.vocab_size=400", "model.d_model=16")
_QUICK = ["--dry-run", "--quiet", *sets(*_CHEAP)]


def _corpus(folder: Path, file: Path) -> list[str]:
    """The command that reads a text of this name."""
    name = file.name
    head = ["train", "--run", str(folder / "none")]
    if name.startswith("labels"):
        recipe = folder / "labels.toml"
        recipe.write_text(f'task = "classification"\n[data]\ntrain = [{{ path = "{name}" }}]\n')
        return [*head, str(recipe), *_QUICK]
    if name.startswith("c."):
        return [*head, "--path", str(file), "--src-lang", "en", "--tgt-lang", "de", *_QUICK]
    other = folder / ("b.txt" if name.startswith("a") else "a.txt")
    return [*head, "--src", str(file), "--tgt", str(other), *_QUICK]


_IMPORTED = ("config.json", "model.safetensors", "*.spm", "vocab.*", "merges.txt", "tokenizer.json", "*_config.json")
TARGETS = (
    Target("run: manifest", "translation", ("finished/manifest.json",), _translate, 12, True),
    Target("run: config", "translation", ("finished/config.json",), _translate, 14, True),
    Target("run: SentencePiece", "translation", ("finished/tokenizer.model",), _translate, 18, True),
    Target("run: weights", "translation", ("finished/model.safetensors",), _translate, 16, True),
    Target("bulk translation", "translation", ("bulk/.transduce/*",), _bulk, 8, True),
    Target("run: records", "translation", tuple(f"finished/{name}" for name in ("metrics.jsonl", "*.json", "report.html", "README.md", "recipe.toml", "model.safetensors")), _train("finished"), 8, True),
    Target("run: half-way", "translation", ("halfway/*",), _train("halfway"), 2, True),
    Target("run: checkpoint", "translation", ("halfway/checkpoints/*/*",), _train("halfway"), 5, True),
    Target("run: encoded text", "translation", ("halfway/tokens/*.json", "halfway/tokens/*/*"), _train("halfway"), 5, True),
    Target("language model, half-way", "causal", ("halfway/*", "halfway/tokens/*", "halfway/tokens/*/*", "halfway/checkpoints/*/*"), _train("halfway"), 2),
    Target("language model", "causal", ("finished/*",), _generate, 4),
    Target("classifier, half-way", "classification", ("halfway/*", "halfway/tokens/*", "halfway/tokens/*/*", "halfway/checkpoints/*/*"), _train("halfway"), 2),
    Target("classifier", "classification", ("finished/*",), _classify, 4),
    Target("Marian's vocabulary in a run", "marian", ("finished/tokenizer*", "finished/config.json"), _translate, 10),
    Target("a tokenizer.json in a run", "bert", ("finished/tokenizer*", "finished/config.json", "finished/model.safetensors"), _fill, 12),
    Target("an exact tokenizer.json in a run", "gpt2", ("finished/tokenizer*",), _generate, 4),
    Target("import of Marian", "marian", tuple(f"theirs/{name}" for name in _IMPORTED), _import("marian"), 16),
    Target("import of a pickle", "marian_pickled", ("theirs/pytorch_model.bin",), _import("marian"), 10, True),
    Target("import of BERT", "bert", tuple(f"theirs/{name}" for name in _IMPORTED), _import("bert"), 14),
    Target("import of GPT-2", "gpt2", tuple(f"theirs/{name}" for name in _IMPORTED), _import("gpt2"), 10),
    Target("recipe", "recipes", ("recipe.toml",), _recipe, 8, True),
    Target("text", "texts", ("a.txt", "b.txt"), _corpus, 2, True),
    Target("tsv, jsonl, labels", "texts", ("c.tsv", "c.jsonl", "labels.tsv"), _corpus, 3, True),
    Target("tmx", "texts", ("c.tmx",), _corpus, 4, True),
    Target("packed text", "texts", ("*.gz", "*.xz", "*.zst"), _corpus, 5, True),
)  # fmt: skip


def mutations_of(file: Path) -> dict[str, Mutation]:
    """The mutations that apply to a file of this name."""
    name = file.name
    if name in ("vocab.json", "manifest.json", "tokenizer.json") or name.endswith(".json"):
        return JSON
    if name.endswith(".jsonl"):
        return JSONL if name == "metrics.jsonl" else JSONL | TEXT
    if name.endswith(".safetensors"):
        return TENSORS
    if name.endswith(".toml"):
        return TOML
    if name.endswith(".npy"):
        return ARRAYS
    if name.endswith((".model", ".spm")):
        return JSON if file.read_bytes()[:1] == b"{" else PIECES
    if name.endswith(".journal"):
        return {"line with a valid checksum": _journal_line}
    return TMX if name.endswith(".tmx") else TEXT if name.endswith((".txt", ".tsv", ".html", ".md")) else {}


def _journal_line(content: bytes, draw: random.Random) -> bytes:
    """Other JSON in a line, behind its checksum."""
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    text = JSON[draw.choice(sorted(JSON))](lines[place][9:-1], draw).replace(b"\n", b" ")
    lines[place] = b"%08x %s\n" % (zlib.crc32(text), text)
    return b"".join(lines)


def make_case(original: Path, folder: Path, target: Target, draw: random.Random) -> Case:
    """Copy an original and damage one file of it."""
    copy_tree(original, folder)
    files = sorted(
        file for pattern in target.files for file in folder.glob(pattern) if file.is_file() and file.name != ".lock"
    )
    file = draw.choice(files)
    if draw.random() < 0.06:
        damage = _replace(file, folder, draw)
        return Case(target.kind, damage, file, target.command(folder, file), sealed=False, linked=True)
    before = file.read_bytes()
    if file.suffix in PACK and draw.random() < 0.6:
        damage, content = _packed(file, before, draw)
    elif file.suffix == ".bin" and draw.random() < 0.5:
        damage, content = _pickled(before, folder, draw)
    else:
        own = mutations_of(file)
        damages = own if own and draw.random() < 0.65 else BYTES
        damage = draw.choice(sorted(damages))
        try:
            content = damages[damage](before, draw)
        except (RecursionError, MemoryError):  # too deeply nested for the mutation itself
            damage, content = "truncate", BYTES["truncate"](before, draw)
    file.write_bytes(content)
    fixed = draw.random() < 0.75 and update_checksum(file)
    command = target.command(folder, file)
    read = command[0] != "train" or file.name != "model.safetensors"  # training does not read the weights
    guarded = not fixed and read and guarded_by_checksum(file) and content != before
    return Case(target.kind, damage + ", put right" * fixed, file, command, sealed=guarded, linked=False)


def copy_tree(original: Path, folder: Path) -> None:
    """Copy an original, and make commands name the files of the copy."""
    shutil.copytree(original, folder)
    command = folder / "command.json"
    if command.exists():
        here = command.read_text().replace(str(original), str(folder))
        command.write_text(here)
        # The settings contain the path of the text: with the path of the copy, it would be another run.
        for manifest in folder.glob("*/manifest.json"):
            manifest.write_text(manifest.read_text().replace(str(original), str(folder)))
            config = manifest.with_name("config.json")
            config.write_text(config.read_text().replace(str(original), str(folder)))
            update_checksum(config)


# -- updated checksums


def _manifest_of(file: Path) -> tuple[Path, str] | None:
    """The manifest that lists a file, and the file's name in it."""
    manifest = file.with_name("manifest.json")
    if file == manifest or not manifest.is_file():
        return None
    try:
        files = json.loads(manifest.read_bytes())["files"]
    except (ValueError, KeyError, TypeError):
        return None
    return (manifest, file.name) if file.name in files else None


def guarded_by_checksum(file: Path) -> bool:
    return (
        _manifest_of(file) is not None
        or (file.name == "model.safetensors" and file.parent.name == "finished")
        or file.suffix == ".npy"
    )


def update_checksum(file: Path) -> bool:
    """Update every checksum of a file to its content; return whether there was one."""
    content, done = file.read_bytes(), False
    if file.suffix == ".safetensors" and (place := _SEAL.search(content[: 1 << 20])):
        bare = content[: place.start(1)] + b"0" * 64 + content[place.end(1) :]
        file.write_bytes(
            content[: place.start(1)] + hashlib.sha256(bare).hexdigest().encode() + content[place.end(1) :]
        )
        done = True
    if found := _manifest_of(file):
        manifest, name = found
        values = json.loads(manifest.read_bytes())
        values["files"][name] = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
        manifest.write_text(json.dumps(values))
        done = True
    return done


# -- links and the like, packed files, pickles


def _replace(file: Path, folder: Path, draw: random.Random) -> str:
    """Replace a file by something else."""
    canary = folder.parent / "canary"
    links = {
        "link to a folder": canary,
        "link to nothing": canary / "made",
        "link to itself": file,
        "link to /dev/zero": Path("/dev/zero"),
    }
    fates = ["missing", "folder", "link out", *links]
    if not (folder / "a.txt").exists():  # a text may be a pipe, which its reader waits for
        fates += ["pipe", "folder is a link"]
    fate = draw.choice(fates)
    content = file.read_bytes()
    if fate == "folder is a link" and file.parent.parent != folder and file.parent != folder:
        shutil.move(file.parent, canary / "moved")
        file.parent.symlink_to(canary / "moved")
        return fate
    file.unlink()
    if fate == "folder":
        file.mkdir()
        (file / "x").write_text("x")
    elif fate == "link out":
        (canary / "victim").write_bytes(content)
        file.symlink_to(canary / "victim")
    elif fate in links:
        file.symlink_to(links[fate])
    elif fate == "pipe":
        os.mkfifo(file)
    return fate


_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".zst": zstd.decompress,
}


def _packed(file: Path, before: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Damage the content before it is compressed."""
    inner = Path(file.stem)
    text = _UNPACK[file.suffix](before)
    damages = BYTES | mutations_of(inner)
    damage = draw.choice(sorted(damages))
    return f"inside: {damage}", PACK[file.suffix](damages[damage](text, draw))


class _Hostile:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call = (call, arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def _pickled(before: bytes, folder: Path, draw: random.Random) -> tuple[str, bytes]:
    """A pickle that calls something or contains something else."""
    import torch

    victim = str(folder.parent / "canary" / "executed")
    weights = torch.load(io.BytesIO(before), weights_only=True)
    name = draw.choice(sorted(weights))
    old = weights[name]
    tensors = [
        old.half(),
        old.to(torch.complex64),
        old.int(),
        old.to_sparse(),
        old[:1],
        old * float("nan"),
        torch.empty(old.shape, device="meta"),
    ]
    values = [[], {"a": 1}, {1: old}, None, {"a": [old]}, old, *({**weights, name: other} for other in tensors)]
    made = io.BytesIO()
    match draw.randrange(3):
        case 0:
            return "pickle runs a command", pickle.dumps(_Hostile(os.system, f"touch {victim}"))
        case 1:
            torch.save({"a": _Hostile(open, victim, "w")}, made)
        case _:
            torch.save(draw.choice(values), made)
    return "pickle of something else", made.getvalue()

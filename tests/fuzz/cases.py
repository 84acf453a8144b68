"""Fuzz case number N: a file of an original, a mutation, whether the checksum is updated, and the command that reads it."""

# ruff: noqa: E501  (long tables of strange values)
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutations import ARRAYS, BYTES, JSON, JSONL, PIECES, TENSORS, TEXT, TMX, TOML, Mutation
from fuzz.originals import BULK, PACK
from system.commands import sets
from transduce.data.lines import zstd

Command = Callable[[Path, Path], list[str]]
"""Makes the arguments of a command from the case's folder and the damaged file."""


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


def _run(*words: str) -> Command:
    """A command with these words, in which {folder}, {parent} and {file} are replaced."""
    return lambda folder, file: [word.format(folder=folder, parent=folder.parent, file=file) for word in words]


_TRANSLATE = _run("translate", "{folder}/finished", "{parent}/in.txt", "--beam", "1", "--max-length", "3")
_BULK = _run(*BULK, "{folder}/finished", "{folder}/lines.txt", "--output-dir", "{folder}/bulk")
_FILL = _run("fill", "{folder}/finished", "the cat <mask> on the mat")
_GENERATE = _run("generate", "{folder}/finished", "--prompt", "the cat", "--max-length", "3")
_CLASSIFY = _run("classify", "{folder}/finished", "{parent}/in.txt")
_IMPORT = _run("import", "{folder}/theirs", "{folder}/made_now")
_RECIPE = _run("train", "{file}", "--dry-run", "--run", "{folder}/none")


def _train(state: str) -> Command:
    def command(folder: Path, file: Path) -> list[str]:
        return [*json.loads((folder / "command.json").read_text()), "--run", str(folder / state)]

    return command


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
    Target("run: manifest", "translation", ("finished/manifest.json",), _TRANSLATE, 12, True),
    Target("run: config", "translation", ("finished/config.json",), _TRANSLATE, 14, True),
    Target("run: SentencePiece", "translation", ("finished/tokenizer.*.model",), _TRANSLATE, 18, True),
    Target("run: weights", "translation", ("finished/model.safetensors",), _TRANSLATE, 16, True),
    Target("bulk translation", "translation", ("bulk/.transduce/*",), _BULK, 8, True),
    Target("run: records", "translation", tuple(f"finished/{name}" for name in ("metrics.jsonl", "*.json", "report.html", "README.md", "recipe.toml", "model.safetensors")), _train("finished"), 8, True),
    Target("run: half-way", "translation", ("halfway/*",), _train("halfway"), 2, True),
    Target("run: checkpoint", "translation", ("halfway/checkpoints/*/*",), _train("halfway"), 5, True),
    Target("run: encoded text", "translation", ("halfway/tokens/*.json", "halfway/tokens/*/*"), _train("halfway"), 5, True),
    Target("language model, half-way", "causal", ("halfway/*", "halfway/tokens/*", "halfway/tokens/*/*", "halfway/checkpoints/*/*"), _train("halfway"), 2),
    Target("language model", "causal", ("finished/*",), _GENERATE, 4),
    Target("classifier, half-way", "classification", ("halfway/*", "halfway/tokens/*", "halfway/tokens/*/*", "halfway/checkpoints/*/*"), _train("halfway"), 2),
    Target("classifier", "classification", ("finished/*",), _CLASSIFY, 4),
    Target("Marian's vocabulary in a run", "marian", ("finished/tokenizer*", "finished/config.json"), _TRANSLATE, 10),
    Target("a tokenizer.json in a run", "bert", ("finished/tokenizer*", "finished/config.json", "finished/model.safetensors"), _FILL, 12),
    Target("an exact tokenizer.json in a run", "gpt2", ("finished/tokenizer*",), _GENERATE, 4),
    Target("import of Marian", "marian", tuple(f"theirs/{name}" for name in _IMPORTED), _IMPORT, 16),
    Target("import of Marian's files", "marian_files", ("theirs/*",), _IMPORT, 10),
    Target("import of CTranslate2", "ctranslate2", ("theirs/*",), _IMPORT, 10),
    Target("import of BERT", "bert", tuple(f"theirs/{name}" for name in _IMPORTED), _IMPORT, 14),
    Target("import of GPT-2", "gpt2", tuple(f"theirs/{name}" for name in _IMPORTED), _IMPORT, 10),
    Target("recipe", "recipes", ("recipe.toml",), _RECIPE, 8, True),
    Target("text", "texts", ("a.txt", "b.txt"), _corpus, 2, True),
    Target("tsv, jsonl, labels", "texts", ("c.tsv", "c.jsonl", "labels.tsv"), _corpus, 3, True),
    Target("tmx", "texts", ("c.tmx",), _corpus, 4, True),
    Target("packed text", "texts", ("*.gz", "*.xz", "*.zst"), _corpus, 5, True),
)  # fmt: skip


_BY_SUFFIX: dict[str, dict[str, Mutation]] = {
    **{".json": JSON, ".jsonl": JSONL | TEXT, ".safetensors": TENSORS, ".toml": TOML, ".npy": ARRAYS, ".tmx": TMX},
    **{".journal": JSONL, ".txt": TEXT, ".tsv": TEXT, ".html": TEXT, ".md": TEXT},
}


def mutations_of(file: Path) -> dict[str, Mutation]:
    """The mutations that apply to a file of this name."""
    if file.name == "metrics.jsonl":
        return JSONL
    if file.suffix in (".model", ".spm"):
        return JSON if file.read_bytes()[:1] == b"{" else PIECES
    return _BY_SUFFIX.get(file.suffix, {})


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
    return _manifest_of(file) is not None or file.suffix == ".npy"


def update_checksum(file: Path) -> bool:
    """Update the checksum of a file to its content; return whether there was one."""
    if not (listed := _manifest_of(file)):
        return False
    manifest, name = listed
    values = json.loads(manifest.read_bytes())
    values["files"][name] = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
    manifest.write_text(json.dumps(values))
    return True


# -- links and the like, packed files


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

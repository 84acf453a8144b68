"""Import of damaged and hostile folders by the command: one line, exit code 2, no code run, no files left."""

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marians import change, make_folder, make_run
from system.commands import Done, transduce
from transduce.logging import escape

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import berts

    path = tmp_path_factory.mktemp("folders")
    made = {"marian": make_folder(path / "marian", make_run(path / "run"))}
    made["bert"] = berts.make_folder(path / "bert", "BertForMaskedLM", seed=3)
    config = transformers.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    berts.randomize(transformers.GPT2LMHeadModel(config), 1).save_pretrained(path / "gpt2")
    pieces = ["<|endoftext|>", *(chr(0x100 + i) for i in range(39))]
    (path / "gpt2" / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (path / "gpt2" / "merges.txt").write_text("#version: 0.2\n")
    return {**made, "gpt2": path / "gpt2"}


@pytest.fixture
def place(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a copy of each model; a file `canary` in its parent means that code was run."""
    for kind, path in folders.items():
        shutil.copytree(path, tmp_path / "work" / kind)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@contextmanager
def memory(more: int) -> Iterator[None]:
    """Limit the memory of this process to `more` bytes above its present size."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(place: Path, kind: str, *parts: str) -> str:
    with memory(1 << 31):
        done = transduce("import", kind, "run")
    return _refused(place, done, *parts)


def _refused(place: Path, done: Done, *parts: str) -> str:
    assert done.code == 2, done
    assert done.err.startswith("transduce: error: ") and done.err.count("\n") == 1, done.err
    assert escape(done.err) == done.err
    assert sorted(path.name for path in Path().iterdir()) == ["bert", "gpt2", "marian"]
    assert [path.name for path in place.iterdir()] == ["work"], "something was run or left"
    for part in parts:
        assert part in done.err, done.err
    return done.err


def test_undamaged_folders_are_imported(place: Path) -> None:
    """The tests below depend on this."""
    for kind in ("marian", "bert", "gpt2"):
        done = transduce("import", kind, f"runs/{kind}")
        assert done.code == 0, done.err


def test_every_unexpected_tensor_is_listed(place: Path) -> None:
    tensors = load_file("bert/model.safetensors")
    tensors["bert.encoder.layer.7.output.dense.bias"] = torch.zeros(2)
    tensors["evil\nname\x1b[31m" + "x" * 1000] = torch.zeros(1)
    del tensors["bert.embeddings.LayerNorm.bias"], tensors["bert.embeddings.LayerNorm.weight"]
    tensors["cls.predictions.bias"] = torch.zeros(3)
    save_file(tensors, "bert/model.safetensors")
    message = refused(
        place, "bert", "2 missing", "LayerNorm.bias", "LayerNorm.weight", "1 misshapen", "is [3]", "2 unexpected"
    )
    assert "layer.7" in message and len(message) < 2000


# Weights as safetensors; damaged headers are in tests/unit/runs/test_tensors.py


def test_eight_bit_numbers_are_refused_or_read(place: Path) -> None:
    tensors = load_file("marian/model.safetensors")
    tensors["model.shared.weight"] = tensors["model.shared.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, "marian/model.safetensors")
    refused(place, "marian", "model.shared.weight")


# Weights as pickles


class Calls:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, what: Callable[..., Any], *given: Any) -> None:
        self.call = what, given

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _evil(canary: Path) -> dict[str, Callable[[Path], object]]:
    call = Calls(os.system, f"touch {canary}")
    return {
        "zip": lambda path: torch.save({"model.shared.weight": torch.zeros(2, 2), "x": call}, path),
        "old format": lambda path: torch.save({"x": call}, path, _use_new_zipfile_serialization=False),
        "plain pickle": lambda path: path.write_bytes(pickle.dumps(call)),
    }


@pytest.mark.parametrize("name", _evil(Path("x")))
def test_pickles_with_code_run_nothing(place: Path, name: str) -> None:
    path = Path("marian/pytorch_model.bin")
    Path("marian/model.safetensors").unlink()
    _evil(place / "canary")[name](path)
    refused(place, "marian", "pytorch_model.bin is ")
    if name != "plain pickle":  # an ordinary reader runs it
        torch.load(path, weights_only=False)
        assert (place / "canary").exists()


NO_WEIGHTS: dict[str, Callable[[Path], object]] = {
    "a sparse tensor": lambda path: torch.save(
        {"a": torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), (1 << 20, 1 << 20))}, path
    ),
    "no memory at all": lambda path: torch.save(
        {"model.shared.weight": torch.empty(1 << 20, 1 << 20, device="meta")}, path
    ),
    "numbers for names": lambda path: torch.save({1: torch.zeros(1)}, path),
    "not named": lambda path: torch.save([torch.zeros(1)], path),
    "quantized": lambda path: torch.save({"a": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)}, path),
    "nested": lambda path: torch.save({"a": {"b": torch.zeros(1)}}, path),
    "a script": lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path),
    "empty": lambda path: path.write_bytes(b""),
    "a zip without its end": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("harm", NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_pickles_without_weights_are_refused(place: Path, harm: Callable[[Path], object]) -> None:
    Path("bert/model.safetensors").unlink()
    harm(Path("bert/pytorch_model.bin"))
    refused(place, "bert", "pytorch_model.bin is ")


# Settings


HUGE = 10**12


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("marian", {"vocab_size": HUGE, "decoder_vocab_size": HUGE}, "vocab_size = 1000000000000 is not a size"),
        ("marian", {"encoder_layers": HUGE}, "encoder_layers = 1000000000000 is not a size from 1 to 1,024"),
        ("marian", {"vocab_size": 10**400}, "is not a size"),
        ("marian", {"pad_token_id": HUGE, "decoder_start_token_id": HUGE}, "need three ids within"),
        ("marian", {"activation_function": ["relu"]}, "supported: relu"),
        ("bert", {"vocab_size": 1 << 24}, "should be [16777216, "),
        ("bert", {"type_vocab_size": HUGE}, "type_vocab_size = 1000000000000 is not a size"),
        ("bert", {"hidden_size": 16.0}, "hidden_size = 16.0 is not a size"),
        ("bert", {"hidden_act": {"a": 1}}, "supported: relu"),
        ("bert", {"layer_norm_eps": "small"}, "norm_eps"),
        ("gpt2", {"n_layer": HUGE}, "n_layer = 1000000000000 is not a size"),
        ("gpt2", {"n_inner": "a"}, "n_inner = 'a' is not a size"),
        ("gpt2", {"tie_word_embeddings": False}, "missing: lm_head.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_absurd_sizes_are_refused(place: Path, kind: str, values: dict[str, Any], said: str) -> None:
    change(Path(kind) / "config.json", **values)
    refused(place, kind, said)


def test_absurd_labels_are_refused(place: Path) -> None:
    import berts

    shutil.rmtree("bert")
    berts.make_folder(Path("bert"), "BertForSequenceClassification", seed=1, num_labels=3)
    for values in ({"id2label": None, "num_labels": HUGE}, {"id2label": {str(i): "x" for i in range(4)}}):
        change(Path("bert/config.json"), **values)
        refused(place, "bert", "classifier.weight is [3, ")
    change(Path("bert/config.json"), id2label=[1], problem_type="multi_label_classification")
    refused(place, "bert", "problem_type = 'multi_label_classification'; supported: single_label")


def test_broken_json(place: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "vocab.json"):
        path = Path("marian") / name
        kept = path.read_bytes()
        for content in (b"\xff", b"[" * 100_000):
            path.write_bytes(content)
            refused(place, "marian", name)
        path.write_bytes(kept)


FILES = (
    *(("marian", name) for name in ("config.json", "vocab.json", "source.spm", "model.safetensors")),
    ("bert", "tokenizer.json"),
)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a loop", "gone"])
def test_pipes_folders_and_devices_are_refused(place: Path, kind: str) -> None:
    for folder, name in FILES:
        path = Path(folder) / name
        kept = path.read_bytes()
        path.unlink()
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        elif kind != "gone":
            path.symlink_to({"a device": "/dev/zero", "a loop": path.name}[kind])
        if (folder, kind) not in (("bert", "a loop"), ("bert", "gone")):  # there the older file is read
            refused(place, folder, name)
        shutil.rmtree(path) if kind == "a folder" else path.unlink(missing_ok=True)
        path.write_bytes(kept)


def test_links_to_files_are_followed(place: Path) -> None:
    """As in the cache of huggingface_hub."""
    for path in list(Path("marian").iterdir()):
        kept = place / "work" / "bert" / f"blob-{path.name}"
        path.rename(kept)
        path.symlink_to(kept)
    assert transduce("import", "marian", "runs/x").code == 0


def test_file_names_in_settings_are_ignored(place: Path) -> None:
    (place / "secret").write_text("secret")
    path = "../../secret"
    change(
        Path("marian/tokenizer_config.json"),
        source_lang=path,
        target_lang="/etc/passwd\n# x",
        tokenizer_file=path,
        vocab=path,
        source_spm=path,
        auto_map={"AutoTokenizer": [path, None]},
    )
    change(Path("marian/config.json"), _name_or_path=path, auto_map={"AutoModel": f"{path}--x.py"})
    odd = Path('a"b\nc`# x')
    shutil.copytree("marian", odd)
    before = sorted(place.rglob("*"))
    assert transduce("import", odd, "run").code == 0
    made = [p for p in sorted(place.rglob("*")) if p not in before]
    assert all((place / "work" / "run") in (p, *p.parents) for p in made)
    assert not any(b"secret\n" in p.read_bytes() or p.read_bytes() == b"secret" for p in made if p.is_file())
    assert transduce("translate", "run", "marian/vocab.json", "--max-length", "2", "--beam", "1").code == 0
    assert "\n# x" not in Path("run/README.md").read_text()


# Vocabularies


def _tokenizer(**parts: Any) -> None:
    change(Path("bert/tokenizer.json"), **parts)


TOKENIZERS: dict[str, tuple[Callable[[], object], str]] = {
    "normalizers that are a number": (
        lambda: _tokenizer(normalizer={"type": "Sequence", "normalizers": 5}),
        "cannot be used",
    ),
    "a decoder that is a list": (lambda: _tokenizer(decoder=[[]]), "cannot be used"),
    "no model": (lambda: _tokenizer(model=None), "cannot be used"),
    "two pieces with one id": (lambda: _more_pieces({"zz": 9}), "two pieces have one id"),
    "a piece too many": (lambda: _more_pieces({"zz": 32}), "ids outside 0 .. 31, the rows of the embedding"),
    "an id far off": (lambda: _more_pieces({"zz": 4_000_000_000}), "one id per piece"),
    "without its special ones": (lambda: _pieces({f"w{i}": i for i in range(32)}), "[UNK]"),
    "cut by chance": (
        lambda: _tokenizer(model=json.loads(Path("bert/tokenizer.json").read_text())["model"] | {"dropout": 0.9}),
        "its model has dropout 0.9: ",
    ),
    "without its unknown": (
        lambda: _tokenizer(model=json.loads(Path("bert/tokenizer.json").read_text())["model"] | {"unk_token": "[no]"}),
        "cannot be used",
    ),
}


def _pieces(vocab: dict[str, int]) -> None:
    model = json.loads(Path("bert/tokenizer.json").read_text())["model"]
    _tokenizer(model=model | {"vocab": vocab}, added_tokens=[])


def _more_pieces(more: dict[str, int]) -> None:
    model = json.loads(Path("bert/tokenizer.json").read_text())["model"]
    _tokenizer(model=model | {"vocab": model["vocab"] | more})


@pytest.mark.parametrize(("harm", "said"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_hostile_tokenizers(place: Path, harm: Callable[[], object], said: str) -> None:
    harm()
    refused(place, "bert", said)


def test_vocabulary_of_another_size_is_refused(place: Path) -> None:
    pieces = json.loads(Path("marian/vocab.json").read_text())
    n = len(pieces)
    longer = pieces | {"zz": n}
    Path("marian/vocab.json").write_text(json.dumps(longer))
    refused(place, "marian", f"ids outside 0 .. {n - 1}")
    Path("marian/vocab.json").write_text(json.dumps({piece: i for piece, i in pieces.items() if i < n - 2}))
    message = refused(place, "marian")
    assert "rows of the embedding" in message or "the embedding has" in message or "need three ids" in message
    Path("bert/tokenizer.json").unlink()
    tensors = load_file("bert/model.safetensors")
    for name, tensor in tensors.items():
        if "word_embeddings" in name or name == "cls.predictions.bias":
            tensors[name] = torch.cat([tensor, tensor[:3]])
    save_file(tensors, "bert/model.safetensors")
    change(Path("bert/config.json"), vocab_size=35)
    refused(place, "bert", "has 32 pieces, and the embedding has 35 rows")


@pytest.mark.parametrize("key", ["max_length", "num_beams", "length_penalty"])
def test_invalid_search_settings_are_refused(place: Path, key: str) -> None:
    change(Path("marian/generation_config.json"), **{key: [1]})
    refused(place, "marian", f"{key} = [1] is not a number")
    if key != "length_penalty":
        for value in (0, -1):
            change(Path("marian/generation_config.json"), **{key: value})
            refused(place, "marian", f"{key} = {value}; at least 1 is needed")


def test_ignored_search_rules_are_reported(place: Path) -> None:
    assert "not taken over" not in transduce("import", "marian", "run").out
    rules = {"repetition_penalty": 1.3, "min_length": 3, "bad_words_ids": [[7]], "forced_eos_token_id": 9}
    change(Path("marian/generation_config.json"), **rules)
    out = transduce("import", "marian", "run2").out
    (line,) = [line for line in out.splitlines() if "not taken over" in line]
    assert all(f"{key} = {value}" in line for key, value in rules.items())


def test_special_ids_that_contradict_the_vocabulary_are_refused_or_reported(place: Path) -> None:
    change(Path("bert/config.json"), pad_token_id=7)
    refused(place, "bert", "pad_token_id = 7, and [PAD] of the vocabulary is 0")
    for value in (5, 99999, [1, 2]):
        change(Path("gpt2/config.json"), eos_token_id=value)
        done = transduce("import", "gpt2", f"run-{value}")
        assert f"eos_token_id = {value} in config.json is not followed" in done.out

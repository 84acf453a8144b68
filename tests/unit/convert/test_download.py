"""Import of a model by its name on the Hub, from a local server: what is requested, and every kind of error."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

from hub_server import COMMIT, Hub
from marians import make_folder, make_run, state_of
from system.commands import Done, transduce
from transduce.convert.download import hub_name

pytestmark = pytest.mark.loopback  # its own server, or its own processes


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("origin")
    folder = make_folder(path / "theirs", make_run(path / "run"))
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    (folder / "extra.py").write_text("raise SystemExit('never run')")
    return folder


@pytest.fixture
def hub(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = Path(shutil.copytree(origin, tmp_path / "served"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between two attempts
    with Hub(folder) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        yield found


def import_model(hub: Hub, *more: object) -> Done:
    return transduce("import", "marian", hub.name, "run", *more)


def refused(done: Done, *parts: str) -> None:
    """Check for one line, exit code 2 and no files left, neither next to the run nor in the library's cache."""
    assert done.code == 2, done
    assert done.err.startswith("transduce: error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err, done.err
    assert not list(Path().iterdir())
    cache = Path("../cache")
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_download_and_folder_give_the_same_run(hub: Hub) -> None:
    done = import_model(hub)
    assert done.code == 0, done.err
    assert f"downloaded: some-one/a-model at commit {COMMIT}" in done.out
    assert [path.name for path in Path().iterdir()] == ["run"]
    assert hub.downloaded[0] == "config.json" and hub.downloaded[-1] == "model.safetensors"
    assert sorted(hub.downloaded) == sorted(
        ["config.json", "generation_config.json", "model.safetensors", "source.spm", "target.spm",
         "tokenizer_config.json", "vocab.json"]
    )  # fmt: skip
    assert ("HEAD", f"some-one/a-model/resolve/{COMMIT}/config.json") in hub.asked
    transduce("import", "marian", hub.folder, "local")
    there, here = (state_of(Path(name)) for name in ("run", "local"))
    assert all(torch.equal(there[name], here[name]) for name in there)
    card = Path("run/README.md").read_text()
    assert f"`some-one/a-model` on {hub.endpoint}, at commit `{COMMIT}`" in card
    assert "a-model" in card.splitlines()[0]


def test_a_revision(hub: Hub) -> None:
    assert import_model(hub, "--revision", "v1").code == 0
    assert ("GET", f"api/models/{hub.name}/revision/v1") in hub.asked
    shutil.rmtree("run")
    refused(import_model(hub, "--revision", "v2"), "some-one/a-model has no revision v2")


def test_pickled_weights_only_without_safetensors(hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    refused(import_model(hub), "missing")  # it contains another model
    assert hub.downloaded[-1] == "pytorch_model.bin"


def test_import_of_a_folder_uses_no_network(hub: Hub) -> None:
    folder = Path("some-one/a-model")
    shutil.copytree(hub.folder, folder)
    assert import_model(hub).code == 0 and not hub.asked
    done = transduce("import", "marian", folder, "other", "--revision", "v1")
    assert done.code == 2 and "--revision v1 needs a name on the Hub" in done.err
    done = transduce("import", "marian", "some-one/b-model", "other")
    assert done.code == 2 and "the folder some-one exists" in done.err
    done = transduce("import", "gpt2", "gpt2", "other")
    assert done.code == 2 and "named OWNER/NAME, such as openai-community/gpt2" in done.err
    assert not hub.asked


def _no_config(hub: Hub) -> None:
    (hub.folder / "config.json").unlink()


def _no_weights(hub: Hub) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (hub.folder / name).unlink()


def _another_architecture(hub: Hub) -> None:
    (hub.folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))


def _no_sha(hub: Hub) -> None:
    hub.siblings = lambda: [{"rfilename": 7}]  # type: ignore[method-assign, list-item, return-value]


WRONG: dict[str, tuple[Callable[[Hub], object], str]] = {
    "no such model": (lambda hub: setattr(hub, "name", "some-one/else"), "some-one/a-model .*no such model on"),
    "private": (
        lambda hub: setattr(hub, "door", 401),
        "no such model on .* log in with `hf auth login`",
    ),
    "gated": (lambda hub: setattr(hub, "door", 403), "gated: accept its terms at http://.*/some-one/a-model"),
    "down": (lambda hub: setattr(hub, "door", 500), "HTTP 500"),
    "no config.json": (_no_config, "has no config.json"),
    "no weights": (_no_weights, "has neither model.safetensors nor pytorch_model.bin"),
    "another architecture": (_another_architecture, r"T5Model \(model_type t5\); supported here: .*MarianMTModel"),
    "nonsense listed": (_no_sha, "has no config.json"),
    "breaks for good": (
        lambda hub: hub.breaks.update({"model.safetensors": 0}) or setattr(hub, "times", 99),
        "cannot download some-one/a-model from .*try again",
    ),
    "smaller than announced": (
        lambda hub: hub.announced.update({"vocab.json": 10**6}),
        "vocab.json|cannot download",
    ),
    "larger than announced": (
        lambda hub: hub.announced.update({"source.spm": 10}),
        "source.spm exceeds .* of 10 ",
    ),
    "without end": (lambda hub: setattr(hub, "endless", ("target.spm",)), "target.spm exceeds"),
    "another size at the door": (lambda hub: hub.headed.update({"model.safetensors": 99}), "model.safetensors"),
    "too large for any disk": (
        lambda hub: hub.announced.update({"model.safetensors": 10**15}),
        "1,000,000,000,000,000 bytes are to be downloaded|1,000,000,0.* are free",
    ),
    "too large for what it is": (lambda hub: hub.announced.update({"vocab.json": 10**12}), "at most 67,108,864"),
    "another content": (
        lambda hub: hub.forged.update(
            {"model.safetensors": bytes(len((hub.folder / "model.safetensors").read_bytes()))}
        ),
        "model.safetensors does not match its sha256",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_every_error_is_one_line_and_leaves_no_files(hub: Hub, wrong: Callable[[Hub], object], said: str) -> None:
    asked = hub.name
    wrong(hub)
    done = transduce("import", "marian", asked, "run")
    refused(done)
    assert re.search(said, done.err), done.err
    if said.startswith("T5"):
        assert hub.downloaded == ["config.json"], "nothing else is downloaded"


def test_broken_download_is_resumed(hub: Hub) -> None:
    hub.breaks, hub.times = {"model.safetensors": 5000}, 2
    done = import_model(hub)
    assert done.code == 0, done.err
    assert hub.downloaded.count("model.safetensors") == 3


def test_no_server_and_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        refused(import_model(hub), "cannot download some-one/a-model from http://127", "hf download some-one/a-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(import_model(hub), "HF_HUB_OFFLINE forbids")


def test_without_the_library(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(import_model(hub), "pip install transduce[interchange]")
    assert not hub.asked


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Helsinki-NLP/opus-mt-en-de", True), ("a/b", True), ("gpt2", False), ("./a/b", False), ("/a/b", False),
        ("../a", False), ("a/b/c", False), ("a/..", False), ("~/a", False), ("a/b c", False), ("", False),
        ("http://a/b", False), ("a/b\n", False), ("..a/b", False),
    ],
)  # fmt: skip
def test_names_on_the_hub(path: str, name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (hub_name(path) is not None) == name

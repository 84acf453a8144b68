"""Import of a model by its name on the Hub, from a local server: what is requested, and every kind of error."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

from hub_server import COMMIT, Hub, serving
from marians import make_folder, make_run, state_of
from system.commands import Done, transduce
from transduce.convert.exporting import export_run
from transduce.runs.hub import hub_name

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
    with serving(folder, tmp_path / "cache", monkeypatch) as found:
        yield found


def import_model(hub: Hub, *more: object, run: str = "run") -> Done:
    return transduce("import", hub.name, run, *more)


def refused(done: Done, *parts: str) -> None:
    """Check for one line, exit code 2 and no run."""
    assert done.code == 2, done
    assert done.err.startswith("transduce: error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err, done.err
    assert not list(Path().iterdir())


def test_download_and_folder_give_the_same_run(hub: Hub) -> None:
    done = import_model(hub)
    assert done.code == 0, done.err
    assert f"downloaded: some-one/a-model at commit {COMMIT}" in done.out
    assert [path.name for path in Path().iterdir()] == ["run"]
    assert hub.downloaded[0] == "config.json"
    (snapshot,) = Path("../cache").glob("*/snapshots/*")
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(
        ["config.json", "generation_config.json", "model.safetensors", "source.spm", "target.spm",
         "tokenizer_config.json", "vocab.json"]
    )  # fmt: skip
    transduce("import", hub.folder, "local")
    there, here = (state_of(Path(name)) for name in ("run", "local"))
    assert all(torch.equal(there[name], here[name]) for name in there)
    card = Path("run/README.md").read_text()
    assert card.startswith("# a-model\n")
    assert f"`some-one/a-model` on the Hugging Face Hub, at commit `{COMMIT}`" in card
    hub.door = 500  # from here on, the cache has all files
    assert import_model(hub, "--revision", COMMIT, run="again").code == 0


def test_a_revision(hub: Hub) -> None:
    assert import_model(hub, "--revision", "v1").code == 0
    assert ("GET", f"api/models/{hub.name}/revision/v1") in hub.asked
    shutil.rmtree("run")
    refused(import_model(hub, "--revision", "v2"), "Revision Not Found")


def test_import_of_a_folder_uses_no_network(hub: Hub) -> None:
    folder = Path("some-one/a-model")
    shutil.copytree(hub.folder, folder)
    assert import_model(hub).code == 0 and not hub.asked
    done = transduce("import", folder, "other", "--revision", "v1")
    assert done.code == 2 and "revision = 'v1' needs a name on the Hub" in done.err
    done = transduce("import", "some-one/b-model", "other")
    assert done.code == 2 and "the folder some-one exists" in done.err
    done = transduce("import", "gpt2", "other")
    assert done.code == 2 and "named OWNER/NAME, such as openai-community/gpt2" in done.err
    assert not hub.asked


def _another_architecture(hub: Hub) -> None:
    (hub.folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))


WRONG: dict[str, tuple[Callable[[Hub], object], str]] = {
    "no such model": (lambda hub: setattr(hub, "name", "some-one/else"), "Repository Not Found"),
    "private": (lambda hub: setattr(hub, "door", 401), "Repository Not Found .*private or gated"),
    "gated": (lambda hub: setattr(hub, "door", 403), "gated repo for url http://.*/some-one/a-model"),
    "down": (lambda hub: setattr(hub, "door", 500), "does not provide this model: .*500"),
    "no config.json": (lambda hub: (hub.folder / "config.json").unlink(), "has no config.json"),
    "no safetensors": (
        lambda hub: (hub.folder / "model.safetensors").unlink(),
        "has no model.safetensors, .*refs/pr/NUMBER.*hf download some-one/a-model",
    ),
    "another architecture": (_another_architecture, r"T5Model \(model_type t5\); supported here: .*MarianMTModel"),
    "breaks for good": (
        lambda hub: hub.breaks.update({"model.safetensors": 0}) or setattr(hub, "times", 99),
        "does not provide this model: .*try again",
    ),
    "another size than listed": (
        lambda hub: hub.forged.update({"model.safetensors": b"short"}),
        "does not provide this model: .*try again",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_every_error_is_one_line_and_leaves_no_run(hub: Hub, wrong: Callable[[Hub], object], message: str) -> None:
    asked = hub.name
    wrong(hub)
    done = transduce("import", asked, "run")
    refused(done)
    assert re.search(message, done.err), done.err
    assert "pytorch_model.bin" not in hub.downloaded
    if message.startswith("T5"):
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
        refused(import_model(hub), "http://127", "does not provide this model", "hf download some-one/a-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(import_model(hub), "HF_HUB_OFFLINE")


def test_without_the_library(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(import_model(hub), "pip install 'transduce[hub]'")
    assert not hub.asked


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Helsinki-NLP/opus-mt-en-de", True), ("a/b", True), ("gpt2", False), ("./a/b", False), ("/a/b", False),
        ("../a", False), ("a/b/c", False), ("a/..", False), ("~/a", False), ("a/b c", False), ("", False),
        ("http://a/b", False), ("a/b\n", False), ("..a/b", False), ("runs/x", False), ("runs-of/x", True),
    ],
)  # fmt: skip
def test_names_on_the_hub(path: str, name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (hub_name(path) is not None) == name


def test_models_of_ctranslate2_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    theirs = tmp_path / "ctranslate2"
    list(export_run(make_run(tmp_path / "made"), "ctranslate2", theirs))
    (theirs / "extra.py").write_text("raise SystemExit('never run')")
    hub.folder = theirs
    done = import_model(hub)
    assert done.code == 0, done.err
    assert "found: a translator of CTranslate2" in done.out and "checked: log-probabilities" in done.out
    assert {"config.json", "model.bin"} <= {*hub.downloaded} and "extra.py" not in hub.downloaded

"""Run folders on the Hub, from a local server: published, loaded by name, and every kind of error."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import ModelCard, constants

from hub_server import COMMIT, Hub, serving
from marians import LINES, MODEL, make_folder, tokenizers, write_run
from oracle.adapter import fitting
from system.commands import Done, succeed, transduce
from transduce import Generator, MaskFiller, TextClassifier, Translator, push_to_hub
from transduce.errors import RunFolderError, SettingsError, UserError
from transduce.evaluation.report import write_card, write_report
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import verify_files

pytestmark = pytest.mark.loopback

NAME = "some-one/a-model"
MODEL_FILES = {"README.md", "config.json", "manifest.json", "model.safetensors", "recipe.toml", "tokenizer.model"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a model card, a report and a checkpoint."""
    path = tmp_path_factory.mktemp("original") / "run"
    model = fitting(**{**MODEL, "residual": "post"}).model_dump(exclude_unset=True)
    values = {"name": "toy", "model": model, "data": {"src_lang": "en", "tgt_lang": "de-AT"}}
    write_run(path, values, tokenizers(), seed=1)
    with RunFolder.open_locked(path) as folder:
        folder.write_record("data.json", {"fingerprint": "0"})
        write_report(folder)
        write_card(folder)
    (path / "checkpoints" / "u00000001").mkdir(parents=True)
    (path / "checkpoints" / "u00000001" / "training.safetensors").write_bytes(b"large")
    (path / "notes.txt").write_text("private")
    return path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("here", "served"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with serving(tmp_path / "served", tmp_path / "cache", monkeypatch) as hub:
        yield hub


def served(hub: Hub) -> set[str]:
    return {path.name for path in hub.folder.iterdir()}


def refused(done: Done, *parts: str) -> None:
    """Check for one line and exit code 2."""
    assert done.code == 2, done
    assert done.err.startswith("transduce: error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert re.search(part, done.err), done.err


def test_published_run_is_loaded_by_its_name(hub: Hub, run: Path) -> None:
    done = succeed("push", run, NAME)
    assert "model.safetensors: " in done.out and done.out.endswith(f"published: {NAME}\n")
    assert served(hub) == MODEL_FILES
    hub.asked.clear()
    (hub.folder / "pytorch_model.bin").write_bytes(b"pickled")
    translator, local = Translator.load(NAME), Translator.load(run)
    assert translator.translate("a man reads").ids == local.translate("a man reads").ids
    assert set(hub.downloaded) == MODEL_FILES - {"recipe.toml"} and hub.downloaded[0] == "manifest.json"
    (snapshot,) = Path("../cache").glob("*/snapshots/*")
    assert snapshot.name == COMMIT
    assert {file.name: file.status for file in verify_files(snapshot)} == dict.fromkeys(
        MODEL_FILES - {"recipe.toml"}, "ok"
    )
    hub.door = 500  # from here on, the cache has all files
    assert [Translator.load([NAME, run]).translate("a man reads").text] == [local.translate("a man reads").text]


def test_commands_take_the_name_and_say_so(hub: Hub, run: Path) -> None:
    push_to_hub(run, NAME)
    done = succeed("translate", NAME, "a man reads")
    assert done.out == succeed("translate", run, "a man reads").out
    assert done.err.startswith(f"{NAME}: commit {COMMIT} on the Hugging Face Hub\n")
    assert succeed("verify", NAME).out.endswith("match their checksums\n")
    succeed("translate", run, "a man reads", "--ensemble", NAME, says=[f"{NAME}: commit"])
    text = ("--src", "text", "--tgt", "text", "--set", "training.max_updates=1")
    Path("text").write_text("\n".join(LINES))
    succeed("train", "--from", NAME, *text, "--run", "tuned", says=[f"{NAME}: commit"])
    for path in ("text", "tuned"):
        Path(path).rename(f"../{path}")
    assert not list(Path().iterdir())


def test_a_folder_of_that_name_is_used_without_the_network(hub: Hub, run: Path) -> None:
    shutil.copytree(run, NAME)
    assert Translator.load(NAME).translate("a man reads").text
    succeed("translate", NAME, "a man reads")
    refused(transduce("translate", "some-one/b-model", "a man reads"), "there is no run folder some-one/b-model")
    for missing in ("./b/c", "runs/x"):
        refused(transduce("translate", missing, "a man reads"), "there is no run folder (b/c|runs/x); check its path")
    with pytest.raises(RunFolderError, match="there is no run folder b/c"):
        Translator.load(Path("b/c"))
    assert not hub.asked


def test_card_has_metadata_and_no_broken_links(hub: Hub, run: Path) -> None:
    push_to_hub(run, NAME, license="cc-by-4.0")
    text = (hub.folder / "README.md").read_text()
    assert ModelCard(text).data.to_dict() == {
        "language": ["de", "en"], "library_name": "transduce", "pipeline_tag": "translation", "license": "cc-by-4.0",
    }  # fmt: skip
    assert f"transduce translate {NAME} < in.txt" in text
    assert all((hub.folder / link).exists() for link in re.findall(r"\]\((\S+?)\)", text))
    assert "THIS_FOLDER" in (run / "README.md").read_text(), "the run's own card is unchanged"


def test_metadata_of_the_author_stay(hub: Hub, run: Path) -> None:
    (run / "README.md").write_text("---\nlicense: mit\nlanguage: gsw\ntags: [mine]\n---\n# Mine\n")
    push_to_hub(run, NAME)
    card = ModelCard((hub.folder / "README.md").read_text())
    assert (card.data.license, card.data.language, card.data.tags) == ("mit", "gsw", ["mine"])
    assert card.data.library_name == "transduce" and card.text == "# Mine\n"
    (run / "README.md").write_text("---\nlicense: [mit\n---\n# Mine\n")
    refused(transduce("push", run, NAME), "README.md is damaged")


def test_records_are_sent_if_asked(hub: Hub, run: Path) -> None:
    succeed("push", run, NAME, "--records")
    assert served(hub) == MODEL_FILES | {"report.html", "data.json"}
    assert set(json.loads((hub.folder / "manifest.json").read_text())["records"]) == {
        "README.md", "report.html", "data.json",
    }  # fmt: skip
    assert all(file.status == "ok" for file in verify_files(hub.folder) if file.name != "recipe.toml")


def test_dry_run_lists_the_files_and_sends_nothing(hub: Hub, run: Path) -> None:
    done = succeed("push", run, NAME, "--dry-run")
    lines = done.out.splitlines()
    assert {line.partition(":")[0] for line in lines[:-1]} == MODEL_FILES
    assert f"model.safetensors: {(run / 'model.safetensors').stat().st_size:,} bytes" in lines
    assert lines[-1] == f"nothing was sent to {NAME}"
    assert not hub.asked and not served(hub)


@pytest.mark.parametrize(("option", "visibility"), [((), None), (("--private",), "private")])
def test_a_new_model_is_private_if_asked(option: tuple[str, ...], visibility: str | None, hub: Hub, run: Path) -> None:
    succeed("push", run, NAME, *option)
    (created,) = hub.created
    assert (created["organization"], created["name"]) == tuple(NAME.split("/"))
    assert created.get("visibility", "private" if created.get("private") else None) == visibility


def _another_model(hub: Hub, run: Path) -> None:
    make_folder(run.parent / "theirs", run)
    shutil.copytree(run.parent / "theirs", hub.folder, dirs_exist_ok=True)


WRONG_DOWNLOADS: dict[str, tuple[Callable[[Hub, Path], object], str]] = {
    "no such model": (lambda hub, run: setattr(hub, "name", "some-one/else"), "there is no folder .*Repository Not"),
    "private": (lambda hub, run: setattr(hub, "door", 401), "there is no folder .*private or gated"),
    "down": (lambda hub, run: setattr(hub, "door", 500), "does not provide this model: .*500"),
    "another form": (_another_model, f"{NAME} .* is no run folder: .*transduce import {NAME} RUN"),
    "damaged": (
        lambda hub, run: hub.forged.update({"model.safetensors": b"x"}),
        "does not provide this model: .*try again",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_DOWNLOADS.values(), ids=WRONG_DOWNLOADS)
def test_errors_of_loading_are_one_line(
    wrong: Callable[[Hub, Path], object], message: str, hub: Hub, run: Path
) -> None:
    if message.startswith(("there", "does")):
        push_to_hub(run, NAME)
    wrong(hub, run)
    refused(transduce("translate", NAME, "a man reads"), message)
    with pytest.raises(UserError, match=message):
        Translator.load(NAME)


def test_a_manifest_cannot_lead_out_of_its_folder(hub: Hub, run: Path) -> None:
    push_to_hub(run, NAME)
    manifest = json.loads((hub.folder / "manifest.json").read_text())
    for name in ("../../x", "/etc/passwd", ".hidden"):
        content = {**manifest, "files": {**manifest["files"], name: {}}}
        (hub.folder / "manifest.json").write_text(json.dumps(content))
        shutil.rmtree("../cache", ignore_errors=True)
        with pytest.raises(RunFolderError, match=r"manifest.json is damaged"):
            Translator.load(NAME)
    (hub.folder / "secret.bin").write_bytes(b"x")
    content = {**manifest, "files": {**manifest["files"], "*": {}}}
    (hub.folder / "manifest.json").write_text(json.dumps(content))
    shutil.rmtree("../cache")
    hub.asked.clear()
    with pytest.raises(RunFolderError, match=r"\* is missing"):
        Translator.load(NAME)
    assert "secret.bin" not in hub.downloaded


def test_no_network_and_offline(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        with monkeypatch.context() as patch:
            patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
            refused(transduce("translate", NAME, "a man"), "http://127", f"hf download {NAME}")
            refused(transduce("push", run, NAME), "http://127.* does not take")
    push_to_hub(run, NAME)
    Translator.load(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert Translator.load(NAME).translate("a man").text is not None
    refused(transduce("translate", "some-one/else", "a man"), "HF_HUB_OFFLINE")
    refused(transduce("push", run, NAME), "does not take .*offline")
    assert not hub.asked


def test_without_the_library(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    advice = r"needs huggingface_hub: pip install 'transduce\[hub\]'"
    refused(transduce("translate", NAME, "a man"), f"there is no folder {NAME}; .* {advice}")
    refused(transduce("push", run, NAME), advice)
    assert not hub.asked


def test_errors_of_publishing_are_one_line(hub: Hub, run: Path, tmp_path: Path) -> None:
    for name in ("model", "a/b/c", "runs/..", "a b/c"):
        with pytest.raises(SettingsError, match="OWNER/NAME"):
            push_to_hub(run, name)
    refused(transduce("push", run, "other/model"), "does not take other/model: .*403.* token: hf auth login")
    refused(transduce("push", tmp_path / "no", NAME), "there is no run folder")
    hub.invalid = '"license" must be one of'
    refused(transduce("push", run, NAME, "--license", "mine"), 'README.md. - "license" must be one of')
    hub.invalid, hub.door = "", 401
    refused(transduce("push", run, NAME), "does not take .*401.* token: hf auth login")
    hub.door = 0
    with RunFolder.open_locked(run):
        refused(transduce("push", run, NAME), "another process|in use")
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    refused(transduce("push", run, NAME), "model.safetensors is damaged")
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    refused(transduce("push", run, NAME), "does not list model.safetensors")
    assert not served(hub)


def test_every_class_loads_by_name(hub: Hub) -> None:
    for loader in (Generator, TextClassifier, MaskFiller):
        with pytest.raises(UserError, match=f"{NAME} on the Hugging Face Hub is no run folder"):
            loader.load(NAME)

"""`verify_files` distinguishes damaged, missing, changed and unchecked files."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import marians
from transduce.runs import manifest as manifest_module
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import check_file, fingerprint, seal_folder, summarize, verify_files
from transduce.runs.tensors import save_tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a report, a card and a checkpoint."""
    path = marians.make_run(tmp_path_factory.mktemp("verify") / "run")
    asked = RunFolder.open(path).settings
    with RunFolder.create(path, asked, "") as run:
        run.write_record("data.json", {})
        run.write_page("README.md", "# toy\n")
        run.write_page("report.html", "<p>")
        run.checkpoints.save(7, {"w": torch.ones(3)}, {})
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def status(path: Path) -> dict[str, str]:
    """Everything that is not as it was written."""
    return {one.name: one.status for one in verify_files(path) if one.status != "ok"}


def test_a_run_as_it_was_written(run: Path) -> None:
    found = verify_files(run)
    files = {file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()}
    assert {one.name for one in found} == files and len(found) == len(files)
    assert status(run) == {"recipe.toml": "unchecked"}
    assert not any(one.is_error for one in found)
    assert summarize(found).endswith("files match their checksums; 1 unchecked")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.model", "config.json", "data.json", "report.html"])
def test_a_missing_file_is_an_error(run: Path, name: str) -> None:
    (run / name).unlink()
    assert status(run)[name] == "MISSING"
    assert "1 missing" in summarize(verify_files(run))


def test_a_forged_card_is_reported(run: Path) -> None:
    (run / "README.md").write_text("# a better model\n")
    assert status(run)["README.md"] == "changed"
    assert "1 changed" in summarize(verify_files(run)) and "all" not in summarize(verify_files(run))


def test_a_forged_report_is_damaged(run: Path) -> None:
    (run / "report.html").write_text("<b>")
    assert status(run)["report.html"] == "DAMAGED"


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer2.model", "checkpoints/u00000007/x", "sub/scores.json"])
def test_a_foreign_file_is_unchecked(run: Path, name: str) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("?")
    assert status(run)[name] == "unchecked"
    assert "2 unchecked" in summarize(verify_files(run)), "with recipe.toml"


def test_files_of_a_sealed_folder(run: Path) -> None:
    tokens = run / "tokens"
    tokens.mkdir()
    (tokens / "a.npy").write_bytes(b"1")
    assert status(run)["tokens/a.npy"] == "unchecked", "the text is being prepared"
    seal_folder(tokens)
    assert "tokens/a.npy" not in status(run)
    (tokens / "b.npy").write_bytes(b"2")
    (tokens / "a.npy").write_bytes(b"2")
    assert (status(run)["tokens/a.npy"], status(run)["tokens/b.npy"]) == ("DAMAGED", "unchecked")
    (tokens / "a.npy").unlink()
    assert status(run)["tokens/a.npy"] == "MISSING"
    (tokens / "manifest.json").write_text("[]")
    assert (status(run)["tokens/manifest.json"], status(run)["tokens/b.npy"]) == ("DAMAGED", "unchecked")


def test_weights_to_average_are_compared_with_the_checksums_in_the_checkpoints(run: Path) -> None:
    path = run / "averaging" / "u00000007.safetensors"
    path.parent.mkdir()
    save_tensors(path, {"w": torch.ones(3)})
    name, state = path.relative_to(run).as_posix(), {"average": {"files": {path.name: fingerprint(path)}}}
    assert status(run)[name] == "unchecked"
    with RunFolder.create(run, RunFolder.open(run).settings, "") as folder:
        folder.checkpoints.save(8, {"w": torch.ones(3)}, state)
    assert name not in status(run)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert status(run)[name] == "DAMAGED"
    path.unlink()
    assert status(run)[name] == "MISSING"
    path.parent.rmdir()  # as at the end of the training
    assert name not in status(run)


def test_weights_that_a_training_replaces_have_no_checksum_and_load(run: Path) -> None:
    values = json.loads((run / "manifest.json").read_text())
    del values["files"]["model.safetensors"]
    (run / "manifest.json").write_text(json.dumps(values))
    assert status(run)["model.safetensors"] == "unchecked"
    assert RunFolder.open(run).load_model()


def test_damage_in_a_checkpoint_is_reported_with_the_file(run: Path) -> None:
    folder = run / "checkpoints" / "u00000007"
    (folder / "training.safetensors").write_bytes(b"x")
    assert status(run)["checkpoints/u00000007/training.safetensors"] == "DAMAGED"
    (folder / "training.safetensors").unlink()
    assert status(run)["checkpoints/u00000007/training.safetensors"] == "MISSING"
    (folder / "manifest.json").unlink()
    assert status(run)["checkpoints/u00000007/manifest.json"] == "MISSING"


def test_a_run_before_its_first_validation_has_no_model_yet(tmp_path: Path, made: Path) -> None:
    with RunFolder.create(tmp_path / "run", RunFolder.open(made).settings, ""):
        assert status(tmp_path / "run") == {".lock": "unchecked", "recipe.toml": "unchecked"}


def test_a_file_of_another_size_is_never_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    expected = fingerprint(path)
    check_file(path, expected)
    path.write_bytes(b"1234567")
    monkeypatch.setattr(manifest_module, "fingerprint", lambda path: pytest.fail("it was hashed"))
    with pytest.raises(manifest_module.RunFolderError, match="it has 7 bytes and should have 5"):
        check_file(path, expected)

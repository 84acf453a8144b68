"""The run folder survives kills, damage and full disks."""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transduce.config.settings import Settings
from transduce.errors import RunFolderError
from transduce.runs import folder as folder_module
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import TensorFile

RECIPE = "[training]\nlr = 0.002\n"


def settings(**training: object) -> Settings:
    return Settings.from_mapping({"training": {"lr": 0.002, **training}})


class SomeTokenizers:
    """Writes what the real ones write."""

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(b"pieces" * 100)


def finished_run(path: Path) -> Path:
    with RunFolder.create(path, settings(), RECIPE) as run:
        run.save_tokenizers(SomeTokenizers().save)  # type: ignore[arg-type]
        run.write_settings(settings(batch_tokens=4096))
        run.save_model({"w": torch.ones(100)})
    return path


def checkpoint(run: RunFolder, update: int) -> Path:
    return run.checkpoints.save(update, {"w": torch.full((1000,), float(update))}, {"epoch": update / 10})


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- new and resumed runs


def test_open_reads_what_create_wrote(tmp_path: Path) -> None:
    run = RunFolder.open(finished_run(tmp_path / "deep" / "run"))
    assert run.settings == settings(batch_tokens=4096)
    assert torch.equal(run.load_model()["w"], torch.ones(100))
    assert (run.path / "recipe.toml").read_text() == RECIPE
    assert json.loads((run.path / "config.json").read_text())["training"]["batch_tokens"] == 4096
    assert not (run.path / ".lock").exists()


def test_resume_uses_the_resolved_settings(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    before = files(path)
    with RunFolder.create(path, settings(), "another text of the same recipe") as run:
        assert run.resumed and run.has_tokenizers
        assert run.settings == settings(batch_tokens=4096)
    assert files(path) == before


def test_changeable_settings_may_differ_on_resume(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    training = {"lr": 0.002, "keep_checkpoints": 5, "timeout": 3.0}
    values = {"name": "better", "training": training, "data": {"root": "/elsewhere"}}
    asked = Settings.from_mapping(values)
    with RunFolder.create(path, asked, "its new recipe") as run:
        assert run.resumed
        assert run.settings.name == "better" and run.settings.training.keep_checkpoints == 5
        assert run.settings.training.timeout == 3
        assert run.settings.training.batch_tokens == 4096, "other settings stay as resolved"
    found = RunFolder.open(path)
    assert found.settings == run.settings
    assert (path / "recipe.toml").read_text() == "its new recipe"
    with RunFolder.create(path, settings(), RECIPE) as run:  # and back
        assert run.settings == settings(batch_tokens=4096)


def test_another_device_makes_another_run(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"another run: training\.device"):
        RunFolder.create(path, settings(device="cpu"), RECIPE)


def test_settings_that_change_results_are_requested_and_then_recorded(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    before = files(path)
    asked = settings(lr=0.003, max_updates=9)
    with RunFolder.create(path, asked, "its new recipe") as run:
        assert run.requested == {"training.lr": (0.002, 0.003), "training.max_updates": (None, 9)}
        assert run.settings == settings(batch_tokens=4096) and before.items() <= files(path).items()
        run.change(run.requested)
    changed = settings(batch_tokens=4096, lr=0.003, max_updates=9)
    assert run.settings == RunFolder.open(path).settings == changed
    assert (path / "recipe.toml").read_text() == "its new recipe"
    for again in (asked, Settings()):  # the same values, and unset ones
        with RunFolder.create(path, again, RECIPE) as run:
            assert run.requested == {} and run.settings == changed


def test_a_value_that_a_continuation_has_replaced_is_no_request(tmp_path: Path) -> None:
    """The recipe has the old limit, and the same command resumes."""
    path, asked = finished_run(tmp_path / "run"), settings(max_updates=9)
    for n_continuations in range(2):
        with RunFolder.create(path, asked, RECIPE) as run:
            assert run.manifest.n_continuations == n_continuations
            run.change({"training.max_updates": (9, 20)}, continues=True)
    with RunFolder.create(path, asked, RECIPE) as run:
        assert run.requested == {} and run.settings.training.max_updates == 20


def test_a_new_run_is_not_resumed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        assert not run.resumed and not run.has_tokenizers and run.checkpoints.latest() is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"training": {"seed": 2}}, "training.seed is 1 in the folder and 2 here"),
        ({"training": {"lr": 0.002}, "model": {"norm": "rms"}}, 'model.norm is "layer" in the folder and "rms" here'),
        (
            {"training": {"lr": 0.002}, "data": {"train": [{"path": "x.tsv"}]}},
            'data.train.0.path is unset in the folder and "x.tsv" here',
        ),
    ],
)
def test_another_run_is_refused_with_the_first_differing_setting(tmp_path: Path, other: dict, message: str) -> None:
    path = finished_run(tmp_path / "run")
    before = files(path)
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(path, Settings.from_mapping(other), "")
    assert f"{path} contains another run: {message};" in str(caught.value)
    assert files(path) == before
    RunFolder.create(path, settings(), RECIPE).close()  # the lock was released


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"no run folder and not empty: it contains thesis\.tex"):
        RunFolder.create(tmp_path, settings(), RECIPE)
    assert files(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "run", settings(), RECIPE)
    with pytest.raises(RunFolderError, match="cannot make the run folder"):
        RunFolder.create(tmp_path / "run" / "below", settings(), RECIPE)


def test_a_second_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path / "run", settings(), RECIPE),
        pytest.raises(RunFolderError, match="is in use: process"),
    ):
        RunFolder.create(tmp_path / "run", settings(), RECIPE)


@pytest.mark.parametrize("how", [shutil.copytree, os.rename])
def test_a_folder_can_be_moved_and_copied(tmp_path: Path, how: Callable[[Path, Path], None]) -> None:
    old = finished_run(tmp_path / "old")
    how(old, tmp_path / "new")
    shutil.rmtree(old, ignore_errors=True)
    assert torch.equal(RunFolder.open(tmp_path / "new").load_model()["w"], torch.ones(100))
    assert all(str(old).encode() not in content for content in files(tmp_path / "new").values())


# --- damage


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "model.safetensors", "manifest.json"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = finished_run(tmp_path / "run")
    content, choose = (path / name).read_bytes(), random.Random(1)
    changes = [b"", content[:1], content[:-3]]
    if name != "manifest.json":
        places = [(choose.randrange(len(content)), 1 << bit) for bit in range(8)]
        changes += [content[:i] + bytes([content[i] ^ bit]) + content[i + 1 :] for i, bit in places]
    for changed in changes:
        (path / name).write_bytes(changed)
        with pytest.raises(RunFolderError, match=f"{name} is damaged.*; restore it from a copy"):
            RunFolder.open(path).load_model()
    (path / name).unlink()
    with pytest.raises(RunFolderError, match=f"{name} is missing"):
        RunFolder.open(path)


def test_weights_that_a_training_replaces_meanwhile_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = finished_run(tmp_path / "run")
    read, replaced = folder_module.open_tensors, list[Path]()

    def replace_and_read(file: Path, files: ExitStack) -> TensorFile:
        if not replaced:
            replaced.append(file)
            with RunFolder.open_locked(path) as training:
                training.save_model({"w": torch.zeros(100)})
        return read(file, files)

    monkeypatch.setattr(folder_module, "open_tensors", replace_and_read)
    assert torch.equal(RunFolder.open(path).load_model()["w"], torch.zeros(100))


def test_an_early_run_without_a_model_says_so(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE):
        with pytest.raises(RunFolderError, match="no tokenizer yet"):
            RunFolder.open(tmp_path / "run")
        assert RunFolder.open(tmp_path / "run", model=False).settings == settings()
    with pytest.raises(RunFolderError, match="there is no run folder"):
        RunFolder.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="is no run folder"):
        RunFolder.open(tmp_path / "empty")


def test_a_run_of_a_newer_format_says_so(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(RunFolderError, match=r"format 99.*newer version.*install a newer transduce"):
        RunFolder.open(path)


# --- checkpoints


def test_latest_reads_what_save_checkpoint_wrote(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        checkpoint(run, 9)
        checkpoint(run, 100)
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        latest = run.checkpoints.latest()
    assert latest is not None and latest.notes == ()
    assert latest.update == latest.state["update"] == 100 and latest.state["epoch"] == 10.0
    assert torch.equal(latest.tensors()["w"], torch.full((1000,), 100.0))


@pytest.mark.parametrize("name", ["training.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, name: str, damage: str) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        checkpoint(run, 10)
        file = checkpoint(run, 20) / name
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        file.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]
        file.write_bytes({"empty": b"", "short": content[:-5], "flipped": flipped}[damage])
    latest = RunFolder.open(tmp_path / "run", model=False).checkpoints.latest()
    assert latest is not None and latest.update == 10
    (note,) = latest.notes
    assert str(file.parent) in note and note.endswith("resuming from the checkpoint before it, update 10")


@pytest.mark.parametrize(
    ("saved", "warning"),
    [
        ({"PyTorch": "1.0.0"}, r"saved with PyTorch 1\.0\.0, now 2"),
        ({"NumPy": "1.0", "threads": 4096}, r"NumPy 1\.0, now .*; threads 4096, now \d+: .*up to rounding"),
    ],
)
def test_a_resume_in_another_environment_is_reported(tmp_path: Path, saved: dict[str, Any], warning: str) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        now = {"PyTorch": torch.__version__, "NumPy": np.__version__, "threads": torch.get_num_threads()}
        run.checkpoints.save(1, {"w": torch.zeros(1)}, {})
        first = run.checkpoints.latest()
        assert first is not None and first.state["environment"] == now and first.notes == ()
        run.checkpoints.save(2, {"w": torch.zeros(1)}, {"environment": now | saved})
        latest = run.checkpoints.latest()
    assert latest is not None and re.search(warning, latest.notes[0])


def test_if_all_checkpoints_are_damaged_the_user_decides(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        for update in (10, 20):
            (checkpoint(run, update) / "state.json").unlink()
        with pytest.raises(RunFolderError, match=r"every checkpoint is damaged: .*u00000020.*u00000010.*to start over"):
            run.checkpoints.latest()


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        for update in (10, 20, 30, 100_000_000):
            checkpoint(run, update)
        run.checkpoints.prune(2)
        assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["u00000030", "u100000000"]


def test_prune_never_removes_the_last_undamaged_one(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        for update in (10, 20, 30):
            checkpoint(run, update)
    (run.path / "checkpoints" / "u00000030" / "state.json").unlink()
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        run.checkpoints.prune(1)
        assert run.checkpoints.updates() == [30, 20]
        latest = run.checkpoints.latest()
        assert latest is not None and latest.update == 20


def test_a_checkpoint_of_the_same_update_is_replaced(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        checkpoint(run, 10)
        run.checkpoints.save(10, {"w": torch.zeros(1)}, {"second": True})
        latest = run.checkpoints.latest()
        assert latest is not None and latest.state["second"] is True
        assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["u00000010"]


# --- kills


def in_a_killed_process(work: Callable[[], None], *, seconds: float = 60.0) -> None:
    """Run `work` in a forked process, and kill it after these seconds if it has not ended, as a power cut would."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()


def test_a_killed_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder.create(path, settings(), RECIPE).close()
    choose = random.Random(5)

    def save_and_save() -> None:
        run = RunFolder.create(path, settings(), RECIPE)
        update = latest.update if (latest := run.checkpoints.latest()) else 0
        while True:
            update += 1
            # made by NumPy: PyTorch's threads do not survive a fork
            values = torch.from_numpy(np.full(200_000, update, dtype=np.float32))
            run.checkpoints.save(update % 3 + 1, {"w": values}, {"value": float(update)})
            run.save_model({"w": values[:50_000]})
            run.write_settings(settings(batch_tokens=update))

    seen = 0
    for attempt in range(60):  # on a slow machine, a process may be killed before it has saved anything: wait longer
        if seen == 10:
            break
        in_a_killed_process(save_and_save, seconds=(0.05 + 0.1 * choose.random()) * (1 + attempt / 10))
        with RunFolder.create(path, settings(), RECIPE) as run:
            names = [p.name for p in [*path.iterdir(), *(path / "checkpoints").glob("*")]]
            assert not [name for name in names if name.endswith(".aside")], "the next start removes temporary files"
            latest = run.checkpoints.latest()
            if latest is not None:
                seen += 1
                assert latest.notes == ()
                assert bool((latest.tensors()["w"] == latest.state["value"]).all())
            if (path / "model.safetensors").exists():
                assert run.load_model()["w"].unique().numel() == 1
    assert seen == 10


def test_a_folder_killed_while_it_is_made_can_be_resumed(tmp_path: Path) -> None:
    """Kill after each write in turn."""
    for n_writes in range(6):
        path = tmp_path / str(n_writes)

        def work(path: Path = path, n_writes: int = n_writes) -> None:
            count = 0
            real = os.replace

            def replace(a: Path, b: Path) -> None:
                nonlocal count
                if count == n_writes:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                real(a, b)

            os.replace = replace  # type: ignore[assignment]
            RunFolder.create(path, settings(), RECIPE).write_settings(settings(batch_tokens=7))

        in_a_killed_process(work)
        with RunFolder.create(path, settings(), RECIPE) as run:
            assert run.settings.training.batch_tokens in (None, 7)
            assert (path / "recipe.toml").read_text() == RECIPE
        assert RunFolder.open(path, model=False).settings == run.settings


# --- full disks


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The system refuses long files here, as a full disk does."""
    much = {"w": torch.ones(2_000_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder.create(tmp_path / "run", settings(), RECIPE) as run:
        checkpoint(run, 10)
        before = files(run.path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            for write in (lambda: run.checkpoints.save(20, much, {}), lambda: run.save_model(much)):
                with pytest.raises(RunFolderError, match=r"^cannot write .*: File too large$"):
                    write()
                assert files(run.path) == before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        latest = run.checkpoints.latest()
        assert latest is not None and latest.update == 10
        checkpoint(run, 20)

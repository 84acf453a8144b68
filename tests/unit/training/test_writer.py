"""Checkpoints that another thread writes while training continues, as with weights on a GPU."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final
from unittest.mock import Mock

import pytest
from pydantic import TypeAdapter

import toys
from transduce.errors import Interrupted, RunFolderError
from transduce.runs import checkpoints
from transduce.runs.folder import RunFolder
from transduce.training.feed import DataPosition
from transduce.training.meter import Row
from transduce.training.ranks import Ranks
from transduce.training.session import CheckpointWriter, Session, TrainingState, score_of
from transduce.training.step import Updater


@pytest.fixture
def n_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sessions write ahead. Returns the number of updates that were made."""
    made, init, update = [0], Session.__init__, Updater.update

    def init_ahead(self: Session, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._writes_ahead = True

    def counted(self: Updater, *args: Any, **options: Any) -> Any:
        made[0] += 1
        return update(self, *args, **options)

    monkeypatch.setattr(Session, "__init__", init_ahead)
    monkeypatch.setattr(Updater, "update", counted)
    return made


def train(path: Path, **training: Any) -> Any:
    options = {"max_updates": 30, "valid_updates": 10, "save_updates": 5, "keep_checkpoints": 9}
    return toys.toy_run(path, toys.settings(**options | training))[1]


def latest(path: Path) -> int:
    found = RunFolder.open(path, model=False).checkpoints.latest()
    return -1 if found is None else found.update


def in_place_of_sealing(patch: pytest.MonkeyPatch, act: Any) -> None:
    """Call `act` in the writing thread when the files of a checkpoint are written, but neither sealed nor renamed."""
    original = checkpoints.seal_folder

    def seal(folder: Path) -> None:
        assert threading.current_thread() is not threading.main_thread()
        act()
        original(folder)

    patch.setattr(checkpoints, "seal_folder", seal)


def wait_until(is_true: Any, *, seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not is_true() and time.monotonic() < until:
        time.sleep(0.001)
    return bool(is_true())


@pytest.mark.parametrize("average", ["ema", "last"])
def test_a_checkpoint_contains_the_update_of_its_snapshot(
    tmp_path: Path, n_made: list[int], monkeypatch: pytest.MonkeyPatch, average: str
) -> None:
    """Each file is written after more updates; it equals that of a training that waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "save", saving_at_once)
        train(tmp_path / "one", average=average, average_n=2)
    written, original = list[int](), checkpoints.write_tensors
    n_made[0] = 0

    def write(path: Path, *args: Any, **kwargs: Any) -> None:
        update = int(path.parent.name.split(".")[1][1:])
        if update % 10 == 5:  # no validation waits for it
            assert wait_until(lambda: n_made[0] > update + 2)
            written.append(update)
        original(path, *args, **kwargs)

    monkeypatch.setattr(checkpoints, "write_tensors", write)
    train(tmp_path / "two", average=average, average_n=2)
    assert written == [5, 15, 25]
    for name in [*(f"checkpoints/u{n:08d}/training.safetensors" for n in range(5, 31, 5)), "model.safetensors"]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


SAVE = Session.save


def saving_at_once(self: Session, seconds: float) -> None:
    self._writes_ahead = False
    SAVE(self, seconds)


def test_an_error_of_the_writing_thread_ends_training_at_the_next_update(
    tmp_path: Path, n_made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        assert wait_until(lambda: n_made[0] > 12)
        raise OSError(28, "No space left on device")

    in_place_of_sealing(monkeypatch, lambda: fail() if n_made[0] >= 10 else None)
    with pytest.raises(RunFolderError, match=r"cannot write .*u00000010: No space left on device"):
        train(tmp_path / "run", valid_updates=1000, max_updates=1000, save_updates=10)
    assert 12 < n_made[0] < 20, "before the next checkpoint"
    assert latest(tmp_path / "run") == -1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("when", ["updating", "validating"])
def test_a_signal_during_a_write_waits_for_it(
    tmp_path: Path, n_made: list[int], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    asked = iter([True])

    def ask() -> None:
        if n_made[0] >= 20 and next(asked, False):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    in_place_of_sealing(monkeypatch, ask)
    valid_updates = {"updating": 1000, "validating": 20}[when]
    with pytest.raises(Interrupted, match="everything is saved"):
        train(tmp_path / "run", valid_updates=valid_updates, max_updates=1000, save_updates=20)
    assert latest(tmp_path / "run") == n_made[0]


@pytest.mark.parametrize("when", ["updating", "validating"])
def test_a_failed_write_is_reported_in_place_of_the_signal(
    tmp_path: Path, n_made: list[int], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail() -> None:
        if n_made[0] >= 20:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            raise OSError(28, "No space left on device")

    in_place_of_sealing(monkeypatch, fail)
    valid_updates = {"updating": 1000, "validating": 20}[when]
    with pytest.raises(RunFolderError, match="No space left on device"):
        train(tmp_path / "run", valid_updates=valid_updates, max_updates=1000, save_updates=20)


@final
class TwoRanks:
    """The agreement of two ranks that are threads."""

    def __init__(self) -> None:
        self._barrier, self._writing = threading.Barrier(2, timeout=20), [False, False]

    def of(self, rank: int) -> Any:
        return Mock(spec=Ranks, agree=partial(self._agree, rank))

    def _agree(self, rank: int, signal: int, seconds: float, *, is_writing: bool = False) -> tuple[int, float, bool]:
        self._writing[rank] = is_writing
        self._barrier.wait()
        are_writing = any(self._writing)
        self._barrier.wait()
        return signal, seconds, are_writing


def test_no_rank_goes_on_before_the_checkpoint_is_complete() -> None:
    """The main process seals it, which the others have nothing to do with."""
    ranks, seal, done = TwoRanks(), threading.Event(), list[str]()

    def seal_slowly() -> None:
        assert seal.wait(20)
        done.append("sealed")

    def run(rank: int) -> None:
        with CheckpointWriter(ranks.of(rank)) as writer:
            writer.start(lambda: None, seal_slowly if rank == 0 else lambda: None)
            writer.wait()
            done.append("gone on")

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run, rank) for rank in (0, 1)]
        assert not wait_until(lambda: done, seconds=0.2)
        seal.set()
        for one in both:
            one.result()
    assert done == ["sealed", "gone on", "gone on"]


def test_one_checkpoint_is_written_at_a_time(
    tmp_path: Path, n_made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits, and so does the end of training."""
    there, seen, saved = tmp_path / "run" / "checkpoints", list[int](), list[int]()

    def look() -> None:
        time.sleep(0.05)
        seen.append(len(list(there.iterdir())))

    def save(self: Session, seconds: float) -> None:
        SAVE(self, seconds)
        saved.append(len(seen))

    in_place_of_sealing(monkeypatch, look)
    monkeypatch.setattr(Session, "save", save)
    train(tmp_path / "run", max_updates=5, valid_updates=1000, save_updates=1, keep_checkpoints=2)
    assert seen == [1, 2, 3, 3, 3, 3], "with the one that is being written"
    assert all(n_complete >= n for n, n_complete in enumerate(saved))
    assert sorted(path.name for path in there.iterdir()) == ["u00000004", "u00000005"]


def test_bleu_decides_and_loss_breaks_ties() -> None:
    assert score_of({"loss": 2.0, "bleu": 30.0}, "bleu") > score_of({"loss": 1.0, "bleu": 29.0}, "bleu")
    assert score_of({"loss": 1.0, "bleu": 0.0}, "bleu") > score_of({"loss": 2.0, "bleu": 0.0}, "bleu")
    assert score_of({"loss": 1.0, "bleu": 0.0}, "loss") > score_of({"loss": 2.0, "bleu": 9.0}, "loss")
    assert score_of({"loss": 1.0}, "bleu") > score_of({"loss": 2.0}, "bleu")


def test_a_changed_score_is_compared_with_that_of_the_best_validation() -> None:
    """`stop_by` may change at a resume, and so may whether anything is translated."""
    state = TrainingState()
    assert state.see({"loss": 2.0, "bleu": 30.0}, "bleu")
    assert not state.see({"loss": 1.0, "bleu": 29.0}, "bleu")
    assert state.see({"loss": 1.5, "bleu": 29.0}, "loss")
    assert not state.see({"loss": 1.6}, "bleu")
    assert state.see({"loss": 1.4}, "bleu")


def test_validations_since_the_best_are_counted() -> None:
    state, seen = TrainingState(), []
    for update, loss in enumerate((3, 2, 4, 1, 1, 5)):
        state.update = update
        seen.append((state.see({"loss": loss}, "loss"), state.best_update, state.since_best))
    assert seen == [(True, 0, 0), (True, 1, 0), (False, 1, 1), (True, 3, 0), (False, 3, 1), (False, 3, 2)]


def test_the_state_of_a_training_survives_json() -> None:
    row = Row(7, lr=0.1, n_targets=3, n_tokens=8, n_slots=10, loss_sum=1 / 3, nll_sum=0.2, grad_norm=1e-9)
    state = TrainingState(update=7, position=DataPosition(2, 3), seconds=1 / 7, rows=[row])
    state.see({"loss": 1 / 3, "bleu": 20.1}, "bleu")
    stored = json.dumps(asdict(state))
    found = TypeAdapter(TrainingState).validate_python(json.loads(stored))
    assert found == state and isinstance(found.rows[0], Row)

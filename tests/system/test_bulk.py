"""Bulk translations that are killed or stopped by signals end with the output of an uninterrupted one."""

import contextlib
import gzip
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

import kills
import marians
from system.commands import succeed, transduce
from transduce.bulk import translate as bulk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
N_KILLS, CHUNK_LINES = 12, 32
OPTIONS = ["--device", "cpu", "--max-length", "6", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and three files of 7,200 different lines, one of them compressed."""
    folder = tmp_path_factory.mktemp("bulk")
    marians.make_run(folder / "run")
    draw = random.Random(1)
    for name, n in (("a.en", 3000), ("b.en.gz", 3000), ("c.en", 1200)):
        text = "\n".join(f"{draw.choice(marians.LINES)} {draw.choice(marians.LINES)} {i}" for i in range(n)).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_LINES", CHUNK_LINES)


@pytest.fixture(scope="module")
def whole(folder: Path, processes: ForkServerContext) -> dict[str, bytes]:
    process, errors = start(processes, folder, "whole")
    process.join()
    assert process.exitcode == 0, errors.read_text()
    return outputs(folder / "whole")


def outputs(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def command(folder: Path, out: str, *options: str) -> list[str]:
    files = [str(folder / name) for name in ("a.en", "b.en.gz", "c.en")]
    return ["translate", str(folder / "run"), *files, "--output-dir", str(folder / out), *OPTIONS, *options]


def start(processes: ForkServerContext, folder: Path, out: str) -> tuple[ForkServerProcess, Path]:
    """Start a translation in small chunks."""
    errors = folder / f"{out}.err"
    process = processes.Process(target=kills.bulk_child, args=(command(folder, out), str(errors), CHUNK_LINES))
    process.start()
    return process, errors


def progress(out: Path) -> int:
    """Bytes of all outputs, finished and partial."""
    with contextlib.suppress(OSError):
        files = [path for path in out.iterdir() if path.is_file()] + [*out.glob(".transduce/*.partial")]
        return sum(path.stat().st_size for path in files)
    return 0


def wait_for_output(out: Path, process: subprocess.Popen[str], *, more_than: int = 0) -> None:
    until = time.monotonic() + 120
    while progress(out) <= more_than:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "nothing was written"
        time.sleep(0.002)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(
    folder: Path, whole: dict[str, bytes], processes: ForkServerContext
) -> None:
    """SIGKILL after a random number of new bytes, which is while something is translated, written or renamed."""
    draw, total = random.Random(1), sum(map(len, whole.values()))
    n_kills, n_kept, number = 0, 0, 0
    while n_kills < N_KILLS:
        out = folder / f"killed-{number}"
        number += 1
        while True:
            before = progress(out)
            process, errors = start(processes, folder, out.name)
            mark = before + draw.randint(0, total // 4)
            while process.is_alive() and progress(out) <= mark:
                time.sleep(0.0005)
            time.sleep(draw.uniform(0.0, 0.02))
            if process.is_alive():
                process.kill()
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL, errors.read_text()
            n_kills, n_kept = n_kills + 1, n_kept + (before > 0)
            assert all(whole[name] == content for name, content in outputs(out).items()), "an unfinished file"
        assert outputs(out) == whole
    assert n_kept >= 2, "no translation was resumed in the middle"


@pytest.fixture
def process(
    request: pytest.FixtureRequest, folder: Path, whole: dict[str, bytes]
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A translation here, or on a Ray cluster, at a moment when something is written."""
    out = f"stopped-{request.node.name}"
    options = ["--ray", request.getfixturevalue("cluster").address] if request.param == "ray" else []
    code = f"""
from transduce.__main__ import main
from transduce.bulk import translate as bulk
bulk.CHUNK_LINES = {CHUNK_LINES}
main()"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command(folder, out, *options)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for_output(folder / out, process, more_than=1000)
        yield process, folder / out
    finally:
        process.kill()
        process.communicate()


def assert_resumes(folder: Path, out: Path, whole: dict[str, bytes]) -> None:
    """The same command completes a translation that was stopped."""
    assert outputs(out) != whole
    succeed(*command(folder, out.name))
    assert outputs(out) == whole


@pytest.mark.slow
@pytest.mark.parametrize("process", ["here"], indirect=True)
def test_ctrl_c_leaves_a_state_that_the_same_command_resumes(
    process: tuple[subprocess.Popen[str], Path], folder: Path, whole: dict[str, bytes]
) -> None:
    translation, out = process
    translation.send_signal(signal.SIGINT)
    _, err = translation.communicate(timeout=60)
    assert translation.returncode == 130, err
    assert "stopped by SIGINT; the same command resumes" in err and "Traceback" not in err
    assert_resumes(folder, out, whole)


@pytest.mark.slow
@pytest.mark.loopback
@pytest.mark.parametrize(
    ("process", "number"), [("ray", signal.SIGTERM), ("ray", signal.SIGKILL)], indirect=["process"]
)
def test_a_stopped_translation_on_a_ray_cluster_resumes(
    process: tuple[subprocess.Popen[str], Path], number: int, folder: Path, whole: dict[str, bytes]
) -> None:
    translation, out = process
    translation.send_signal(number)
    _, err = translation.communicate(timeout=60)
    assert translation.returncode == (143 if number == signal.SIGTERM else -number), err
    assert "Traceback" not in err
    assert_resumes(folder, out, whole)


@pytest.mark.slow
@pytest.mark.loopback
@pytest.mark.parametrize("process", ["ray"], indirect=True)
def test_a_killed_node_of_a_ray_cluster_changes_nothing(
    process: tuple[subprocess.Popen[str], Path], cluster: Any, whole: dict[str, bytes]
) -> None:
    translation, out = process
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    before = progress(out)
    _, err = translation.communicate(timeout=120)
    assert translation.returncode == 0, err
    assert "lost the worker on " in err and "1 are left" in err and "Traceback" not in err
    assert 0 < before < sum(map(len, whole.values()))
    assert outputs(out) == whole


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for options, message in (
        (("x", "-o", "y", "--output-dir", "z"), "--output and --output-dir"),
        (("x", "--ray", "auto"), "--ray is for --output-dir"),
        (("--output-dir", "z"), "output_dir needs the names of files to translate (output_dir: --output-dir)"),
    ):
        done = transduce("translate", tmp_path / "run", *options)
        assert done.code == 2 and message in done.err and done.out == ""

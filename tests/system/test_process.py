"""`doctor` leaves no process and no folder behind after a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RECIPE = """[data]
demo = 400
[model]
preset = "tiny"
d_model = 32
d_ff = 64
n_heads = 2
[tokenizer]
vocab_size = 200
[training]
max_updates = 100000
batch_tokens = 512
"""
DOCTOR = ("doctor", "r.toml", "--set", "training.batch_tokens=60000")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_the_openmp_of_pytorch_spins_briefly_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    code = (
        "import contextlib\n"
        "from transduce.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\n"
        "import torch\n"
        "assert 'libgomp' in open('/proc/self/maps').read()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGHUP, 129)])
def test_no_process_or_folder_survives(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    before = {"r.toml", "tmp"}
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "transduce", *DOCTOR]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not (started := children(process.pid)):
            assert process.poll() is None and time.monotonic() < until, "no child process was started"
            time.sleep(0.02)
        time.sleep(2.0)  # the child process is up
        assert all(map(is_running, started))
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, err
    until = time.monotonic() + 10
    while any(map(is_running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, started)), "a child process survived"
    if number != signal.SIGKILL:
        assert {one.name for one in tmp_path.iterdir()} == before and not list((tmp_path / "tmp").iterdir())
        assert "Traceback" not in err and signal.Signals(number).name in err

"""`make wheels`: the package and its native library in an environment without the source tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import marians

ROOT = Path(__file__).parents[2]
BUILT = "build", "*.egg-info", ".venv", "dist", "*.so"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.loopback,  # pip tries whether the machine has IPv6
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy with what is compiled already, as two builds in one tree would disturb each other."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheels")
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*BUILT), symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    if (ROOT / "native" / "build").exists():
        build = Path("native", "build")
        shutil.copytree(ROOT / build, tree / build, ignore=shutil.ignore_patterns("sanitize", "tsan"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    for project in (".", "./native"):
        subprocess.run([*command, "--wheel-dir", str(out), project], cwd=tree, check=True)
    return out


def test_wheels_contain_the_library_the_license_and_matching_versions(wheels: Path) -> None:
    main, native = sorted(wheels.iterdir())
    version = re.match(r"transduce-(.+)-py3-none-any\.whl", main.name)
    found = re.match(r"transduce_native-(.+)-py3-none-manylinux_2_(\d+)_x86_64\.whl", native.name)
    assert version and found and version[1] == found[1] and int(found[2]) <= 34
    names = zipfile.ZipFile(native).namelist()
    assert "transduce_native/libtransduce_native.so" in names and any(name.endswith("/LICENSE") for name in names)
    assert f'native = ["transduce-native=={version[1]}"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(main).namelist())


def test_the_library_of_the_wheel_translates(wheels: Path, tmp_path: Path) -> None:
    run = marians.make_run(tmp_path / "run")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    shared = (path for path in sys.path if path.endswith("-packages"))  # an editable install has no modules there
    (packages / "shared.pth").write_text("\n".join(shared), encoding="utf-8")
    main, native = sorted(wheels.iterdir())

    def translate(*wheels: Path) -> subprocess.CompletedProcess[str]:
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*install, "--ignore-installed", *map(str, wheels)], check=True)
        command = [str(python.with_name("transduce")), "translate", str(run), "--device", "cpu"]
        text = "\n".join(marians.LINES[:8])
        return subprocess.run(command, input=text, capture_output=True, text=True, cwd=tmp_path, check=True)

    slow, fast = translate(main), translate(native)
    assert "install transduce-native" in slow.stderr and "PyTorch" not in fast.stderr
    assert fast.stdout == slow.stdout and len(fast.stdout.splitlines()) == 8

"""Installing: the sdist, wheels with and without the native library, and other processors."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import marians

ROOT = Path(__file__).parents[2]
LIBRARY = "transduce/kernels/libtransduce_native.so"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.loopback,  # pip tries whether the machine has IPv6
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture(autouse=True)
def any_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated processors have other instruction sets than the one that the tests may run under."""
    monkeypatch.delenv("TRANSDUCE_NATIVE_ISA", raising=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist, with the objects that are compiled already."""
    folder = tmp_path_factory.mktemp("sdist")
    sdist = ["egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder)]
    subprocess.run([sys.executable, "setup.py", "-q", *sdist], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    tree = folder / archive.name.removesuffix(".tar.gz")
    if (ROOT / "native" / "build").exists():
        shutil.copytree(
            ROOT / "native" / "build", tree / "native" / "build", ignore=shutil.ignore_patterns("sanitize", "tsan")
        )
    return tree


def build_wheel(source: Path, **environment: str) -> Path:
    shutil.rmtree(source / "build", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    out = source / "wheels"
    subprocess.run([*command, "--wheel-dir", str(out), "."], cwd=source, check=True, env=os.environ | environment)
    return max(out.iterdir(), key=lambda wheel: wheel.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build_wheel(source, TRANSDUCE_NATIVE_REQUIRED="1")


def test_the_wheel_needs_only_glibc_2_28_and_the_runtime_of_gcc_8(wheel: Path) -> None:
    platform = re.fullmatch(r"transduce-.+-py3-none-manylinux_2_(\d+)_x86_64\.whl", wheel.name)
    assert platform and int(platform[1]) <= 28
    with zipfile.ZipFile(wheel) as content:
        assert any(name.endswith("/LICENSE") for name in content.namelist())
        runtime = [int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", content.read(LIBRARY))]
    assert max(runtime) <= 25


def test_wheels_translate_alike_with_and_without_the_library_and_on_old_processors(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    run = marians.make_run(tmp_path / "run")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    shared = (path for path in sys.path if path.endswith("-packages"))  # an editable install has no modules there
    (packages / "shared.pth").write_text("\n".join(shared), encoding="utf-8")

    def install(wheel: Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*command, "--force-reinstall", str(wheel)], check=True)

    def transduce(*arguments: str, emulator: tuple[str, ...] = (), **environment: str) -> str:
        done = subprocess.run(
            [*emulator, str(python), "-m", "transduce", *arguments],
            input="\n".join(marians.LINES[:4]),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
            env=os.environ | environment,
        )
        return done.stdout

    translate = "translate", str(run), "--device", "cpu"
    without = build_wheel(source, CXX="no-such-compiler")
    assert without.name.endswith("-py3-none-any.whl") and LIBRARY not in zipfile.ZipFile(without).namelist()
    install(without)
    assert "PyTorch" in (shown := transduce("--version")) and "the native library is not built" in shown
    expected = transduce(*translate)
    assert len(expected.splitlines()) == 4

    install(wheel)
    assert "native library" in transduce("--version")
    assert transduce(*translate) == transduce(*translate, TRANSDUCE_NATIVE_ISA="portable") == expected
    if emulator := shutil.which("qemu-x86_64"):  # an Intel processor of 2008, without AVX; NumPy fails to recognize it
        old = {"emulator": (emulator, "-cpu", "Nehalem"), "OPENBLAS_CORETYPE": "Nehalem"}
        assert transduce(*translate, **old) == expected  # type: ignore[arg-type]


def test_an_installation_that_requires_the_library_fails_without_a_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    environment = {"CXX": "no-such-compiler", "TRANSDUCE_NATIVE_REQUIRED": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode != 0 and "no C++ compiler (no-such-compiler)" in done.stderr


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no cross compiler")
def test_the_library_compiles_and_decodes_on_aarch64(tmp_path: Path) -> None:
    compiler = "aarch64-linux-gnu-g++"
    environment = {"CXX": compiler, "CXXFLAGS": "-O1 -Werror", "TRANSDUCE_NATIVE_REQUIRED": "1"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | environment)
    if (emulator := shutil.which("qemu-aarch64")) is None:
        return
    stress = [compiler, "-std=c++17", "-Inative/src", "-o", tmp_path / "stress", "native/tests/stress.cpp"]
    subprocess.run([*stress, tmp_path / LIBRARY, "-pthread"], cwd=ROOT, check=True)
    paths = ["-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={(tmp_path / LIBRARY).parent}"]
    for cpu, isa in (("cortex-a57", "portable"), ("max,pauth-impdef=on", "neon_i8mm")):
        command = [emulator, "-cpu", cpu, *paths, str(tmp_path / "stress")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.startswith(f"{isa}: "), done.stderr

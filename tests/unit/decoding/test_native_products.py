"""The products of every instruction set against plain sums: compiled alone, on this CPU or emulated."""

import shutil
import subprocess
from pathlib import Path

import pytest

from native_engines import instruction_sets, needs_library

ROOT = Path(__file__).parents[3]
AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
FLAGS = {
    "portable": [],
    "avx2": AVX2,
    "avx_vnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512_vnni": [*AVX512, "-mavx512vnni"],
}
EMULATED = {
    "avx_vnni": ["-DEMULATED_AVXVNNI"],
    "avx512": ["-DEMULATED_AVX512F"],
    "avx512_vnni": ["-DEMULATED_AVX512F", "-DEMULATED_AVX512VNNI"],
}
AARCH64 = {"neon": [], "neon_dot": ["-march=armv8.2-a+dotprod"], "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"]}


def run_products(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> None:
    """Compile native/tests/products.cpp and run it."""
    common = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"]
    sources = [
        "native/tests/products.cpp",
        "native/src/product.cpp",
        "native/src/platform.cpp",
        "-Inative/src",
        "-o",
        str(folder / "products"),
    ]
    subprocess.run([compiler, *common, *flags, *sources], cwd=ROOT, check=True)
    done = subprocess.run([*emulator, folder / "products"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith(": 0 wrong numbers\n"), done


@needs_library
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("isa", FLAGS)
def test_int8_products_are_exact_and_float32_products_add_in_order(isa: str, tmp_path: Path) -> None:
    available = instruction_sets()
    if isa in available:
        run_products(tmp_path, "c++", *FLAGS[isa])
    elif "avx2" in available:
        run_products(tmp_path, "c++", *AVX2, *EMULATED[isa], "-include", "native/tests/emulated_avx512.h")
    else:
        pytest.skip(f"this CPU has no {isa} and cannot emulate it")


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")), reason="no cross compiler or emulator"
)
@pytest.mark.parametrize("isa", AARCH64)
def test_products_on_aarch64(isa: str, tmp_path: Path) -> None:
    emulator = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    run_products(tmp_path, "aarch64-linux-gnu-g++", *AARCH64[isa], emulator=emulator)

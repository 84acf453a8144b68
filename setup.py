"""Builds the native decoding library (native/src) as an optional part of the package. All else is in pyproject.toml.

    pip install .                           with the library if there is a C++ compiler, and without it if not
    python setup.py build_ext --inplace     compile what has changed, next to the Python code (`make native`)

CXX names the compiler, which may be a cross compiler; CXXFLAGS and LDFLAGS replace the defaults below. With
TRANSDUCE_NATIVE_REQUIRED=1 an installation fails if the library cannot be built.
TRANSDUCE_EMULATED_TILES=1 compiles native/tests/emulated_tiles.h in, TRANSDUCE_EMULATED_AVX512=1 emulated_avx512.h.
"""

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from zlib import crc32

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

NAME = "transduce.kernels.libtransduce_native"
SOURCES = Path("native/src")
OBJECTS = Path("native/build")
# No contracted floating-point operations: a result must not depend on how a kernel was compiled.
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"]

AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
# GCC 12 warns about its AVX-512 header (bug 105593).
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")), "-mprefer-vector-width=512"]
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*VNNI, "-mavx512bf16"]
AMX = [*VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"]
# Kernels are compiled once per instruction set and chosen at load time. Other processors have the portable ones.
X86_64 = {
    "target_avx2": AVX2,
    "target_avx_vnni": [*AVX2, "-mavxvnni"],
    "target_avx512": AVX512,
    "target_avx2_training": AVX2,
    "target_avx512_training": AVX512,
    "target_vnni": VNNI,
    "target_bf16": BF16,
    "target_amx": AMX,
    "target_amx_bf16": AMX,
}
AMX_ONLY = [name for name, flags in X86_64.items() if flags is AMX]
# GCC's first scheduling would need more registers than there are.
NEON = ["-fno-schedule-insns"]
AARCH64 = {
    "target_neon_dot": [*NEON, "-march=armv8.2-a+dotprod"],
    "target_neon_i8mm": [*NEON, "-march=armv8.2-a+dotprod+i8mm"],
}
TARGETS = X86_64 | AARCH64


class BuildLibrary(build_ext):
    """Compiles the library, which is loaded with ctypes: no Python headers, and one file for all versions of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain name, without the version of Python."""
        return f"{fullname.replace('.', os.sep)}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile the sources of the compiler's processor in parallel, and link them."""
        ext.optional = os.environ.get("TRANSDUCE_NATIVE_REQUIRED", "0") in ("", "0")
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        options = shlex.split(os.environ.get("CXXFLAGS", "-O3"))
        try:
            machine = subprocess.run([*compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError):
            missing = f"no C++ compiler ({shlex.join(compiler)}), so the native library is not built"
            if not ext.optional:
                raise CompileError(missing) from None
            return print(f"transduce: {missing}: PyTorch will decode, which is slower")
        is_x86_64, is_aarch64 = machine.startswith(("x86_64", "amd64")), machine.startswith(("aarch64", "arm64"))
        others = {*(() if is_x86_64 else X86_64), *(() if is_aarch64 else AARCH64)}
        sources = [source for source in map(Path, ext.sources) if source.stem not in others]
        library = Path(self.get_ext_fullpath(ext.name))
        for folder in (OBJECTS, library.parent):
            folder.mkdir(parents=True, exist_ok=True)
        command = [*compiler, *FLAGS, *WARNINGS, *options]
        link = [*compiler, "-shared", *options, *shlex.split(os.environ.get("LDFLAGS", "-s")), "-pthread"]
        try:
            with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
                objects = list(pool.map(lambda source: compiled(source, command), sources))
            subprocess.run([*link, "-o", library, *objects], check=True)
        except subprocess.CalledProcessError as error:
            raise CompileError(f"{shlex.join(map(str, error.cmd))}: exit code {error.returncode}") from None


def compiled(source: Path, command: list[str]) -> Path:
    """The object file of a source, compiled again if what it includes has changed. Its name depends on the options."""
    flags = TARGETS.get(source.stem, [])
    is_emulated = set(flags) - set(AVX2) or source.stem in ("cpu", "training_loss")
    if "TRANSDUCE_EMULATED_AVX512" in os.environ and is_emulated:
        emulated = [f"-DEMULATED_{flag[2:].upper()}" for flag in flags if "avx512" in flag or "vnni" in flag]
        flags = [*AVX2, *emulated, *(flag for flag in flags if "amx" in flag)]
        flags += ["-include", "native/tests/emulated_avx512.h", "-O1"]
    if "TRANSDUCE_EMULATED_TILES" in os.environ and source.stem in ("cpu", "training_loss", *AMX_ONLY):
        flags = [*flags, "-include", "native/tests/emulated_tiles.h", "-O1"]  # compiles in a third of the time of -O3
    if "ziglang" in command:  # which knows no -march; GCC 12 gives `generic` no dot products
        flags = [flag.replace("-march=armv8.2-a", "-mcpu=generic") for flag in flags]
    command = [*command, *flags]
    output = OBJECTS / f"{source.stem}-{crc32(shlex.join(command).encode()):08x}.o"
    included = output.with_suffix(".d")
    if output.exists() and included.exists():
        files = map(Path, included.read_text(encoding="utf-8").replace("\\\n", " ").split()[1:])
        if all(file.exists() and file.stat().st_mtime <= output.stat().st_mtime for file in files):
            return output
    partial = output.with_suffix(".partial")
    subprocess.run([*command, "-MMD", "-MF", included, "-c", "-o", partial, source], check=True)
    return partial.replace(output)


class BuildModules(build_py):
    """Collects the modules of this version only."""

    def run(self) -> None:
        """Remove what an earlier build has left: a module that is deleted since would be installed."""
        if not self.editable_mode:
            rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """One wheel for every Python 3, named after the glibc that the library needs."""

    def get_tag(self) -> tuple[str, str, str]:
        """Without the library, the wheel is for any machine. The glibc is the newest of which it uses a symbol."""
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath(NAME))
        if not library.exists():
            return "py3", "none", "any"
        platform = super().get_tag()[2]
        if needed := [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())]:
            platform = re.sub("^linux", f"manylinux_2_{max(17, *needed)}", platform)
        return "py3", "none", platform


def listed(*suffixes: str) -> list[str]:
    """The files of native/src with these suffixes."""
    return sorted(str(file) for file in SOURCES.iterdir() if file.suffix in suffixes)


setup(
    ext_modules=[Extension(NAME, listed(".cpp"), depends=listed(".h", ".inl"), optional=True)],
    cmdclass={"build_ext": BuildLibrary, "build_py": BuildModules, "bdist_wheel": Wheel},
)

"""Builds the wheel: compiles the library with the Makefile, and names the platform that it needs."""

import re
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "../src/transduce/__init__.py").read_text(encoding="utf-8"))


class BuildLibrary(build_py):
    """Compiles the library into the package."""

    def run(self):
        """Copy the package, then run make."""
        super().run()
        self.library = Path(self.build_lib).absolute() / "transduce_native" / "libtransduce_native.so"
        subprocess.run(["make", "-s", "-j2", f"LIBRARY={self.library}", "LDFLAGS=-s"], cwd=HERE, check=True)


class BinaryDistribution(Distribution):
    """Belongs with compiled packages, though nothing in it is a Python extension."""

    def has_ext_modules(self):
        """Always."""
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3 on systems with the glibc that the library asks for, or a newer one."""

    def get_tag(self):
        """The glibc is the newest of which the library uses a symbol."""
        platform = super().get_tag()[2]
        library = self.get_finalized_command("build_py").library.read_bytes()
        glibc = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library))
        return "py3", "none", re.sub("^linux", f"manylinux_2_{max(glibc, 17)}", platform)


setup(
    version=VERSION[1],
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildLibrary, "bdist_wheel": PlatformWheel},
)

"""The machine: device, threads, free memory and precision."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transduce.errors import SettingsError

if TYPE_CHECKING:
    import torch

_GPU_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Files of GPU drivers: NVIDIA, Tegra, Windows (WSL), AMD. Without one, Linux has no GPU that PyTorch could use."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of a machine for one process of a training.

    `memory`: bytes that the process may use. `precision`: precision of matrix products. `n_sharing`: number of
    processes that share the memory of the machine.
    """

    device: Literal["cpu", "cuda"]
    name: str
    n_threads: int
    memory: int
    precision: str
    n_sharing: int = 1

    @property
    def flops(self) -> float:
        """A rough estimate of the floating-point operations per second in training, to estimate times."""
        return 1.0e14 if self.device == "cuda" else 6.0e10 * self.n_threads

    def describe(self) -> str:
        cores = f", {self.n_threads} thread{'' if self.n_threads == 1 else 's'}" if self.device == "cpu" else ""
        each = f" for each of {self.n_sharing} processes" if self.n_sharing > 1 else ""
        return f"{self.name} ({self.device}{cores}, {self.memory / 2**30:.0f} GiB free{each})"

    def shared(self, n: int, n_here: int) -> Machine:
        """Return the machine for a training of `n` processes, `n_here` of which run on this machine.

        The result has the threads of all processes and the memory of one process. Each process has its own GPU.
        """
        if self.device == "cuda":
            return self
        return replace(self, n_threads=self.n_threads * n, memory=self.memory // n_here, n_sharing=n_here)


def this_machine(device: str) -> Machine:
    """Return this machine. `device`: auto, cpu or cuda. Raises `SettingsError` if there is no such device."""
    import torch

    where = find_device(device, setting="training.device")
    precision = choose_precision(where)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return Machine("cuda", torch.cuda.get_device_name(), os.cpu_count() or 1, free, precision)
    return Machine("cpu", _processor(), torch.get_num_threads(), _free_memory(), precision)


def find_device(name: str, *, setting: str = "device") -> torch.device:
    """Return the device named auto, cpu or cuda. Raises `SettingsError`, with the setting, if there is none."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"{setting} = {name!r}: allowed are auto, cpu and cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"{setting} = 'cuda': PyTorch finds no CUDA device; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def is_cpu(name: str) -> bool:
    """Whether the device called auto, cpu or cuda is the CPU. Errors as for `find_device`.

    Importing PyTorch takes seconds, so it is imported only if there may be a GPU.
    """
    if name == "cpu" or (name == "auto" and not _may_have_gpu()):
        return True
    return find_device(name).type == "cpu"


def _may_have_gpu() -> bool:
    """Whether PyTorch is installed and the machine may have a GPU that it can use."""
    has_driver = sys.platform != "linux" or any(map(os.path.exists, _GPU_FILES))
    return has_driver and find_spec("torch") is not None


def choose_precision(device: torch.device) -> str:
    """Return "bfloat16" if the GPU or CPU (AVX512-BF16) has instructions for it, otherwise "float32".

    Nothing is measured, so that two runs on one machine do not differ.
    """
    import torch

    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # the capability follows ATEN_CPU_CAPABILITY
        capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.13 has it
        has_instructions = capabilities.get("avx512_bf16", False)
        has_bfloat16 = torch.backends.cpu.get_cpu_capability() == "AVX512" and has_instructions
    return "bfloat16" if has_bfloat16 else "float32"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _free_memory() -> int:
    """Return the bytes available without swapping, within a container's limit; 4 GiB if they are unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable"))
        free = int(kilobytes) * 1024
    except (OSError, StopIteration, ValueError):
        free = 4 * 2**30
    room = container_memory(Path("/sys/fs/cgroup"))
    return free if room is None else min(free, room)


def container_memory(cgroup: Path) -> int | None:
    """Return the bytes left below the limit of a control group (version 2 or 1); None without a limit.

    The cache of files counts as free: the system drops it when memory is needed.
    """
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = (int((cgroup / name).read_text(encoding="ascii")) for name in (limit, used))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
        with contextlib.suppress(OSError, ValueError):
            lines = (cgroup / limit).with_name("memory.stat").read_text(encoding="ascii").splitlines()
            taken -= sum(int(line.split()[1]) for line in lines if line.startswith(f"{cache} "))
        return max(0, most - max(0, taken))
    return None

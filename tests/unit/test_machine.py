"""Free memory and threads, with the memory limits of containers."""

from pathlib import Path

import pytest

from transduce import machine
from transduce.process import raise_file_limit

GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712


def group(path: Path, **files: object) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{content}\n")
    return path


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": GIB}, None),
        ({"memory.max": 4 * GIB, "memory.current": GIB}, 3 * GIB),
        ({"memory.max": 4 * GIB, "memory.current": 5 * GIB}, 0),
        ({"memory.max": 4 * GIB}, None),
        (
            {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 7\ninactive_file {GIB}\nx 1"},
            2 * GIB,
        ),
        ({"memory/memory.limit_in_bytes": 2 * GIB, "memory/memory.usage_in_bytes": GIB}, GIB),
        (
            {
                "memory/memory.limit_in_bytes": 2 * GIB,
                "memory/memory.usage_in_bytes": GIB,
                "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}",
            },
            GIB + GIB // 2,
        ),
    ],
)
def test_memory_left_in_a_control_group(files: dict[str, object], room: int | None, tmp_path: Path) -> None:
    assert machine.container_memory(group(tmp_path, **files)) == room


def test_a_missing_limit_of_version_1_is_a_very_large_number(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": NO_LIMIT_V1, "memory/memory.usage_in_bytes": GIB}
    room = machine.container_memory(group(tmp_path, **files))
    assert room is not None and room > 2**60


@pytest.mark.parametrize(
    ("capability", "has_bfloat16", "expected"),
    [("AVX512", True, "bfloat16"), ("AVX512", False, "float32"), ("AVX2", True, "float32")],
)
def test_bfloat16_is_chosen_by_the_instructions_of_the_cpu(
    capability: str, has_bfloat16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    assert machine.this_machine("cpu").precision == expected


def test_processes_of_one_machine_share_its_memory_but_not_its_gpus() -> None:
    laptop = machine.Machine("cpu", "laptop", 2, 8 * GIB, "float32")
    four = laptop.shared(8, 4)
    assert (four.n_threads, four.memory) == (16, 2 * GIB)
    assert four.describe() == "laptop (cpu, 16 threads, 2 GiB free for each of 4 processes)"
    assert laptop.shared(1, 1) == laptop
    card = machine.Machine("cuda", "card", 16, 80 * GIB, "bfloat16")
    assert card.shared(2, 2) == card


def test_the_smaller_of_machine_and_container_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = machine.this_machine("cpu").memory
    monkeypatch.setattr(machine, "container_memory", lambda path: free // 16)
    assert machine.this_machine("cpu").memory == free // 16
    monkeypatch.setattr(machine, "container_memory", lambda path: 2**62)
    assert machine.this_machine("cpu").memory < 2**60


@pytest.mark.parametrize(
    ("soft", "hard", "new"),
    [(256, 2**63 - 1, 4096), (1024, 2**20, 4096), (1024, 2048, 2048), (2**16, 2**20, 2**16)],
    ids=["macOS", "Linux", "few", "many"],
)
def test_the_limit_of_open_files_is_raised(soft: int, hard: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: limits.append(values))
    raise_file_limit()
    assert limits == [(new, hard)]

"""Files of vectors for tests: noisy vectors of random symbols, with the symbols as text and the commonest as label."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WIDTH, SYMBOLS = 5, "abcd"


def write_vectors(path: Path, sequences: list[np.ndarray], **more: np.ndarray) -> Path:
    """A file of these sequences [S, N]."""
    lengths = np.array([len(one) for one in sequences])
    save_file({"vectors": np.concatenate(sequences).astype(np.float32), "lengths": lengths, **more}, path)
    return path


def write_task(folder: Path, name: str, n: int, *, seed: int, most: int = 6) -> tuple[Path, Path]:
    """`n` sequences of 1 to `most` vectors with labels, and a text file with their symbols."""
    draw = np.random.default_rng(seed)
    table = np.random.default_rng(0).normal(size=(len(SYMBOLS), WIDTH))
    numbers = [draw.integers(0, len(SYMBOLS), draw.integers(1, most + 1)) for _ in range(n)]
    vectors = [table[one] + 0.1 * draw.normal(size=(len(one), WIDTH)) for one in numbers]
    labels = np.array([np.bincount(one).argmax() for one in numbers])
    text = folder / f"{name}.txt"
    text.write_text("".join(" ".join(SYMBOLS[i] for i in one) + "\n" for one in numbers))
    return write_vectors(folder / f"{name}.safetensors", vectors, labels=labels), text

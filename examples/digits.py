"""Write scikit-learn's handwritten digits as files of vectors: `python examples/digits.py FOLDER` (docs/vision.md).

An image of 8x8 pixels becomes 16 vectors: patches of 2x2 pixels, row by row, as in a Vision Transformer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

SIZES = {"test": 360, "valid": 100, "train": 1337}
SIDE = 2
SHIFTS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
"""Of the training images, in pixels."""


def patches(images: np.ndarray) -> np.ndarray:
    """Images [n, H, W] as [n * patches, SIDE * SIDE]."""
    n, height, width = images.shape
    cut = images.reshape(n, height // SIDE, SIDE, width // SIDE, SIDE).transpose(0, 1, 3, 2, 4)
    return cut.reshape(-1, SIDE * SIDE)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    digits, start = load_digits(), 0
    order = np.random.default_rng(0).permutation(len(digits.images))
    pixels = np.pad((digits.images - digits.images.mean()) / digits.images.std(), ((0, 0), (1, 1), (1, 1)), mode="edge")
    for name, size in SIZES.items():
        chosen, start = order[start : start + size], start + size
        shifts = SHIFTS if name == "train" else SHIFTS[:1]
        images = np.concatenate([pixels[chosen, 1 + y : 9 + y, 1 + x : 9 + x] for y, x in shifts])
        vectors = patches(images).astype(np.float32)
        lengths = np.full(len(images), len(vectors) // len(images))
        labels = np.tile(digits.target[chosen], len(shifts)).astype(np.int64)
        path = folder / f"{name}.safetensors"
        save_file({"vectors": vectors, "lengths": lengths, "labels": labels}, path)
        print(f"{path}: {len(images):,} images, each of {lengths[0]} vectors of {vectors.shape[1]} numbers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

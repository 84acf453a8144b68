"""transduce: from raw text to a translator, or to a model that goes on with text. See `transduce --help` and docs/."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
_LAZY = {
    "MaskFiller": "transduce.decoding.mask_filler",
    "Generator": "transduce.decoding.generator",
    "Settings": "transduce.config",
    "TextClassifier": "transduce.decoding.classifier",
    "Translator": "transduce.decoding.translator",
    "diagnose": "transduce.doctor.diagnose",
    "train": "transduce.pipeline",
}
__all__ = ["Generator", "MaskFiller", "Settings", "TextClassifier", "Translator", "__version__", "diagnose", "train"]


def __getattr__(name: str) -> object:
    """Hand names on only when they are asked for: `import transduce` must pull no torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'transduce' has no attribute {name!r}")

"""transduce: from raw text to a translator, a language model or a classifier. See `transduce --help` and docs/."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
_LAZY = {
    "Budget": "transduce.comparison.recipes",
    "DecodingOptions": "transduce.config.decoding",
    "DecodingQueue": "transduce.decoding.queue",
    "DistillationOptions": "transduce.distillation.text",
    "Generator": "transduce.decoding.generator",
    "MaskFiller": "transduce.decoding.mask_filler",
    "RayCluster": "transduce.bulk.ray_cluster",
    "Settings": "transduce.config.settings",
    "TextClassifier": "transduce.decoding.classifier",
    "Translator": "transduce.decoding.translator",
    "compare": "transduce.comparison.compare",
    "diagnose": "transduce.doctor.diagnose",
    "distill": "transduce.distillation.distill",
    "inspect": "transduce.inspection.look",
    "train": "transduce.pipeline",
    "translate_to_folder": "transduce.bulk.translate",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> object:
    """Import names when they are first used, so that `import transduce` does not import torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'transduce' has no attribute {name!r}")

"""transduce: from raw text to a translator, a language model or a classifier. See `transduce --help` and docs/."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names below, for type checkers and editors
    from transduce.bulk.ray_cluster import RayCluster as RayCluster
    from transduce.bulk.translate import translate_to_folder as translate_to_folder
    from transduce.comparison.compare import compare as compare
    from transduce.config.decoding import DecodingOptions as DecodingOptions
    from transduce.config.settings import Settings as Settings
    from transduce.convert.publishing import push_to_hub as push_to_hub
    from transduce.decoding.encoders import MaskFiller as MaskFiller
    from transduce.decoding.encoders import TextClassifier as TextClassifier
    from transduce.decoding.generator import Generator as Generator
    from transduce.decoding.queue import DecodingQueue as DecodingQueue
    from transduce.decoding.translator import Translator as Translator
    from transduce.distillation.distill import distill as distill
    from transduce.doctor.diagnose import diagnose as diagnose
    from transduce.inspection.inspection import inspect as inspect
    from transduce.pipeline import train as train

__version__ = "0.1.0"
_LAZY = {
    "DecodingOptions": "transduce.config.decoding",
    "DecodingQueue": "transduce.decoding.queue",
    "Generator": "transduce.decoding.generator",
    "MaskFiller": "transduce.decoding.encoders",
    "RayCluster": "transduce.bulk.ray_cluster",
    "Settings": "transduce.config.settings",
    "TextClassifier": "transduce.decoding.encoders",
    "Translator": "transduce.decoding.translator",
    "compare": "transduce.comparison.compare",
    "diagnose": "transduce.doctor.diagnose",
    "distill": "transduce.distillation.distill",
    "inspect": "transduce.inspection.inspection",
    "push_to_hub": "transduce.convert.publishing",
    "train": "transduce.pipeline",
    "translate_to_folder": "transduce.bulk.translate",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> object:
    """Import names when they are first used, so that `import transduce` does not import torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'transduce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

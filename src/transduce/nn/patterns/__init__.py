"""Attention patterns: which keys a query may attend to, by their positions, and how sparse patterns are computed.

To add one: a class in `pattern.py` with a layout from `layouts.py`, and a row of PATTERNS there.
"""

from transduce.nn.patterns.bias import (
    Bias,
    BlockBias,
    CausalBias,
    RelativeBias,
    SpecialBias,
    SplitBias,
    attended,
    dense_bias,
    fuses_on_cpu,
    padded_bias,
    sequence_bias,
    step_bias,
)
from transduce.nn.patterns.pattern import (
    PATTERNS,
    SPREADS,
    BlockPattern,
    CausalPattern,
    FullPattern,
    LocalPattern,
    StridedPattern,
    SummaryPattern,
    make_patterns,
)

__all__ = [
    "PATTERNS",
    "SPREADS",
    "Bias",
    "BlockBias",
    "BlockPattern",
    "CausalBias",
    "CausalPattern",
    "FullPattern",
    "LocalPattern",
    "RelativeBias",
    "SpecialBias",
    "SplitBias",
    "StridedPattern",
    "SummaryPattern",
    "attended",
    "dense_bias",
    "fuses_on_cpu",
    "make_patterns",
    "padded_bias",
    "sequence_bias",
    "step_bias",
]

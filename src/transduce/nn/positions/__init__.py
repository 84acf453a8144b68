"""Positional schemes: the POSITIONS table. To add one: a file in this package, and a row here."""

from transduce.nn.positions.absolute import HalvedSinusoidalPositions, LearnedPositions, SinusoidalPositions
from transduce.nn.positions.relative import AlibiPositions, RotaryPositions, ShawPositions, T5Positions
from transduce.nn.positions.scheme import Positions

POSITIONS = {
    "sinusoidal": SinusoidalPositions,
    "sinusoidal_halves": HalvedSinusoidalPositions,
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
    "alibi": AlibiPositions,
    "t5": T5Positions,
    "shaw": ShawPositions,
    "none": Positions,
}

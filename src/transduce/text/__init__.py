"""Text to token ids and back."""

from transduce.text.pieces import PieceTokenizer
from transduce.text.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Tokenizers
from transduce.text.training import train_tokenizer, train_tokenizers

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "PieceTokenizer",
    "Tokenizer",
    "Tokenizers",
    "train_tokenizer",
    "train_tokenizers",
]

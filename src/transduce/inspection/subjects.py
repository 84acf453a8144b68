"""Models that can be looked into: from a run folder and texts to inputs, and from inputs to predictions.

SUBJECTS has an entry per task. All take one sentence at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.decoding import DecodingOptions, DecodingSettings
from transduce.config.section import resolved
from transduce.data.batch import collate
from transduce.data.examples import Example
from transduce.data.sentence_pairs import pack
from transduce.decoding.alignment import words_of_tokens
from transduce.decoding.loading import open_model
from transduce.errors import DataError, SettingsError
from transduce.inspection.replay import Replay, replay
from transduce.nn.embedding import TokenEmbedding
from transduce.runs.folder import RunFolder
from transduce.text.special import BOS, EOS, MASK, Vocabulary, encode_with_masks
from transduce.text.tokenizer import Tokenizers

MOST_TOKENS = 256
"""Tokens of a sentence that can be looked into: what is shown grows with their square."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a sentence: its text, its tokens with special ones, the word of each token and the words' texts.

    Without texts, each token is a word.
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    words: tuple[int, ...]
    word_texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, vocabulary: Vocabulary, ids: Sequence[int], text: str) -> Side:
        """A side from its ids; each special token is a word."""
        pieces = vocabulary.pieces(ids)
        owners, n = list[int](), 0
        plain = [i for i, token in enumerate(ids) if token not in (BOS, EOS)]
        again, places = vocabulary.encode_with_offsets(text)
        inside = words_of_tokens(text, places)[0] if again == [ids[i] for i in plain] else list(range(len(plain)))
        for i in range(len(ids)):
            owners.append(inside[plain.index(i)] + n if i in plain else (owners[-1] + 1 if owners else 0))
            n += i not in plain and not i
        words = [[i for i, owner in enumerate(owners) if owner == word] for word in dict.fromkeys(owners)]
        texts = [vocabulary.decode(ids[i] for i in word).strip() or "".join(pieces[i] for i in word) for word in words]
        return cls(text, tuple(ids), tuple(pieces), tuple(owners), tuple(texts))


@dataclass(frozen=True, slots=True)
class Sentence:
    """The subject of an inspection: the inputs of the model, the tokens that it should predict, and the sides by name.

    inputs: of `Subject.hidden`. targets: [T], a token to predict for each row of the logits; empty for a classifier.
    search: for the translation, step by step; None if the model does not translate.
    """

    inputs: tuple[Tensor, ...]
    targets: Int[Tensor, " T"]
    sides: dict[str, Side]
    search: Replay | None = None


class Subject(ABC):
    """A model with its vocabularies, ready to be looked into.

    embedding: the name of the module that embeds what predictions are attributed to, whose side is `read_side`.
    stack: the name of the stack whose layers the predictions come from. predicted: the side of the logits' rows.
    reads_pairs: whether a text has a target.
    """

    embedding: str
    read_side: str
    stack: str
    predicted: str = "tgt_out"
    reads_pairs = False

    def __init__(
        self,
        model: nn.Module,
        folder: RunFolder | None,
        tokenizers: Tokenizers,
        *,
        settings: DecodingSettings | None = None,
        longest: int | None = None,
    ) -> None:
        """Look into a model in eval mode.

        Args:
            model: The model.
            folder: Of its run, if it has one.
            tokenizers: Its vocabularies.
            settings: The values of decoding options (default: those of the run).
            longest: Most tokens of a sentence that the model takes (default: as the run says).
        """
        self.model: Any = model
        self.folder, self.tokenizers = folder, tokenizers
        self.name = "model" if folder is None else folder.path.name
        self.device = next(model.parameters()).device
        of_run = None if folder is None else folder.settings
        self.settings = settings or (of_run.decoding if of_run else DecodingSettings())
        positions = of_run.model.position_limit if of_run else None
        self.longest = min(MOST_TOKENS, longest or (positions or MOST_TOKENS) - (positions is not None))

    @abstractmethod
    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        """The sentence; a target that is not given is what the model writes after the prefix."""

    @abstractmethod
    def hidden(self, model: Any, *inputs: Tensor) -> Float[Tensor, "B T D"]:
        """The hidden states that `logits` takes, with gradients where they are asked for."""

    def logits(self, model: Any, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """The logits of hidden states."""
        return model.logits(hidden)

    def output_matrix(self, model: Any) -> tuple[Float[Tensor, "V D"], Float[Tensor, " V"] | None]:
        """The matrix before the softmax, and its bias."""
        return model.output_weight, model.output_bias

    def pieces(self, ids: Sequence[int]) -> Sequence[str]:
        """Names of predicted tokens or labels, by their ids."""
        return self.tokenizers.tgt.pieces(ids)

    def side_of(self, part: str) -> tuple[str, str]:
        """The sides that a part's positions and its keys belong to."""
        return self.read_side, self.read_side

    def _checked(self, ids: Any, what: str, *, may_be_empty: bool = False) -> Any:
        if len(ids) > self.longest:
            raise DataError(f"{what}: {len(ids)} tokens; at most {self.longest} can be shown; give a shorter text")
        if not len(ids) and not may_be_empty:
            raise DataError(f"the {what} is empty; give at least one word")
        return ids


class TranslationSubject(Subject):
    """An encoder-decoder."""

    embedding, read_side, stack = "src_embedding", "src", "decoder"
    reads_pairs = True

    def options(self) -> DecodingOptions:
        """Its decoding options."""
        options = DecodingOptions().over(self.settings)
        return options.model_copy(update={"n_best": options.beam, "sample": False})

    def source(self, text: str) -> tuple[Any, Tensor]:
        """The ids (or vectors) of a source, and as the model reads them, [1, S]."""
        ids = self._checked(self.tokenizers.src.encode(text), "source", may_be_empty=True)
        return ids, collate([Example(ids, [])]).src.to(self.device)

    def limit(self, src: Tensor) -> int:
        """Most tokens of a translation, with its end."""
        return min(self.options().most_output(src.shape[1] - 1), self.longest)

    def _known(self, prefix: Sequence[int]) -> Sequence[int]:
        if len(prefix) > self.longest or not all(0 <= i < self.tokenizers.n_tgt for i in prefix):
            raise DataError(f"prefix: at most {self.longest} token ids from 0 to {self.tokenizers.n_tgt - 1}")
        return prefix

    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        src_ids, src = self.source(text)
        limit = max(self.limit(src), len(self._known(prefix)) + 1)
        search = replay(model, src, self.options(), limit=limit, prefix=prefix)
        if target is None:
            tgt = list(search.results[0].ids) if search.results else []
        else:
            tgt = self._checked(self.tokenizers.tgt.encode(target), "translation", may_be_empty=True)
        batch = collate([Example(src_ids, tgt)]).to(self.device)
        tgt_text = self.tokenizers.tgt.decode(tgt) if target is None else target
        sides = {"src": self._source_side(batch.src[0].tolist(), text)}
        for name, ids in (("tgt_in", batch.tgt_in), ("tgt_out", batch.tgt_out)):
            sides[name] = Side.of(self.tokenizers.tgt, ids[0].tolist(), tgt_text)
        return Sentence((batch.src, batch.tgt_in), batch.tgt_out[0], sides, search)

    def _source_side(self, ids: list[Any], text: str) -> Side:
        if isinstance(self.model.src_embedding, TokenEmbedding):
            return Side.of(self.tokenizers.src, ids, text)
        places = tuple(range(len(ids)))  # vectors
        return Side(text, places, tuple(self.tokenizers.src.pieces(ids)), places)

    def hidden(self, model: Any, *inputs: Tensor) -> Tensor:
        return model(*inputs)

    def side_of(self, part: str) -> tuple[str, str]:
        if part.startswith(("src_embedding", "encoder", "bridge")):
            return "src", "src"
        # A row of cross-attention is named by the token that its step predicts.
        is_cross = "cross" in part or part.startswith("decoder.attention")
        return ("tgt_out", "src") if is_cross else ("tgt_in", "tgt_in")


class CausalSubject(Subject):
    """A language model: the text is what it should predict, token by token."""

    embedding, read_side, stack = "embedding", "tgt_in", "decoder"

    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        vocabulary = self.tokenizers.tgt
        ids = self._checked(vocabulary.encode(text), "text")
        row = [BOS, *ids]
        sides = {
            "tgt_in": Side.of(vocabulary, row[:-1], vocabulary.decode(row[1:-1])),
            "tgt_out": Side.of(vocabulary, row[1:], text),
        }
        tensor = torch.tensor([row], device=self.device)
        return Sentence((tensor[:, :-1],), tensor[0, 1:], sides)

    def hidden(self, model: Any, *inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # the state of `advance` changes in place; here a last segment may be padded
            return torch.cat(list(model.read(*inputs)), 1)
        state = model.start(inputs[0][:, :0], capacity=inputs[0].shape[1])
        return model.advance(inputs[0], state)


class MaskedSubject(Subject):
    """A masked language model: predictions for every token, those behind <mask> among them."""

    embedding, read_side, stack = "embedding", "src", "encoder"

    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        vocabulary = self.tokenizers.tgt
        framed = [int(i) for i in pack(self._checked(encode_with_masks(vocabulary, text), "text")).ids]
        rows = torch.tensor([framed], device=self.device)
        hidden = self.hidden(model, rows)
        best = self.logits(model, hidden)[0, :, MASK + 1 :].argmax(-1) + MASK + 1
        targets = torch.where(rows[0] == MASK, best, rows[0])
        sides = {
            "src": Side.of(vocabulary, framed, text),
            "tgt_out": Side.of(vocabulary, targets.tolist(), vocabulary.decode(targets.tolist())),
        }
        return Sentence((rows,), targets, sides)

    def hidden(self, model: Any, *inputs: Tensor) -> Tensor:
        encoded = model.encode(inputs[0], torch.zeros_like(inputs[0]))
        return model.head(encoded)


class ClassifierSubject(Subject):
    """A text classifier: one prediction, the label."""

    embedding, read_side, stack, predicted = "embedding", "src", "encoder", "label"

    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        vocabulary = self.tokenizers.tgt
        framed = [int(i) for i in pack(self._checked(vocabulary.encode(text), "text")).ids]
        rows = torch.tensor([framed], device=self.device)
        best = self.logits(model, self.hidden(model, rows))[0].argmax(-1)
        label = self.labels[int(best[0])]
        sides = {
            "src": Side.of(vocabulary, framed, text),
            "label": Side(label, (int(best[0]),), (label,), (0,)),
        }
        return Sentence((rows,), best, sides)

    @property
    def labels(self) -> Sequence[str]:
        """The labels, in the order of the logits."""
        assert self.folder is not None
        return resolved(self.folder.settings.data.labels, "data.labels")

    def hidden(self, model: Any, *inputs: Tensor) -> Tensor:
        return model.pooled(inputs[0], torch.zeros_like(inputs[0]))[:, None]

    def logits(self, model: Any, hidden: Tensor) -> Tensor:
        return model.labels(hidden)

    def output_matrix(self, model: Any) -> tuple[Tensor, Tensor | None]:
        return model.labels.weight, model.labels.bias

    def pieces(self, ids: Sequence[int]) -> Sequence[str]:
        return [self.labels[i] for i in ids]


SUBJECTS: dict[str, Callable[..., Subject]] = {
    "translation": TranslationSubject,
    "causal": CausalSubject,
    "masked": MaskedSubject,
    "classification": ClassifierSubject,
}
"""By task."""


def open_subject(path: str | Path, *, device: str = "auto", decoding: DecodingOptions | None = None) -> Subject:
    """The model of a run folder of any task. `decoding`: how it translates (default: as the run says).

    Raises:
        RunFolderError: The folder is missing or damaged.
        SettingsError: It is of a task that cannot be shown.
    """
    task = RunFolder.open(Path(path)).settings.task
    if task not in SUBJECTS:
        raise SettingsError(f"{path} is a run of task '{task[:40]}', which cannot be shown; {', '.join(SUBJECTS)} can")
    decoding = decoding or DecodingOptions()
    if task != "translation" and (given := sorted(decoding.model_fields_set)):
        raise SettingsError(f"{', '.join(given)}: no effect on task '{task}', of which {path} is a run; leave it out")
    folder, model, tokenizers = open_model(path, task=task, device=device)
    return SUBJECTS[task](model, folder, tokenizers, settings=decoding.over(folder.settings.decoding))

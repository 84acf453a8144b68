"""Models that can be inspected: one class per task turns a sentence into inputs, and outputs into predictions."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.decoding import DecodingOptions, DecodingSettings
from transduce.config.section import resolved
from transduce.data.batch import collate
from transduce.data.store import Example, pack
from transduce.decoding.alignment import words_of_tokens
from transduce.decoding.constraints import Beginning
from transduce.decoding.engine import Hypothesis
from transduce.decoding.open_run import open_model
from transduce.decoding.search import Continuations, Stepper, beam_search
from transduce.errors import DataError, SettingsError
from transduce.nn.embedding import TokenEmbedding
from transduce.runs.folder import RunFolder
from transduce.text.languages import Languages
from transduce.text.placeholders import Masked, placeholder_ids, prepare, restore, restore_pieces
from transduce.text.special import BOS, EOS, MASK, Vocabulary, encode_with_masks
from transduce.text.tokenizer import Tokenizers

_TOP = 10
_FREE = Beginning(())


@dataclass(slots=True)
class Node:
    """A hypothesis in a step of a search: its parent extended by a token.

    fate: kept, pruned or finished. top: the most probable next tokens with probabilities; empty if the search ended it.
    """

    id: int
    parent: int | None
    token: int
    log_prob: float
    fate: str
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded search: options, the best tokens of the first step, hypotheses of each step, and sorted results."""

    options: DecodingOptions
    first: list[tuple[int, float]]
    steps: list[list[Node]]
    results: list[Hypothesis]
    ends: list[int]  # id of the last node of each result


def replay(
    model: Stepper,
    src: Tensor,
    options: DecodingOptions,
    *,
    limit: int,
    beginning: Beginning = _FREE,
    copies: Sequence[int] | None = None,
) -> Replay:
    """Run `beam_search` on one source [1, S], and record every step."""
    log_probs = torch.empty(0)  # log-probabilities of the last step
    root = Node(0, None, 0, 0.0, "kept")
    steps, nodes, live = list[list[Node]](), [root], [root]

    def logits(hidden: Tensor) -> Tensor:
        nonlocal log_probs
        scores = model.logits(hidden)
        log_probs = scores.float().log_softmax(-1)
        return scores

    def watch(continuations: Continuations) -> None:
        nonlocal live
        for node, row in zip(live, log_probs, strict=False):
            top = row.topk(min(_TOP, len(row)))
            node.top = list(zip(top.indices.tolist(), top.values.exp().tolist(), strict=True))
        step, kept = list[Node](), list[Node]()
        for rank, (log_prob, parent, token) in enumerate(zip(*(x[0].tolist() for x in continuations), strict=True)):
            if log_prob == -float("inf"):
                continue
            ends = token == EOS
            # As in the search: of the `beam` best continuations, those that end are finished; the `beam` best
            # continuations that do not end stay live.
            fate = ("finished" if rank < options.beam else "pruned") if ends else "kept"
            if not ends and len(kept) == options.beam:
                fate = "pruned"
            node = Node(len(nodes), live[parent].id, token, log_prob, fate)
            nodes.append(node)
            step.append(node)
            if fate == "kept":
                kept.append(node)
        steps.append(step)
        live = kept

    recorder: Any = SimpleNamespace(start=model.start, advance=model.advance, logits=logits)
    (results,) = beam_search(
        recorder, src, options, max_length=limit, beginnings=[beginning], copies=[copies], watch=watch
    )
    paths = {tuple(_path(node, nodes)): node.id for node in nodes if node.fate != "pruned"}
    ends = [paths[(*result.ids, EOS) if result.finished else result.ids] for result in results]
    return Replay(options, root.top, steps, results, ends)


def _path(node: Node, nodes: Sequence[Node]) -> list[int]:
    tokens = list[int]()
    while node.parent is not None:
        tokens.append(node.token)
        node = nodes[node.parent]
    return tokens[::-1]


MOST_TOKENS = 256
"""Maximum number of tokens of an inspected sentence: the size of the page grows with the square."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a sentence, such as the source: its text, and its tokens with special ones.

    words: Index of each token's word. word_texts: If it is empty, each token is a word.
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    words: tuple[int, ...]
    word_texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, vocabulary: Vocabulary, ids: Sequence[int], text: str, source: Masked | None = None) -> Side:
        """Make a side from token ids; each special token is a word.

        Placeholders in `text` are replaced by the parts of `source` that they stand for.
        """
        source = source or Masked(text)
        pieces = restore_pieces(vocabulary.pieces(ids), source)
        owners = list[int]()
        special = {BOS, EOS, *vocabulary.framing.ids}
        plain = [i for i, token in enumerate(ids) if token not in special]
        again, spans = vocabulary.encode_with_offsets(text)
        n_frame = vocabulary.n_frame(again)
        is_plain = again[n_frame:] == [ids[i] for i in plain]
        inside = words_of_tokens(text, spans[n_frame:])[0] if is_plain else list(range(len(plain)))
        for i in range(len(ids)):
            owners.append(inside[plain.index(i)] + plain[0] if i in plain else (owners[-1] + 1 if owners else 0))
        words = [[i for i, owner in enumerate(owners) if owner == word] for word in dict.fromkeys(owners)]
        texts = [vocabulary.decode(ids[i] for i in word).strip() or "".join(pieces[i] for i in word) for word in words]
        return cls(
            restore(text, source, whole=False),
            tuple(ids),
            tuple(pieces),
            tuple(owners),
            tuple(restore_pieces(texts, source)),
        )


@dataclass(frozen=True, slots=True)
class Sentence:
    """An inspected sentence: the model's inputs, the tokens to predict, and its sides (source, target, ...) by name.

    inputs: arguments of `Subject.hidden`. targets: [T], the token to predict for each row of the logits. search: the
    search for the translation; None if the model does not translate.
    """

    inputs: tuple[Tensor, ...]
    targets: Int[Tensor, " T"]
    sides: dict[str, Side]
    search: Replay | None = None


class Subject(ABC):
    """A model to be inspected, with its vocabularies.

    read_side: the side of a sentence to whose tokens predictions are attributed. embedding: name of the module that
    embeds it. stack: name of the stack that predicts. predicted: side of the logits' rows. reads_pairs: whether a text
    has a target.
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
        """Prepare a model in eval mode for inspection.

        Args:
            model: The model.
            folder: The run folder, if there is one.
            tokenizers: The vocabularies.
            settings: Decoding settings (default: the run's).
            longest: Maximum number of tokens of a sentence (default: the limit of the run's model).
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
        """Encode a sentence. Without a target, a translator translates, or continues the prefix."""

    @abstractmethod
    def hidden(self, model: Any, *inputs: Tensor) -> Float[Tensor, "B T D"]:
        """Return the hidden states for `logits`, with gradients if they are enabled."""

    def logits(self, model: Any, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        return model.logits(hidden)

    def output_matrix(self, model: Any) -> tuple[Float[Tensor, "V D"], Float[Tensor, " V"] | None]:
        """Return the output matrix, whose product with the hidden states is the logits, and its bias."""
        return model.output_weight, model.output_bias

    def pieces(self, ids: Sequence[int]) -> Sequence[str]:
        """Return the text of predicted tokens, or the names of labels."""
        return self.tokenizers.tgt.pieces(ids)

    def side_of(self, part: str) -> tuple[str, str]:
        """Return the names of the sides along a module's positions (or queries) and along its keys."""
        return self.read_side, self.read_side

    def searching(self, decoding: DecodingOptions) -> Self:
        """Return a copy with other search options. Raises `SettingsError` if the model does not translate."""
        if not self.reads_pairs:
            raise SettingsError(
                f"{', '.join(sorted(decoding.model_fields_set))}: this model has no search; leave it out"
            )
        subject = copy.copy(self)
        subject.settings = decoding.over(self.settings)
        return subject

    def _checked(self, ids: Any, what: str, *, may_be_empty: bool = False) -> Any:
        if len(ids) > self.longest:
            raise DataError(f"{what}: {len(ids)} tokens; at most {self.longest} can be shown; give a shorter text")
        if not len(ids) and not may_be_empty:
            raise DataError(f"the {what} is empty; give at least one word")
        return ids


class TranslationSubject(Subject):
    """A translation model, which has an encoder and a decoder."""

    embedding, read_side, stack = "src_embedding", "src", "decoder"
    reads_pairs = True

    def options(self) -> DecodingOptions:
        options = DecodingOptions().over(self.settings)
        return options.model_copy(update={"n_best": options.beam, "sample": False})

    def source(self, text: str) -> tuple[Any, Tensor, Masked]:
        """Return the ids (or vectors) of a source, the model's input [1, S], and the text with its placeholders."""
        ids = self.tokenizers.src.encode(text)
        masked = prepare(text, self.tokenizers.src, ids)
        masked = masked._replace(before="", after="", end="") if masked.text else Masked(text)
        ids = self._checked(self.tokenizers.src.encode(masked.text), "source", may_be_empty=True)
        return ids, collate([Example(ids, [])]).src.to(self.device), masked

    def limit(self, src: Tensor) -> int:
        """Return the maximum number of tokens of a translation, including its end."""
        return min(self.options().most_output(src.shape[1] - 1), self.longest)

    def _known(self, prefix: Sequence[int]) -> Sequence[int]:
        if len(prefix) > self.longest or not all(0 <= i < self.tokenizers.n_tgt for i in prefix):
            raise DataError(f"prefix: at most {self.longest} token ids from 0 to {self.tokenizers.n_tgt - 1}")
        return prefix

    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        src_ids, src, masked = self.source(text)
        copies = placeholder_ids(masked.text) if self.tokenizers.tgt.has_placeholders else None
        frame = self.tokenizers.tgt.frame or ()
        if not self.tokenizers.tgt.n_frame(self._known(prefix)):
            prefix = (*frame, *prefix)
        limit = max(self.limit(src), len(prefix) + 1)
        beginning = Beginning(prefix, n_unscored=len(frame))
        search = replay(model, src, self.options(), limit=limit, beginning=beginning, copies=copies)
        if target is None:
            tgt = list(search.results[0].ids) if search.results else []
        else:
            target = self.tokenizers.masked(text, target, self.tokenizers.src.encode(text))[1].text
            tgt = self._checked(self.tokenizers.tgt.encode(target), "translation", may_be_empty=True)
        batch = collate([Example(src_ids, tgt)]).to(self.device)
        tgt_text = self.tokenizers.tgt.decode(tgt) if target is None else target
        sides = {"src": self._source_side(batch.src[0].tolist(), masked)}
        for name, ids in (("tgt_in", batch.tgt_in), ("tgt_out", batch.tgt_out)):
            sides[name] = Side.of(self.tokenizers.tgt, ids[0].tolist(), tgt_text, masked)
        return Sentence((batch.src, batch.tgt_in), batch.tgt_out[0], sides, search)

    def _source_side(self, ids: list[Any], masked: Masked) -> Side:
        if isinstance(self.model.src_embedding, TokenEmbedding):
            return Side.of(self.tokenizers.src, ids, masked.text, masked)
        places = tuple(range(len(ids)))  # vectors
        return Side(masked.text, places, tuple(self.tokenizers.src.pieces(ids)), places)

    def hidden(self, model: Any, *inputs: Tensor) -> Tensor:
        return model(*inputs)

    def side_of(self, part: str) -> tuple[str, str]:
        if part.startswith(("src_embedding", "encoder", "bridge")):
            return "src", "src"
        # Rows of cross-attention are labelled by the token that their step predicts.
        is_cross = "cross" in part or part.startswith("decoder.attention")
        return ("tgt_out", "src") if is_cross else ("tgt_in", "tgt_in")


class CausalSubject(Subject):
    """A language model, which predicts the text token by token."""

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
    """A masked language model. It predicts every token, not only the masked ones."""

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
    """A text classifier. Its only prediction is the label."""

    embedding, read_side, stack, predicted = "embedding", "src", "encoder", "label"

    def read(self, model: Any, text: str, target: str | None, prefix: Sequence[int]) -> Sentence:
        vocabulary = self.tokenizers.tgt
        framed = [int(i) for i in pack(self._checked(vocabulary.encode(text), "text")).ids]
        rows = torch.tensor([framed], device=self.device)
        best = self.logits(model, self.hidden(model, rows))[0].argmax(-1)
        label = self.labels[int(best[0])]
        sides = {"src": Side.of(vocabulary, framed, text), "label": Side(label, (int(best[0]),), (label,), (0,))}
        return Sentence((rows,), best, sides)

    @property
    def labels(self) -> Sequence[str]:
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
"""Classes of inspected models by task."""


def open_subject(
    path: str | Path,
    *,
    device: str = "auto",
    decoding: DecodingOptions | None = None,
    languages: Languages = (None, None),
) -> Subject:
    """Open the model of a run folder of any task.

    Args:
        path: The run folder.
        device: auto, cpu or cuda.
        decoding: Options of the search for a translation.
        languages: Languages of the source and of the translation; see `Translator.between`.

    Raises:
        RunFolderError: The folder is missing or damaged.
        SettingsError: Models of the run's task cannot be shown.
    """
    task = RunFolder.open(Path(path)).settings.task
    if task not in SUBJECTS:
        raise SettingsError(f"{path} is a run of task '{task[:40]}', which cannot be shown; {', '.join(SUBJECTS)} can")
    decoding = decoding or DecodingOptions()
    if task != "translation" and (given := sorted(decoding.model_fields_set)):
        raise SettingsError(f"{', '.join(given)}: no effect on task '{task}', of which {path} is a run; leave it out")
    if task != "translation" and any(languages):
        raise SettingsError(f"src_lang, tgt_lang: no effect on task '{task}', of which {path} is a run")
    folder, model, tokenizers = open_model(path, task=task, device=device)
    if tokenizers.src.framing.needed or any(languages):
        own = folder.settings.data.named_languages
        tokenizers = tokenizers.between(*tokenizers.src.framing.choose(own, languages))
    return SUBJECTS[task](model, folder, tokenizers, settings=decoding.over(folder.settings.decoding))

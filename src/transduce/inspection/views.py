"""Views of recorded values: positions and masks, predictions, attribution, layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transduce.inspection.arrays import NamedArray, pack, to_numpy
from transduce.inspection.part_kinds import Rows, logits_kind
from transduce.inspection.parts import Part, source_of
from transduce.inspection.subjects import Sentence, Side, Subject
from transduce.models.parts import TokenPredictor
from transduce.nn.convolutional import ConvEncoder
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.positions import Positions, RotaryPositions, ShawPositions
from transduce.nn.recording import Recording, intervene, record, title, twin

_TOKENS_AT_ONCE = 1024  # of copies of a sentence: what they take in memory is bounded

# --- positions and masks ----------------------------------------------------------------------------------------------


def positions_view(model: nn.Module, sentence: Sentence, subject: Subject) -> Iterator[dict[str, Any]]:
    """The positional scheme of each stack, as pictures."""
    for name, module in model.named_modules():
        scheme = getattr(module, "positions", None)
        if not isinstance(module, TokenEmbedding) or not isinstance(scheme, Positions) or type(scheme) is Positions:
            continue
        side = "src" if name == "src_embedding" or "tgt_in" not in sentence.sides else "tgt_in"
        n = len(sentence.sides[side].tokens)
        places = torch.arange(n, device=subject.device)
        table: Tensor | None = scheme.add(torch.zeros(1, n, scheme.d_model, device=subject.device))[0]
        text = "added to the embeddings"
        computes: Callable[..., Any] = type(scheme).add
        if isinstance(scheme, RotaryPositions):
            ones = torch.ones(1, 1, n, scheme.d_head, device=subject.device)
            table, text = scheme.rotation(places)(ones)[0, 0], "a vector of ones after the rotation of each position"
            computes = type(scheme).rotation
        elif isinstance(scheme, ShawPositions):
            table = scheme.key_vectors.weight
            text = "a vector per clipped distance, added to the keys; others are added to the values"
            computes = type(scheme).relations
        elif table is not None and not table.any():
            table, text, computes = None, "added to the scores of attention", type(scheme).score_bias
        bias = scheme.score_bias(places, places)
        yield {
            "stack": "encoder" if side == "src" else "decoder",
            "scheme": type(scheme).__name__.removesuffix("Positions").lower(),
            "text": text,
            "table": None if table is None else pack(table),
            "dots": None if table is None or isinstance(scheme, ShawPositions) else pack(table @ table.T),
            "bias": None if bias is None else pack(bias),
            "side": side,
            "source": source_of(computes),
        }


def masks_view(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """The different masks of each kind of attention: which keys a query may attend to."""
    found: dict[str, dict[bytes, list[tuple[int, int]]]] = {}
    shown: dict[bytes, tuple[NamedArray, np.ndarray]] = {}
    for part in parts:
        bias = part.values.get(f"{part.name}.bias")
        if bias is None:
            continue
        masks = found.setdefault(f"{part.stack} {part.kind.kind.replace('_', '-')}", {})
        for head, mask in enumerate(np.isfinite(bias.array)):
            masks.setdefault(mask.tobytes(), []).append((part.layer or 0, head))
            shown.setdefault(mask.tobytes(), (bias, mask))
    for kind, masks in found.items():
        for content, places in masks.items():
            bias, mask = shown[content]
            yield {
                "title": kind + (_places(places, masks.values()) if len(masks) > 1 else ""),
                "text": _what_is_hidden(mask),
                "rows": bias.rows,
                "columns": bias.columns,
                "mask": pack(mask),
            }


def _places(own: Sequence[tuple[int, int]], of_all: Iterable[Sequence[tuple[int, int]]]) -> str:
    """Layers, or heads of layers, that use one of several masks."""
    layers = [{layer for layer, _ in one} for one in of_all]
    axis, name = (0, "layer") if sum(map(len, layers)) == len(set[int]().union(*layers)) else (1, "head")
    numbers = sorted({place[axis] + 1 for place in own})
    return f", {name}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _what_is_hidden(mask: np.ndarray) -> str:
    """A mask [query, key] in words."""
    later = np.triu(np.ones_like(mask), 1)
    if mask.all():
        return "every position sees all that are not padding"
    if (mask == ~later).all():
        return "later positions are hidden"
    if not (mask & later).any():
        return "later positions are hidden, and some of the earlier ones"
    return "only the positions of the pattern are seen"


# --- predictions ------------------------------------------------------------------------------------------------------


def logits_part(subject: Subject, model: Any, sentence: Sentence, hidden: Tensor, logits: Tensor) -> tuple[Part, Side]:
    """The output matrix and the softmax as the last part, and the tokens that its columns show."""
    n_rows, n_all = logits.shape
    n = min(n_all, max(3, 24 // n_rows))
    best = torch.cat([logits.topk(n).indices, sentence.targets[:, None]], 1)
    ids = tuple(dict.fromkeys(best.flatten().tolist()))
    candidates = Side("", ids, tuple(subject.pieces(ids)), tuple(range(len(ids))))
    columns = list(ids)

    def rows_of_output(_: object) -> Rows:
        weight, bias = subject.output_matrix(model)
        return weight[columns], None if bias is None else bias[columns]

    text = (
        f"The last hidden state is multiplied with the vector of each of the {n_all:,} outputs; the softmax makes "
        f"probabilities of these logits. Shown are the {n} most probable outputs at each position, and the expected "
        "one."
    )
    source = TokenPredictor.logits if isinstance(model, TokenPredictor) else None
    kind, side = logits_kind(text, rows_of_output, source), subject.predicted
    values = (hidden, logits[:, columns], logits.softmax(-1)[:, columns])
    part = Part("logits", kind, model, side, side, subject.stack, (n_rows, n_all))
    arrays = {
        part.full_name(point): NamedArray(
            to_numpy(value), point.axes, point.title, side, None if value is hidden else "candidates"
        )
        for value, point in zip(values, kind.points, strict=True)
    }
    return replace(part, values=arrays), candidates


def tokens_view(log_probs: Tensor, sentence: Sentence, side: Side) -> list[dict[str, Any]]:
    """The probability and the rank of each predicted token."""
    rows = torch.arange(len(sentence.targets), device=log_probs.device)
    known = log_probs[rows, sentence.targets]
    ranks = (log_probs > known[:, None]).sum(1) + 1
    columns = side.tokens, side.ids, known.exp().tolist(), ranks.tolist()
    return [dict(zip(("token", "id", "probability", "rank"), one, strict=True)) for one in zip(*columns, strict=True)]


def gradient_times_input(subject: Subject, model: Any, sentence: Sentence) -> np.ndarray:
    """The gradient of each prediction's log-probability times the embedded tokens, summed over the width, [T, S].

    The sentence is repeated for each prediction (Simonyan et al. 2014; Shrikumar et al. 2017). A memory of earlier
    segments has no gradient, as in training (Dai et al. 2019).
    """
    n, found = len(sentence.targets), list[np.ndarray]()
    embedded, model = list[Tensor](), twin(model)
    for module in model.modules():
        if isinstance(module, ConvEncoder):
            module.gradient_scale = 1.0  # the paper's, for training

    def keep(value: Tensor) -> Tensor:
        embedded.append(value.detach().requires_grad_())
        return embedded[-1]

    for places in torch.arange(n).split(_rows_at_once(sentence)):
        repeated = [x.repeat(len(places), *[1] * (x.dim() - 1)) for x in sentence.inputs]
        with torch.enable_grad(), intervene(model, {subject.embedding: keep}):
            own = subject.hidden(model, *repeated)[torch.arange(len(places)), places]
            known = subject.logits(model, own).float().log_softmax(-1)
            predicted = known[torch.arange(len(places)), sentence.targets[places]].sum()
            gradients = torch.autograd.grad(predicted, embedded, materialize_grads=True)
        products = [gradient * x for gradient, x in zip(gradients, embedded, strict=True)]
        embedded.clear()
        n_read = len(sentence.sides[subject.read_side].tokens)  # without the padding of a last segment
        found.append(to_numpy(torch.cat(products, 1)[:, :n_read].sum(-1)))
    return np.concatenate(found)


def _rows_at_once(sentence: Sentence) -> int:
    """The number of copies of a sentence that are computed at once."""
    return max(1, _TOKENS_AT_ONCE // sum(x.shape[1] for x in sentence.inputs))


def leave_out(subject: Subject, model: Any, sentence: Sentence) -> np.ndarray:
    """Decrease of each prediction's log-probability when each input word is removed, [T, S].

    All tokens of a word are left out together, and share its result (Li et al. 2016).
    """
    side = sentence.sides[subject.read_side]
    source = sentence.inputs[0]
    words = sorted(set(side.words))
    rows, owners = [source[0]], [-1]
    for word in words:
        keep = torch.tensor([owner != word for owner in side.words], device=source.device)
        if keep.any():
            rows.append(source[0][keep])
            owners.append(word)
    padding = float("nan") if source.is_floating_point() else 0
    batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    parts = []
    for some in batch.split(_rows_at_once(sentence)):
        others = [x.expand(len(some), *x.shape[1:]) for x in sentence.inputs[1:]]
        log_probs = subject.logits(model, subject.hidden(model, some, *others)).float().log_softmax(-1)
        parts.append(log_probs.gather(2, sentence.targets.expand(len(some), -1)[:, :, None])[:, :, 0])
    known = torch.cat(parts)  # [1 + words, T]
    loss = {word: to_numpy(known[0] - row) for word, row in zip(owners[1:], known[1:], strict=True)}
    nothing = np.zeros(len(sentence.targets), dtype=np.float32)
    return np.stack([loss.get(word, nothing) for word in side.words], 1)


_GRADIENT = (
    "gradient x input",
    "A first-order estimate of how each embedded token changes the prediction; it does not predict the effect of "
    "removing the word.",
)
_LEAVE_OUT = (
    "leaving words out",
    "How many nats the prediction loses without the word. The shortened sentence may be unlike the training text.",
)


def saliency_view(subject: Subject, model: Any, sentence: Sentence) -> list[dict[str, Any]]:
    """Which input tokens matter for each prediction, by two methods."""
    found = [(*_GRADIENT, gradient_times_input(subject, model, sentence))]
    # Leaving out a token of a language model, or of the text to predict, would move the targets.
    if subject.read_side == "src" and (subject.predicted != "tgt_out" or subject.reads_pairs):
        found.append((*_LEAVE_OUT, leave_out(subject, model, sentence)))
    sides = {"rows": subject.predicted, "columns": subject.read_side}
    return [{"title": title_, "text": text, **sides, "values": pack(values)} for title_, text, values in found]


# --- layers -----------------------------------------------------------------------------------------------------------


def lens_view(
    subject: Subject, model: Any, found: Recording, sentence: Sentence, *, top: int = 5
) -> dict[str, Any] | None:
    """The predictions after each layer, and the change of the residual stream by each sub-layer.

    The state after each layer passes the stack's final norm and the output matrix (nostalgebraist 2020, "logit lens").
    None for a model without residual stream of the predictions.
    """
    stack = getattr(model, subject.stack, None)
    blocks = [name for name in found if name.startswith(f"{subject.stack}.blocks.") and name.count(".") == 2]
    blocks = [name for name in blocks if f"{name}.feed_forward_residual" in found]
    if not blocks or stack is None or subject.predicted == "label":
        return None
    first = found.value(f"{blocks[0]}.input")
    layers = [("embedding", first), *((f"after {title(name)}", found.value(name)) for name in blocks)]
    vocabulary, shown = subject.tokenizers.tgt, []
    rows = torch.arange(len(sentence.targets), device=first.device)
    for name, stream in layers:
        hidden = stack.norm(stream)
        head = getattr(model, "head", None)
        probabilities = subject.logits(model, hidden if head is None else head(hidden))[0].float().softmax(-1)
        best = probabilities.topk(top)
        pieces = [vocabulary.pieces(row) for row in best.indices.tolist()]
        pairs = [[list(x) for x in zip(*y, strict=True)] for y in zip(pieces, best.values.tolist(), strict=True)]
        shown.append({"title": name, "top": pairs, "probability": pack(probabilities[rows, sentence.targets])})
    changes = []
    for name in found:
        if (
            name.endswith("_residual")
            and name.startswith(f"{subject.stack}.")
            and name.removesuffix("_residual") in found
        ):
            added = found.value(name.removesuffix("_residual")).float()
            before = found.value(f"{name}.input").float()
            share = added.reshape(before.shape).norm(dim=-1) / before.norm(dim=-1)
            changes.append({"title": title(name.removesuffix("_residual")), "values": pack(share[0])})
    text = "The stream after each layer, read by the final norm and the output matrix as if it were the last."
    return {"text": text, "layers": shown, "changes": changes, "rows": subject.predicted}


def recorded_run(subject: Subject, model: Any, sentence: Sentence) -> tuple[Recording, Tensor, Tensor]:
    """Everything that the model computes for a sentence, the last hidden states [T, D] and their logits [T, V]."""
    with torch.no_grad(), record(model) as found:
        hidden, logits = _outputs(subject, model, sentence)
    return found, hidden, logits


def predictions(subject: Subject, model: Any, sentence: Sentence) -> Tensor:
    """The log-probabilities [T, V] of a sentence's predictions."""
    return _outputs(subject, model, sentence)[1].log_softmax(-1)


def _outputs(subject: Subject, model: Any, sentence: Sentence) -> tuple[Tensor, Tensor]:
    """The last hidden states [T, D] and their logits [T, V]."""
    hidden = subject.hidden(model, *sentence.inputs)
    return hidden[0], subject.logits(model, hidden)[0].float()

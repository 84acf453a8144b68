"""Views of recorded values for the inspection page: positions, masks, heads, predictions, attribution, layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transduce.inspection.inspected_models import Sentence, Side, Subject
from transduce.inspection.module_descriptions import Rows, describe_logits
from transduce.inspection.recorded_modules import NamedArray, RecordedModule, pack, source_of, to_numpy
from transduce.models.parts import TokenPredictor
from transduce.nn.convolutional import ConvEncoder
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.positions import Positions, RotaryPositions, ShawPositions
from transduce.nn.recording import Recording, intervene, record, switched_off, switches, title, twin

_GUESSES = 5  # number of predictions shown for each layer
_TOKENS_AT_ONCE = 1024  # tokens of all copies of a sentence in a batch; bounds the memory

# --- positions and masks ----------------------------------------------------------------------------------------------


def positions_view(model: nn.Module, sentence: Sentence, subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield the positional scheme of each stack, drawn as pictures."""
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


def masks_view(parts: Sequence[RecordedModule]) -> Iterator[dict[str, Any]]:
    """Yield each kind of attention with its distinct masks, which define the keys that a query may attend to."""
    users: dict[str, dict[bytes, list[tuple[int, int]]]] = {}  # layers and heads by kind of attention and mask
    masks: dict[tuple[str, bytes], tuple[NamedArray, np.ndarray]] = {}
    for part in parts:
        bias = part.values.get(f"{part.name}.bias")
        if bias is None:
            continue
        kind = f"{part.stack} {part.kind.kind.replace('_', '-')}"
        users_of_kind = users.setdefault(kind, {})
        for head, mask in enumerate(np.isfinite(bias.array)):
            users_of_kind.setdefault(mask.tobytes(), []).append((part.layer or 0, head))
            masks.setdefault((kind, mask.tobytes()), (bias, mask))
    for kind, users_of_kind in users.items():
        for content, layers_and_heads in users_of_kind.items():
            bias, mask = masks[kind, content]
            several = len(users_of_kind) > 1
            yield {
                "title": kind + (_name_users(layers_and_heads, users_of_kind.values()) if several else ""),
                "text": _describe_mask(mask),
                "rows": bias.rows,
                "columns": bias.columns,
                "mask": pack(mask),
            }


def _name_users(users: Sequence[tuple[int, int]], users_of_masks: Iterable[Sequence[tuple[int, int]]]) -> str:
    """Name the layers that use one of several masks; if a layer has several masks, name its heads."""
    layers = [{layer for layer, _ in other_users} for other_users in users_of_masks]
    axis, name = (0, "layer") if sum(map(len, layers)) == len(set[int]().union(*layers)) else (1, "head")
    numbers = sorted({user[axis] + 1 for user in users})
    return f", {name}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _describe_mask(mask: np.ndarray) -> str:
    """Describe a mask [query, key] in words."""
    later = np.triu(np.ones_like(mask), 1)
    if mask.all():
        return "every position sees all that are not padding"
    if (mask == ~later).all():
        return "later positions are hidden"
    if not (mask & later).any():
        return "later positions are hidden, and some of the earlier ones"
    return "only the positions of the pattern are seen"


# --- heads -----------------------------------------------------------------------------------------------------------

RULES = {
    "previous token": "at least 40 % of the weight is on the token before",
    "next token": "at least 40 % of the weight is on the token after",
    "same token": "at least 40 % of the weight is on the token itself",
    "separator": "at least 40 % of the weight is on punctuation and special tokens",
    "alignment": "in cross-attention: the mean of each query's largest weight is at least 0.6",
    "broad": "the mean entropy of a query's weights is at least 0.8 of that of even weights",
    "mixed": "no rule holds",
    "share": (
        "the weight on such tokens, averaged over all queries. The two largest are shown: of the tokens named above, "
        "and of the one that gets most of the weight, if it is no separator. A token can count twice."
    ),
}
"""Rules for labels of attention heads. If several rules hold, the rule with the largest margin decides."""
_LEAST = dict.fromkeys(RULES, 0.4) | {"alignment": 0.6, "broad": 0.8}


def _breadth(weights: np.ndarray) -> float:
    """Return the rows' mean entropy, as a fraction of the entropy of even weights. Rows with one key do not count."""
    allowed = (weights > 0).sum(1)
    weights, allowed = weights[allowed > 1], allowed[allowed > 1]
    entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(1)
    return float((entropy / np.log(allowed)).mean()) if len(allowed) else 0.0


def label_head(weights: np.ndarray, keys: Side, *, is_cross: bool) -> dict[str, Any]:
    """Label a head with weights [T, S] by RULES; return the label, its score, and the two largest shares of weight."""
    offsets = {} if is_cross else {"previous token": -1, "next token": 1, "same token": 0}
    shares = {name: float(weights.trace(offset) / len(weights)) for name, offset in offsets.items()}
    received = weights.mean(0)
    separators = [not any(c.isalnum() for c in token) or token[:1] == "<" for token in keys.tokens]
    shares["separator"] = float(received[separators].sum())
    scores = shares | {"broad": _breadth(weights)} | ({"alignment": float(weights.max(1).mean())} if is_cross else {})
    fitting = [label for label, score in scores.items() if score >= _LEAST[label]]
    label = max(fitting, key=lambda name: scores[name] - _LEAST[name], default="mixed")
    most = int(received.argmax())
    if not separators[most]:
        shares[f"“{keys.tokens[most]}”"] = float(received[most])
    largest = sorted(shares.items(), key=lambda item: -item[1])[:2]
    return {"label": label, "score": scores.get(label), "shares": [list(share) for share in largest]}


def attention_view(parts: Sequence[RecordedModule], sides: dict[str, Side]) -> Iterator[dict[str, Any]]:
    """Yield the attention weights of each layer, with the labels of its heads."""
    for part in parts:
        weights = part.values.get(f"{part.name}.weights")
        if weights is None:
            continue
        assert weights.rows is not None and weights.columns is not None
        _, n_rows, n_columns = weights.shape
        rows, columns = _fitted(sides[weights.rows], n_rows), _fitted(sides[weights.columns], n_columns)
        is_cross = weights.rows != weights.columns and weights.columns == "src"
        stack = "relay" if part.kind.kind == "relay_attention" else "cross" if is_cross else part.stack
        yield {
            "name": part.name,
            "kind": stack,
            "layer": part.layer or 0,
            "rows": weights.rows,
            "columns": weights.columns,
            "row_tokens": rows.tokens,
            "column_tokens": columns.tokens,
            "weights": pack(weights.array),
            "labels": [label_head(head, columns, is_cross=stack in ("cross", "relay")) for head in weights.array],
        }


def _fitted(side: Side, n: int) -> Side:
    """Return a side of `n` tokens: `side` itself, or with a star's relay node, or with numbers as tokens."""
    if len(side.tokens) == n:
        return side
    if n == 1:
        return Side("", (0,), ("relay",), (0,))
    tokens = ("relay", *side.tokens) if len(side.tokens) + 1 == n else tuple(f"{i}" for i in range(n))
    return Side(side.text, tuple(range(n)), tokens, tuple(range(n)))


# --- predictions ------------------------------------------------------------------------------------------------------


def logits_part(
    subject: Subject, model: Any, sentence: Sentence, hidden: Tensor, logits: Tensor
) -> tuple[RecordedModule, Side]:
    """Describe the output matrix and softmax as a last module; also return the tokens in the columns of its values."""
    n_rows, n_all = logits.shape
    n = min(n_all, max(3, 24 // n_rows))
    best = torch.cat([logits.topk(n).indices, sentence.targets[:, None]], 1)
    ids = tuple(dict.fromkeys(best.flatten().tolist()))
    candidates = Side("", ids, tuple(subject.pieces(ids)), tuple(range(len(ids))))
    columns = list(ids)
    weight, bias = subject.output_matrix(model)

    def rows_of_output(_: object) -> Rows:
        return weight[columns], None if bias is None else bias[columns]

    text = (
        f"The last hidden state is multiplied with the vector of each of the {n_all:,} outputs; the softmax makes "
        f"probabilities of these logits. Shown are the {n} most probable outputs at each position, and the expected "
        "one."
    )
    source = TokenPredictor.logits if isinstance(model, TokenPredictor) else None
    equation = "softmax(h Eᵀ)" if bias is None else "softmax(h Eᵀ + b)"
    kind, side = describe_logits(equation, text, rows_of_output, source), subject.predicted
    values = (hidden, logits[:, columns], logits.softmax(-1)[:, columns])
    part = RecordedModule("logits", kind, model, side, side, subject.stack, (n_rows, n_all))
    arrays = {
        part.full_name(point.name): NamedArray(
            to_numpy(value), point.axes, point.title, side, None if value is hidden else "candidates"
        )
        for value, point in zip(values, kind.points, strict=True)
    }
    return replace(part, values=arrays), candidates


def tokens_view(subject: Subject, log_probs: Tensor, sentence: Sentence, side: Side) -> list[dict[str, Any]]:
    """Return the probability and rank of each predicted token, and the three most probable tokens at its position."""
    rows = torch.arange(len(sentence.targets), device=log_probs.device)
    known = log_probs[rows, sentence.targets]
    ranks = (log_probs > known[:, None]).sum(1) + 1
    best = log_probs.exp().topk(min(3, log_probs.shape[1]))
    top = [
        list(zip(subject.pieces(ids), ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    columns = side.tokens, side.ids, known.exp().tolist(), ranks.tolist(), top
    keys = "token", "id", "probability", "rank", "top"
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def gradient_times_input(subject: Subject, model: Any, sentence: Sentence) -> np.ndarray:
    """Attribute each prediction's log-probability to input tokens, by gradient times input, [T, S].

    The batch has a copy of the sentence for each prediction (Simonyan et al. 2014; Shrikumar et al. 2017). A memory of
    earlier segments has no gradient, as in training (Dai et al. 2019).
    """
    n, products_of_rows = len(sentence.targets), list[np.ndarray]()
    embedded, model = list[Tensor](), twin(model)
    for module in model.modules():
        if isinstance(module, ConvEncoder):
            module.gradient_scale = 1.0  # the paper's factor is for training

    def keep(value: Tensor) -> Tensor:
        embedded.append(value.detach().requires_grad_())
        return embedded[-1]

    for steps in torch.arange(n).split(_rows_at_once(sentence)):
        repeated = [x.repeat(len(steps), *[1] * (x.dim() - 1)) for x in sentence.inputs]
        with torch.enable_grad(), intervene(model, {subject.embedding: keep}):
            own = subject.hidden(model, *repeated)[torch.arange(len(steps)), steps]
            known = subject.logits(model, own).float().log_softmax(-1)
            predicted = known[torch.arange(len(steps)), sentence.targets[steps]].sum()
            gradients = torch.autograd.grad(predicted, embedded, materialize_grads=True)
        products = [gradient * x for gradient, x in zip(gradients, embedded, strict=True)]
        embedded.clear()
        n_read = len(sentence.sides[subject.read_side].tokens)  # length without the padding of the last segment
        products_of_rows.append(to_numpy(torch.cat(products, 1)[:, :n_read].sum(-1)))
    return np.concatenate(products_of_rows)


def _rows_at_once(sentence: Sentence) -> int:
    """Return the number of copies of a sentence that fit into a batch."""
    return max(1, _TOKENS_AT_ONCE // sum(x.shape[1] for x in sentence.inputs))


def leave_out(subject: Subject, model: Any, sentence: Sentence) -> np.ndarray:
    """Return the decrease of each prediction's log-probability when an input word is removed, [T, S].

    The tokens of a word are removed together, so all get the word's result (Li et al. 2016).
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
    for chunk in batch.split(_rows_at_once(sentence)):
        others = [x.expand(len(chunk), *x.shape[1:]) for x in sentence.inputs[1:]]
        log_probs = subject.logits(model, subject.hidden(model, chunk, *others)).float().log_softmax(-1)
        parts.append(log_probs.gather(2, sentence.targets.expand(len(chunk), -1)[:, :, None])[:, :, 0])
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
    """Estimate by two methods how much each input token matters for each prediction."""
    methods = [(*_GRADIENT, gradient_times_input(subject, model, sentence))]
    # Leaving out a token of a language model, or of the text to predict, would move the targets.
    if subject.read_side == "src" and (subject.predicted != "tgt_out" or subject.reads_pairs):
        methods.append((*_LEAVE_OUT, leave_out(subject, model, sentence)))
    sides = {"rows": subject.predicted, "columns": subject.read_side}
    return [{"title": title_, "text": text, **sides, "values": pack(values)} for title_, text, values in methods]


# --- without a group of parts -----------------------------------------------------------------------------------------

_GROUPS = {
    "positions": ("no positions", r"\.positions$"),
    "mask": ("no causal mask", r"^decoder\.mask$"),
    "cross": ("no cross-attention", r"cross_attention\.heads\."),
    "encoder": ("no self-attention in the encoder", r"^encoder\..*self_attention\.heads\."),
    "decoder": ("no self-attention in the decoder", r"^decoder\..*self_attention\.heads\."),
    "feed_forward": ("no feed-forward networks", r"\.feed_forward$"),
}
"""Groups of modules to switch off together: title, and pattern of the modules' names."""


def without_view(subject: Subject, text: str, sentence: Sentence, prefix: Sequence[int]) -> list[dict[str, Any]]:
    """Switch off each group of modules; return the new outputs, and the original output's new log-probability."""
    shown = list[dict[str, Any]]()
    for group, (group_title, pattern) in _GROUPS.items():
        names = [name for name in switches(subject.model) if re.search(pattern, name)]
        if not names:
            continue
        model = switched_off(subject.model, names)
        with torch.no_grad():
            kept = log_prob(subject, model, sentence)
            output = subject.read(model, text, None, prefix) if subject.reads_pairs else sentence
        written = output.sides[subject.predicted].text
        shown.append({"group": group, "title": group_title, "off": names, "text": written, "log_prob": kept})
    return shown


# --- layers -----------------------------------------------------------------------------------------------------------


def lens_view(subject: Subject, model: Any, recording: Recording, sentence: Sentence) -> dict[str, Any] | None:
    """Predict from the state after each layer, and measure the change of the residual stream by each sub-layer.

    The final norm and the output matrix are applied to each state (nostalgebraist 2020, "logit lens"). Returns None if
    the model has no residual stream to its predictions.
    """
    stack = getattr(model, subject.stack, None)
    blocks = [name for name in recording if name.startswith(f"{subject.stack}.blocks.") and name.count(".") == 2]
    blocks = [name for name in blocks if f"{name}.feed_forward_residual" in recording]
    if not blocks or stack is None or subject.predicted == "label":
        return None
    first = recording.value(f"{blocks[0]}.input")
    layers = [("embedding", first), *((f"after {title(name)}", recording.value(name)) for name in blocks)]
    vocabulary, shown, head = subject.tokenizers.tgt, [], getattr(model, "head", None)
    rows = torch.arange(len(sentence.targets), device=first.device)
    for name, stream in layers:
        hidden = stack.norm(stream)
        probabilities = subject.logits(model, hidden if head is None else head(hidden))[0].float().softmax(-1)
        best = probabilities.topk(_GUESSES)
        pieces = [vocabulary.pieces(row) for row in best.indices.tolist()]
        pairs = [[list(x) for x in zip(*y, strict=True)] for y in zip(pieces, best.values.tolist(), strict=True)]
        shown.append({"title": name, "top": pairs, "probability": pack(probabilities[rows, sentence.targets])})
    changes = []
    for name in recording:
        sublayer = name.removesuffix("_residual")
        if sublayer != name and name.startswith(f"{subject.stack}.") and sublayer in recording:
            added = recording.value(sublayer).float()
            before = recording.value(f"{name}.input").float()
            share = added.reshape(before.shape).norm(dim=-1) / before.norm(dim=-1)
            changes.append({"title": title(sublayer), "values": pack(share[0])})
    read = "x" if isinstance(stack.norm, nn.Identity) else "norm(x)"
    read = read if head is None else f"head({read})"
    return {"hidden": read, "layers": shown, "changes": changes, "rows": subject.predicted}


def recorded_run(subject: Subject, model: Any, sentence: Sentence) -> tuple[Recording, Tensor, Tensor]:
    """Run the model on a sentence; return all recorded values, the last hidden states [T, D] and the logits [T, V]."""
    with torch.no_grad(), record(model) as recording:
        hidden, logits = _outputs(subject, model, sentence)
    return recording, hidden, logits


def log_prob(subject: Subject, model: Any, sentence: Sentence) -> float:
    """Return the summed log-probability of the tokens to predict."""
    log_probs = _outputs(subject, model, sentence)[1].log_softmax(-1)
    return float(log_probs.gather(1, sentence.targets[:, None]).sum())


def _outputs(subject: Subject, model: Any, sentence: Sentence) -> tuple[Tensor, Tensor]:
    """Return the last hidden states [T, D] and their logits [T, V]."""
    hidden = subject.hidden(model, *sentence.inputs)
    return hidden[0], subject.logits(model, hidden)[0].float()

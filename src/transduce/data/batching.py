"""Plan the batches of an epoch, as functions of (seed, epoch).

Sentences of similar length are batched under a budget of padded tokens. They are sorted by the longer side, then by the
difference of the sides, alternately ascending and descending, so that neighbors are similar on both sides. Then the
order is cut into batches. Ties are shuffled, and the cuts and the direction of the order are drawn again in each epoch.

Running text is cut into rows of equal length (packing). The rows of an epoch do not overlap and contain every target
once. The first cut is drawn again in each epoch, so that tokens change their position in the row.

For next-sentence prediction, sentences are joined into pairs of segments (Devlin et al. 2019, 3.1, A.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Lengths = np.ndarray  # int [N], tokens of each sentence with its EOS

_SLACK = 0.85
"""To reduce padding, a batch may end early, but not below this fraction of the sentences that would fit."""


def generator(seed: int, *numbers: int, use: str = "") -> np.random.Generator:
    """Create a random generator, independent for each `use` and each combination of numbers, such as (epoch, row)."""
    return np.random.default_rng([seed & (2**63 - 1), *numbers, *use.encode()])


def plan(
    src_lengths: Lengths,
    tgt_lengths: Lengths,
    *,
    budget: int,
    seed: int,
    epoch: int,
    weights: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Plan the batches of an epoch. Returns arrays of sentence indices, in training order.

    Every index occurs once, or as often as `weights` says: 2 is twice; 0.5 is in every other epoch. In each batch
    `max(longest source, longest target) * sentences <= budget`. A sentence longer than the budget is a batch alone.

    Equal arguments give equal plans, with the same NumPy, whose random generators may change.
    """
    times = _times(weights, seed=seed, epoch=epoch)
    draw = generator(seed, epoch, use="plan")
    indices = _order(src_lengths, tgt_lengths, times, draw)[:: draw.choice((1, -1))]
    first = max(1, int(budget * draw.uniform(0.3, 1.0)))  # a first batch of random size moves all cuts

    def sides(part: slice) -> tuple[np.ndarray, np.ndarray]:
        return _wide(src_lengths[indices[part]]), _wide(tgt_lengths[indices[part]])

    cuts = _cuts(len(indices), sides, budget=budget, first=first, slack=_SLACK)
    batches = np.split(indices, cuts[:-1]) if cuts else []
    return [batches[i] for i in draw.permutation(len(batches))]


def share_out(src_lengths: Lengths, tgt_lengths: Lengths, n: int) -> list[np.ndarray]:
    """Divide a batch among `n` processes. Returns each share's positions in the batch, sorted by length if n > 1.

    The largest share, in padded tokens of the longer side, is minimal. Shares are empty if sentences are too few.
    """
    n_sentences = len(src_lengths)
    if n == 1:
        return [np.arange(n_sentences)]
    longer = np.maximum(_wide(src_lengths), _wide(tgt_lengths))
    order = np.argsort(longer, kind="stable")
    longer = longer[order]
    most = int(longer.max(initial=0))
    # `high` is always large enough
    low, high = max(most, -(-int(longer.sum()) // n)), most * -(-n_sentences // n)
    while low < high:
        budget = (low + high) // 2
        if len(_fewest_cuts(longer, budget=budget)) <= n:
            high = budget
        else:
            low = budget + 1
    cuts = _fewest_cuts(longer, budget=high)
    shares = np.split(order, cuts[:-1])
    return [*shares, *(order[:0] for _ in range(n - len(shares)))]


def split(indices: np.ndarray, src_lengths: Lengths, tgt_lengths: Lengths, *, budget: int) -> list[np.ndarray]:
    """Cut one batch into as few micro-batches within `budget` as possible, of equal size if equal sizes fit.

    `indices` index the lengths. A batch that fits is not cut. A sentence longer than the budget is a batch alone.
    """
    if not len(indices):
        return []
    longer = np.maximum(_wide(src_lengths)[indices], _wide(tgt_lengths)[indices])
    if int(longer.max()) * len(indices) <= budget:
        return [indices]
    order = np.argsort(longer, kind="stable")
    indices, longer = indices[order], longer[order]
    cuts = _fewest_cuts(longer, budget=budget)
    if all(int(part[-1]) * len(part) <= budget for part in np.array_split(longer, len(cuts))):
        # equal parts: otherwise the last part would be a remainder of any size
        return np.array_split(indices, len(cuts))
    return np.split(indices, cuts[:-1])


def offset_of(context: int, *, seed: int, epoch: int) -> int:
    """Draw the number of targets of an epoch's first row, which is shorter than later rows. 0 means a full row."""
    return int(generator(seed, epoch, use="offset").integers(context))


def row_starts(n_tokens: int, *, context: int, offset: int) -> np.ndarray:
    """The positions in `n_tokens` ids where the targets of each row begin. The first row has `offset` targets."""
    starts = np.arange(1 + offset, n_tokens, context)
    return np.concatenate(([1], starts)) if offset and n_tokens > 1 else starts


def row_end(start: int, n_tokens: int, *, context: int, offset: int) -> int:
    return min(n_tokens, start + context - (start - 1 - offset) % context)


def plan_rows(n_tokens: int, *, context: int, n_rows: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Plan the batches of an epoch: arrays of at most `n_rows` row starts, of nearly equal size."""
    offset = offset_of(context, seed=seed, epoch=epoch)
    starts = row_starts(n_tokens, context=context, offset=offset)
    if not len(starts):
        return []
    shuffled = generator(seed, epoch, use="rows").permutation(starts)
    return np.array_split(shuffled, -(-len(starts) // max(1, n_rows)))


def plan_streams(n_tokens: int, *, context: int, n_streams: int, offset: int = 0) -> list[np.ndarray]:
    """Plan batches of contiguous streams: each row continues the same row of the previous batch.

    Row r reads part r of the text. All parts have equal length, so fewer than `n_streams` tokens at the end are left
    out. The first rows have `offset` tokens (0: `context`), so that epochs cut the text at different positions.
    """
    length = (n_tokens - 1) // n_streams
    return [start + length * np.arange(n_streams) for start in row_starts(length + 1, context=context, offset=offset)]


def _order(src: Lengths, tgt: Lengths, times: np.ndarray | None, draw: np.random.Generator) -> np.ndarray:
    """Sort indices by the longer side, then by the difference of the sides, alternately ascending and descending.

    Sentences of equal lengths are in random order. Lengths are handled one at a time, so that a plan of 100 million
    sentences needs little more memory than the result.
    """
    longer, direction = np.maximum(src, tgt), draw.choice((1, -1))
    n = len(src) if times is None else int(times.sum())
    order, end = np.empty(n, dtype=np.int32 if len(src) < 2**31 else np.int64), 0
    for length in range(int(longer.max(initial=0)) + 1):
        here = np.flatnonzero(longer == length)
        if not len(here):
            continue
        here = draw.permutation(here if times is None else here.repeat(times[here]))
        difference = _wide(src[here]) - _wide(tgt[here])
        order[end : end + len(here)] = here[np.argsort(direction * difference, kind="stable")]
        end, direction = end + len(here), -direction
    return order


def _fewest_cuts(longer: np.ndarray, *, budget: int) -> list[int]:
    """Cut sentences, sorted by length, into as few parts within `budget` as possible. Returns the ends of the parts."""
    return _cuts(len(longer), lambda part: (longer[part], longer[part]), budget=budget, first=budget, slack=1.0)


def _cuts(
    n_all: int, sides: Callable[[slice], tuple[np.ndarray, np.ndarray]], *, budget: int, first: int, slack: float
) -> list[int]:
    """Cut `n_all` sorted sentences into batches. Returns the end of each batch.

    `sides`: returns the source and target lengths of a range of sentences. `first`: budget of the first batch, in place
    of `budget`. `slack`: a smaller batch is taken if it has less padding than the largest possible batch, and at least
    this fraction of its sentences.
    """
    cuts, start, allowed = list[int](), 0, first
    while start < n_all:
        src, tgt = sides(slice(start, start + 1))
        most = max(1, allowed // int(max(src[0], tgt[0])))
        src, tgt = sides(slice(start, start + most))
        width_src, width_tgt = np.maximum.accumulate(src), np.maximum.accumulate(tgt)
        n = np.arange(1, len(width_src) + 1)
        fits = max(1, int(np.count_nonzero(np.maximum(width_src, width_tgt) * n <= allowed)))
        if slack < 1.0 and start + fits < n_all:
            least = max(1, int(np.ceil(fits * slack)))
            full = (np.cumsum(src + tgt) / (n * (width_src + width_tgt)))[least - 1 : fits]
            fits -= int(np.argmax(full[::-1]))  # the longest of the batches with the least padding
        start += fits
        cuts.append(start)
        allowed = budget
    return cuts


def _times(weights: np.ndarray | None, *, seed: int, epoch: int) -> np.ndarray | None:
    """Return how often an epoch uses each index, computed from its weight; None, without weights, means once.

    The fractional part of a weight selects that fraction of the sentences with this weight. The selection moves over a
    fixed random order from epoch to epoch, so that every sentence is used equally often.
    """
    if weights is None:
        return None
    weights = np.asarray(weights, dtype=np.float64)
    times = np.floor(weights + 1e-9).astype(np.int64)
    fractions = np.round(weights - times, 6)
    for number, fraction in enumerate(np.unique(fractions[fractions > 0])):
        members = generator(seed, number, use="weights").permutation(np.flatnonzero(fractions == fraction))
        begin, end = (round(float(fraction) * len(members) * e) for e in (epoch, epoch + 1))
        times[members[np.arange(begin, end) % len(members)]] += 1
    return times


def _wide(lengths: Lengths) -> np.ndarray:
    """Convert lengths to a dtype in which products do not overflow."""
    return np.asarray(lengths, dtype=np.int64)


FOLLOWS, RANDOM = 0, 1
"""The labels of a pair of segments: B follows A in the text, or is random text. The numbers are BERT's."""

_SHORT = 0.1  # share of the pairs that have a random length below `room`, so that lengths vary


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The sentences of segments A and B: [a[0], a[1]) and [b[0], b[1]) of the store. B may be empty.

    `label` is FOLLOWS or RANDOM. `number` counts the pairs of an epoch, and seeds the random choices of the pair.
    """

    a: tuple[int, int]
    b: tuple[int, int]
    label: int
    number: int


def fit(n_a: int, n_b: int, room: int, draw: np.random.Generator) -> tuple[slice, slice]:
    """Choose the parts of two segments to keep so that together they fit into `room` tokens.

    The longer segment loses one token at a time, at random from its front or its end.
    """
    cuts = [[0, n_a], [0, n_b]]
    while (n_a := cuts[0][1] - cuts[0][0]) + (n_b := cuts[1][1] - cuts[1][0]) > room:
        longer = cuts[0] if n_a > n_b else cuts[1]
        if draw.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return slice(*cuts[0]), slice(*cuts[1])


def plan_pairs(lengths: np.ndarray, document_starts: np.ndarray, *, room: int, seed: int, epoch: int) -> list[PairPlan]:
    """Plan the segment pairs of an epoch for next-sentence prediction, in the order of the text.

    lengths: tokens of each sentence. document_starts: the index of each document's first sentence, and at the end
    the number of sentences. room: tokens of both segments together. Sentences are gathered until they fill the room. A
    is a random number of them from the front. B is the rest or, in half of the pairs, text of another document; then
    the rest goes into the next pair. A single sentence at a document's end gets its B from another document. There must
    be at least two documents: with only one, every B would follow its A.
    """
    assert len(document_starts) > 2, "there is no other document"
    draw = generator(seed, epoch, use="sentence pairs")
    plans: list[PairPlan] = []
    n_documents = len(document_starts) - 1
    for number in range(n_documents):
        first, end = int(document_starts[number]), int(document_starts[number + 1])
        while first < end:
            target = room if draw.random() >= _SHORT else int(draw.integers(2, room + 1))
            last = _filled(lengths, first, end, target)
            cut = first + (int(draw.integers(1, last - first)) if last - first > 1 else 1)
            if last - first == 1 or draw.random() < 0.5:
                b = _elsewhere(lengths, document_starts, number, target - int(lengths[first:cut].sum()), draw)
                plans.append(PairPlan((first, cut), b, RANDOM, len(plans)))
                first = cut
                continue
            plans.append(PairPlan((first, cut), (cut, last), FOLLOWS, len(plans)))
            first = last
    return plans


def plan_runs(lengths: np.ndarray, document_starts: np.ndarray, *, room: int, seed: int, epoch: int) -> list[PairPlan]:
    """Plan an epoch of single segments (no B): runs of whole sentences of one document, up to `room` tokens.

    Every sentence occurs once; a longer one is a run alone. Each epoch draws the end of a document's first run again.
    """
    draw = generator(seed, epoch, use="sentence runs")
    plans: list[PairPlan] = []
    for first, end in zip(document_starts[:-1].tolist(), document_starts[1:].tolist(), strict=True):
        target = int(draw.integers(1, room + 1)) if int(lengths[first:end].sum()) > room else room
        while first < end:
            last = _filled(lengths, first, end, target)
            if last - first > 1 and int(lengths[first:last].sum()) > target:
                last -= 1
            plans.append(PairPlan((first, last), (last, last), FOLLOWS, len(plans)))
            first, target = last, room
    return plans


def _filled(lengths: np.ndarray, first: int, end: int, target: int) -> int:
    """The end of the shortest run of sentences from `first` on that reaches `target` tokens; at most `end`."""
    total = 0
    for i in range(first, end):
        total += int(lengths[i])
        if total >= target:
            return i + 1
    return end


def _elsewhere(
    lengths: np.ndarray, document_starts: np.ndarray, own: int, target: int, draw: np.random.Generator
) -> tuple[int, int]:
    """Draw consecutive sentences, of about `target` tokens, of a document other than `own`."""
    other = int(draw.integers(len(document_starts) - 2))
    other += other >= own
    first, end = int(document_starts[other]), int(document_starts[other + 1])
    begin = int(draw.integers(first, end))
    return begin, _filled(lengths, begin, end, max(1, target))

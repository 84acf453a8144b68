"""What a finished model does: translate, go on with text, be judged, score given translations."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, tee
from pathlib import Path
from typing import Any

from transduce.config import MOST_BATCH, MOST_BEAM, MOST_PENALTY, MOST_SEED, MOST_TOKENS
from transduce.data.lines import read_lines
from transduce.data.text import read_pieces
from transduce.data.text_store import TextStore
from transduce.decoding.generator import Generator
from transduce.decoding.results import Generation
from transduce.decoding.sample import Sampling
from transduce.decoding.translator import Translation, Translator
from transduce.errors import DataError, SettingsError
from transduce.evaluation.compare import paired_bootstrap
from transduce.evaluation.metrics import check_lengths, metrics
from transduce.evaluation.metrics import evaluate as score_corpus
from transduce.logging import Log
from transduce.runs.atomic import partial_of, write_aside
from transduce.runs.folder import RunFolder

STDIN = Path("-")
NOTES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Search:
    """How to look for translations; None is what the run's settings say. With `sampling` they are drawn instead."""

    beam: int | None = None
    n_best: int = 1
    max_length: int | None = None
    length_penalty: float | None = None
    batch_tokens: int | None = None
    sampling: Sampling | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        temperature = 1.0 if self.sampling is None else self.sampling.temperature
        if not 0 <= temperature < math.inf:  # nan too
            raise SettingsError(f"temperature {temperature}: must be a number, at least 0")
        if self.sampling is not None and (self.beam, self.length_penalty) != (None, None):
            raise SettingsError("samples are drawn, not searched: --beam and --length-penalty do not go with --sample")
        for name, value, most in (
            ("--beam", self.beam, MOST_BEAM),
            ("--nbest", self.n_best, MOST_BEAM),
            ("--max-length", self.max_length, MOST_TOKENS),
            ("--length-penalty", self.length_penalty, MOST_PENALTY),
            ("--batch-tokens", self.batch_tokens, MOST_BATCH),
            ("--seed", self.seed, MOST_SEED),
        ):
            if value is not None and not 0 <= value <= most:
                raise SettingsError(f"{name} {value}: must be a number, at most {most:,}")

    def __call__(self, translator: Translator, lines: Iterable[str]) -> Iterator[Translation]:
        """The translations of the lines, in order, as a stream."""
        if self.sampling is not None:
            return translator.sample(
                lines,
                sampling=self.sampling,
                seed=self.seed,
                n_best=self.n_best,
                max_length=self.max_length,
                batch_tokens=self.batch_tokens,
            )
        return translator.translate_lines(
            lines,
            beam=self.beam,
            n_best=self.n_best,
            max_length=self.max_length,
            length_penalty=self.length_penalty,
            batch_tokens=self.batch_tokens,
        )


Style = Callable[[int, str, Translation], Iterable[str]]


def _text(number: int, src: str, translation: Translation) -> Iterable[str]:
    return [translation.text]


def _scores(number: int, src: str, translation: Translation) -> Iterable[str]:
    return [f"{translation.score:.4f}\t{translation.text}"]


def _nbest(number: int, src: str, translation: Translation) -> Iterable[str]:
    return [f"{number}\t{candidate.score:.4f}\t{candidate.text}" for candidate in translation.candidates]


def _json(number: int, src: str, translation: Translation) -> Iterable[str]:
    candidates = [
        {key: value for key, value in asdict(candidate).items() if key != "ids"} for candidate in translation.candidates
    ]
    note = {"note": translation.note} if translation.note else {}
    return [_line({"line": number, "src": src, "text": translation.text, "candidates": candidates, **note})]


def _flat(row: str) -> str:
    """A row is one line, whatever the pieces of a vocabulary hold."""
    return row.replace("\r", " ").replace("\n", " ") if "\n" in row or "\r" in row else row


STYLES: dict[str, Style] = {"text": _text, "scores": _scores, "nbest": _nbest, "json": _json}


def translate(run: Path, files: Sequence[Path], *, search: Search, style: str, device: str, log: Log) -> Iterator[str]:
    """Translate the lines of files (`-`: stdin) as a stream of lines to print; typed ones one by one.

    Notes of translations go to stderr, but for JSON, which holds them: the first few, and at the end how many.
    """
    translator = Translator.load(run, device=device)
    lines = chain.from_iterable(map(read_lines, files))
    typed = list(files) == [STDIN] and sys.stdin.isatty()
    parts: Iterable[Iterable[str]] = ([line] for line in lines) if typed else [lines]
    numbers, n_noted = count(1), 0
    for part in parts:
        sources, asked = tee(part)
        for src, translation in zip(sources, search(translator, asked), strict=True):
            number = next(numbers)
            if translation.note and style != "json":
                lost = bool(src.strip()) and not translation.text  # told in any case
                n_noted += not lost
                if lost or n_noted <= NOTES_SHOWN or typed:
                    log.warn(f"line {number}: {translation.note}")
            rows = [_flat(row) for row in STYLES[style](number, src, translation)]
            if style == "nbest":  # as many for each line, so that who reads them may count
                rows += [rows[-1]] * (search.n_best - len(rows))
            yield from rows
    if n_noted > NOTES_SHOWN and not typed:
        log.warn(
            f"{n_noted:,} of {next(numbers) - 1:,} lines have such notes, of which the first {NOTES_SHOWN} are shown; "
            "--json tells all"
        )


def check_output(output: Path | None) -> None:
    """Refuse, before any work is done, to write where a folder is."""
    if output is not None and output.is_dir():
        raise SettingsError(f"--output {output} is a folder; name a file")


def write_lines(output: Path, lines: Iterable[str]) -> None:
    """Write lines into a file, aside and renamed. What an error cuts short is kept beside it, and that is told."""
    written = False
    check_output(output)
    try:
        with write_aside(output, keep=True) as aside, aside.open("w", encoding="utf-8", newline="\n") as file:
            for line in lines:
                file.write(f"{line}\n")
                written = True
    except BaseException:
        if written and (partial := partial_of(output)).exists():
            Log().warn(f"the lines before the error are kept in {partial}")
        raise


def evaluate(
    run: Path,
    pairs: tuple[Path, Path],
    *,
    hypotheses: Path | None = None,
    against: Path | None = None,
    metric: tuple[str | None, bool | None] = (None, None),
    search: Search,
    output: Path | None = None,
    device: str = "auto",
    as_json: bool = False,
) -> Iterator[str]:
    """Lines that tell the scores of a run on (source, reference) files; `against` another run or its output too.

    `metric`: BLEU's tokenizer and whether to fold case; None is what the run's settings say.
    """
    check_output(output)
    scoring = RunFolder.open(run).settings.evaluation
    tokenize = metric[0] or scoring.tokenize
    lowercase = scoring.lowercase if metric[1] is None else metric[1]
    metrics(tokenize, lowercase)  # refuses an unknown tokenizer before any work is done
    sources, references = (list(read_lines(path)) for path in pairs)
    _check_pairs(pairs, sources, references)
    if against is not None and not against.is_dir():
        check_lengths(list(read_lines(against)), references, f"lines of {against}")

    def output_of(system: Path) -> list[str]:
        if system.is_dir():
            return [found.text for found in search(Translator.load(system, device=device), sources)]
        return list(read_lines(system))

    ours = output_of(hypotheses or run)
    scores = score_corpus(ours, references, tokenize=tokenize, lowercase=lowercase)
    if output is not None:
        write_lines(output, ours)
    rows = []
    if against is not None:
        theirs = output_of(against)
        check_lengths(theirs, references, f"lines of {against}")
        rows = paired_bootstrap(ours, theirs, references, tokenize=tokenize, lowercase=lowercase)
    if as_json:
        compared = {"against": str(against), "comparison": [row.to_json() for row in rows]} if rows else {}
        yield _line(scores.to_json() | compared)
        return
    yield from scores.lines()
    if rows:
        yield f"against {against}, paired bootstrap:"
        yield from (row.line() for row in rows)


def score(run: Path, pairs: tuple[Path, Path], *, device: str = "auto", as_json: bool = False) -> Iterator[str]:
    """One line a pair: the log-probability (nats) of the target given the source."""
    sources, targets = (list(read_lines(path)) for path in pairs)
    _check_pairs(pairs, sources, targets)
    for found in Translator.load(run, device=device).score(sources, targets):
        numbers = {"log_prob": found.log_prob, "n_tokens": found.n_tokens, "token_log_probs": found.token_log_probs}
        yield _line(numbers) if as_json else f"{found.log_prob:.4f}"


@dataclass(frozen=True, slots=True)
class Asking:
    """Text that is asked for. `prompts` None: what stands on standard input, less its last line end."""

    prompts: tuple[str, ...] | None = None
    max_length: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    n_samples: int = 1
    cut_prompt: bool = False

    def __call__(self, generator: Generator, prompts: Sequence[str]) -> list[Generation]:
        """The texts of these prompts."""
        return generator.generate(
            prompts,
            max_length=self.max_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            n_samples=self.n_samples,
            cut_prompt=self.cut_prompt,
        )

    def stream(self, generator: Generator, prompt: str) -> Iterator[str]:
        """The text of one prompt, as it comes."""
        return generator.stream(
            prompt,
            max_length=self.max_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            cut_prompt=self.cut_prompt,
        )


def generate(run: Path, asked: Asking, *, stream: bool, device: str, as_json: bool) -> Iterator[str]:
    """What to print, line ends and all: how a run goes on with prompts. `stream`: in parts, as they come."""
    generator = Generator.load(run, device=device)
    prompts = asked.prompts
    if prompts is None:
        prompts = ("\n".join(read_lines(STDIN)),)
    if stream:
        if as_json or len(prompts) * asked.n_samples > 1:
            raise SettingsError("--stream prints one text as it comes: not with --json, --samples or several prompts")
        yield prompts[0]
        yield from asked.stream(generator, prompts[0])  # closed with this one
        yield "\n"
        return
    found = asked(generator, prompts)
    if as_json:
        for one in found:
            numbers = {"n_tokens": len(one.ids), "log_prob": one.log_prob, "finished": one.finished}
            yield _line({"prompt": one.prompt, "text": one.text, **numbers}) + "\n"
        return
    yield "---\n".join(f"{one.prompt}{one.text}\n" for one in found)


def evaluate_text(
    run: Path, text: Path, *, stride: int | None, batch_tokens: int | None, device: str, as_json: bool
) -> Iterator[str]:
    """Lines that tell how well a run tells the text of a file (`-`: stdin)."""
    generator = Generator.load(run, device=device)
    store = TextStore.from_pieces(read_pieces(text, generator.settings.data.documents), generator.tokenizer)
    if not store.n_bytes:
        raise DataError(f"{text}: there is no text")
    score = generator.evaluate(store, stride=stride, batch_tokens=batch_tokens)
    yield from [_line(score.to_json())] if as_json else score.lines()


def _check_pairs(paths: tuple[Path, Path], src: Sequence[str], tgt: Sequence[str]) -> None:
    if len(src) != len(tgt):
        raise DataError(f"{paths[0]} has {len(src):,} lines, {paths[1]} has {len(tgt):,}: they must go line for line")
    if not src:
        raise DataError(f"{paths[0]} is empty")


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

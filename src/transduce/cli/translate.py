"""Commands that use a model: `transduce translate`, `score`, `align`, `generate`, `fill` and `classify`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from transduce.cli import options as opt
from transduce.cli.options import check_output, print_lines, to_json, write_lines
from transduce.config.decoding import DecodingOptions
from transduce.errors import DataError, SettingsError
from transduce.logging import Log

if TYPE_CHECKING:
    from transduce.data.word_links import WordLink
    from transduce.decoding.open_run import DecoderT, RunPaths
    from transduce.decoding.results import Generation, Style
    from transduce.decoding.translator import Translator
    from transduce.text.languages import Languages

STDIN = Path("-")
_CHUNK = 1000  # lines that are classified before the first result is printed
_FILE_NAME = re.compile(r"\A(?!.*(?:://|@)).*\.\d?[A-Za-z][A-Za-z0-9]{0,4}", re.DOTALL)  # not http://x.y, a@b.de, 2.5


@dataclass(frozen=True, kw_only=True)
class Translate(opt.Command):
    """Translate text line by line. Empty lines stay empty.

    The sentences of a line are translated one by one, unless the run was
    trained on paragraphs or --no-split is given. List markers are kept.

    --nbest prints NUMBER<TAB>SCORE<TAB>TEXT for each translation of a line.

    If an error interrupts --output FILE, the lines so far are kept in FILE.partial.

    --output-dir is for many or large files: it shows progress, compresses like
    the input, and after a kill or an error the same command resumes, without a
    lost or doubled line.

    \b
    transduce translate runs/x "A dog runs. The old doctor reads."
    transduce translate runs/x < in.en > out.de
    transduce translate runs/x in.en.gz -o out.de --beam 1
    transduce translate runs/x in.en --nbest 5 --json
    transduce translate runs/x in.en --prefix starts.de
    transduce translate runs/x in.en --ensemble runs/y --ensemble runs/z
    transduce translate runs/nllb in.fr --src-lang fr --tgt-lang de
    transduce translate runs/x shards/*.en.gz --output-dir out
    transduce translate runs/x shards/*.en.gz --output-dir out --ray auto
    """

    run: opt.Run
    files: Annotated[list[str] | None, opt.argument("FILE|TEXT", "Text files, or texts (default: stdin).")] = None
    output: Annotated[Path | None, opt.file("Write to FILE (default: stdout).", "--output", "-o")] = None
    print_scores: Annotated[bool, Option("--scores", help="Print SCORE<TAB>TEXT.")] = False
    json: opt.Json = False
    prefix: Annotated[Path | None, opt.file("File with the beginning of each translation, line by line.")] = None
    ensemble: opt.Ensemble = None
    src_lang: opt.SrcLang = None
    tgt_lang: opt.TgtLang = None
    device: opt.Device = "auto"
    precision: opt.Precision = "float32"
    output_dir: Annotated[
        Path | None, opt.option("Write the translation of each file to DIR/NAME; resumable.", metavar="DIR")
    ] = None
    ray: Annotated[
        str | None, opt.option("Translate on a Ray cluster: HOST:PORT of its head, or auto.", metavar="ADDRESS")
    ] = None
    beam: opt.Beam = None
    length_penalty: opt.LengthPenalty = None
    max_length: opt.MaxLength = None
    no_repeat_ngram: opt.NoRepeatNgram = None
    temperature: opt.Temperature = None
    top_k: opt.TopK = None
    top_p: opt.TopP = None
    split: opt.Split = None
    batch_tokens: Annotated[int | None, opt.decoding_option("batch_tokens")] = None
    n_best: Annotated[int | None, opt.decoding_option("n_best", "--nbest")] = None
    sample: Annotated[bool | None, opt.decoding_option("sample", "--sample")] = None
    seed: opt.Seed = None

    def execute(self) -> None:
        decoding = self.decoding()
        style: Style = (
            "json" if self.json else "nbest" if decoding.n_best > 1 else "scores" if self.print_scores else "text"
        )
        if self.output_dir is not None:
            self._translate_to_folder(self.output_dir, decoding, style)
            return
        if self.ray is not None:
            raise SettingsError("--ray is for --output-dir DIR")
        inputs = [input_of(argument) for argument in self.files or ["-"]]
        check_output(self.output, *(file for file in inputs if isinstance(file, Path)), self.prefix)
        translator = load_translator(self._runs(), self.device, self.precision, (self.src_lang, self.tgt_lang))
        decoding = decoding.with_values(scores=style != "text")
        lines = translate_files(translator, inputs, decoding, style, self.prefix)
        if self.output:
            write_lines(self.output, lines)
        else:
            print_lines(lines)

    def _translate_to_folder(self, folder: Path, decoding: DecodingOptions, style: Style) -> None:
        from transduce.bulk.ray_cluster import RayCluster
        from transduce.bulk.translate import translate_to_folder

        if self.output is not None:
            raise SettingsError("--output and --output-dir: give only one of them")
        if self.prefix is not None:
            raise SettingsError("--prefix is for one output; leave out --output-dir")
        translate_to_folder(
            self._runs(),
            list(map(Path, self.files or [])),
            folder,
            decoding,
            style=style,
            cluster=None if self.ray is None else RayCluster(self.ray),
            device=self.device,
            precision=cast(Any, self.precision),  # `Translator.load` checks it
            languages=(self.src_lang, self.tgt_lang),
        )

    def _runs(self) -> list[Path]:
        return [self.run, *(self.ensemble or [])]


def input_of(argument: str) -> Path | list[str]:
    """Return the path of a file, or the lines of a text if no such file exists.

    Raises `SettingsError` if a text looks like the name of a file.
    """
    if argument == "-" or re.fullmatch(r"\w+://\S+", argument) or os.path.exists(argument):
        return Path(argument)
    is_word = argument.isascii() and argument.isprintable() and " " not in argument and argument[-1:] not in ".!?"
    if is_word or _FILE_NAME.fullmatch(argument):
        pipe = f"echo {shlex.quote(argument)} | transduce translate RUN"
        raise SettingsError(f"there is no file {argument}; check the name, or translate it as a text: {pipe}")
    return argument.split("\n")


@dataclass(frozen=True, kw_only=True)
class SentencePairs(opt.Command):
    """Base class of commands that read sentence pairs from two files."""

    run: opt.Run
    src: Annotated[Path, opt.file("Source text.")]
    tgt: Annotated[Path, opt.file("Translations, aligned line by line.")]
    src_lang: opt.SrcLang = None
    tgt_lang: opt.TgtLang = None
    device: opt.Device = "auto"


@dataclass(frozen=True, kw_only=True)
class Score(SentencePairs):
    """Print the log-probability (nats) of each given translation.

    \b
    transduce score runs/x --src in.en --tgt in.de
    transduce score runs/x --src in.en --tgt in.de --json
    transduce score runs/x --ensemble runs/y --src in.en --tgt in.de
    """

    ensemble: opt.Ensemble = None
    json: opt.Json = False

    def execute(self) -> None:
        from transduce.data.lines import read_parallel

        runs = [self.run, *(self.ensemble or [])]
        translator = load_translator(runs, self.device, "float32", (self.src_lang, self.tgt_lang))
        scores = translator.score(*read_parallel(self.src, self.tgt, translator.tokenizers.src))
        if self.json:
            keys = ("log_prob", "n_tokens", "token_log_probs")
            print_lines(to_json({key: getattr(score, key) for key in keys}) for score in scores)
        else:
            print_lines(f"{score.log_prob:.4f}" for score in scores)


@dataclass(frozen=True, kw_only=True)
class Align(SentencePairs):
    """Align the words of sentence pairs, and print i-j for each link.

    Words are separated by white space and counted from 0. With --gold,
    the alignment error rate, precision and recall go to stderr.

    \b
    transduce align runs/x --src test.en --tgt test.de > test.align
    transduce align runs/x --src a.en --tgt a.de --reverse runs/y
    transduce align runs/x --src a.en --tgt a.de --gold a.align
    """

    gold: Annotated[Path | None, opt.file("Links to compare with: i-j, or i?j for a possible link.")] = None
    reverse: Annotated[
        Path | None, opt.option("Run folder of a model for the other direction, to combine with.", metavar="RUN")
    ] = None
    symmetrize: Annotated[
        str | None,
        opt.option("How to combine both: grow-diag-final-and (the default), intersection or union."),
    ] = None
    method: Annotated[
        str | None,
        opt.option(
            "guided (by a head trained to align) or leave-out (by the loss of probability without a source word). "
            "Default: guided if all runs have such a head, or else leave-out."
        ),
    ] = None
    precision: opt.Precision = "float32"

    def execute(self) -> None:
        from transduce.data.lines import read_parallel
        from transduce.data.word_links import format_links, read_links
        from transduce.decoding import word_alignment as words
        from transduce.evaluation.metrics import score_links
        from transduce.runs.folder import RunFolder

        if self.symmetrize is not None and self.reverse is None:
            raise SettingsError(f"--symmetrize {self.symmetrize}: needs --reverse RUN, a model for the other direction")
        symmetrization = self.symmetrize or words.GROW
        words.check_symmetrization(symmetrization)
        translators = self._translators()
        settings = [RunFolder.open(run).settings for run in (self.run, self.reverse) if run is not None]
        method = self.method or words.common_method(settings)
        heads = [words.head_of(run_settings, method) for run_settings in settings]
        srcs, tgts = read_parallel(self.src, self.tgt, translators[0].tokenizers.src)
        gold = None if self.gold is None else read_links(self.gold, srcs, tgts)
        log = Log()
        predicted: list[list[WordLink]] = []

        def lines() -> Iterator[str]:
            directions = [words.align_words(translators[0], srcs, tgts, heads[0])]
            if self.reverse is not None:
                directions.append(words.align_words(translators[1], tgts, srcs, heads[1]))
            with log.progress("aligning") as bar:
                for number, (links, *backward) in enumerate(zip(*directions, strict=True), 1):
                    if backward:
                        links = words.symmetrize(links, backward[0], symmetrization)
                    if gold is not None:
                        predicted.append(links)
                    bar.update(number / len(srcs))
                    yield format_links(links)

        print_lines(lines())
        if gold is not None:
            log.say(f"{method}: {score_links(predicted, gold).line()}")

    def _translators(self) -> list[Translator]:
        """Load the run and, with --reverse, also the model for the other direction."""
        languages = (self.src_lang, self.tgt_lang)
        directions = [(self.run, languages)] + ([(self.reverse, languages[::-1])] if self.reverse else [])
        return [load_translator(run, self.device, self.precision, pair) for run, pair in directions]


def load_with_notes(load: Callable[..., DecoderT], run: RunPaths, device: str, precision: str) -> DecoderT:
    """Load a translator or a generator by `load`. If it is slower than it could be, print the reason on stderr."""
    decoder = load(run, device=device, precision=cast(Any, precision))  # `load` checks it
    for note in decoder.choice.notes():
        Log().say(note)
    return decoder


def load_translator(run: RunPaths, device: str, precision: str, languages: Languages) -> Translator:
    """Load a translator between languages (None: the run's). Notes on speed and on the languages go to stderr."""
    from transduce.decoding.translator import Translator

    translator = load_with_notes(Translator.load, run, device, precision).between(*languages)
    for note in translator.direction_notes():
        Log().say(f"note: {note}")
    return translator


def translate_files(
    translator: Translator,
    inputs: Sequence[Path | Sequence[str]],
    options: DecodingOptions,
    style: Style,
    prefix: Path | None = None,
) -> Iterator[str]:
    """Translate the lines of files (`-`: stdin) and texts, and yield lines to print; one by one if stdin is a terminal.

    The first few notes on translations go to stderr, and the number of notes at the end. JSON output contains them.

    Args:
        translator: The translator.
        inputs: Files, and lists of lines.
        options: Decoding options.
        style: Format of the output.
        prefix: File with the beginning of each translation, line by line.
    """
    from transduce.data.lines import read_inputs, read_lines
    from transduce.decoding.results import MAX_NOTES, Notes, format_rows, note_on

    vocabulary = translator.tokenizers.src
    texts = (read_inputs(given, vocabulary) if isinstance(given, Path) else given for given in inputs)
    lines = chain.from_iterable(texts)
    interactive = list(inputs) == [STDIN] and sys.stdin.isatty()
    parts: Iterable[Iterable[str]] = ([line] for line in lines) if interactive else [lines]
    prefixes = None if prefix is None else iter(read_lines(prefix))
    notes, number = Notes(Log(), most=sys.maxsize if interactive else MAX_NOTES), 0
    for part in parts:
        sources, to_translate = tee(part)
        translations = translator.translate_lines(to_translate, options, prefixes=prefixes)
        for src, translation in zip(sources, translations, strict=True):
            number += 1
            if note := note_on(style, number, src, translation):
                notes.show(note)
            yield from format_rows(style, number, src, translation, n_best=options.n_best)
    notes.close(number)
    if prefixes is not None and next(prefixes, None) is not None:
        raise DataError(f"{prefix}: more lines than the text, which has {number}")


@dataclass(frozen=True, kw_only=True)
class Generate(opt.Command):
    """Generate text from a prompt. Multiple outputs are separated by `---`.

    \b
    transduce generate runs/book --prompt "Once upon a time" --temperature 0.8
    echo "Once upon" | transduce generate runs/book --samples 3 --json
    """

    run: opt.Run
    prompt: Annotated[
        list[str] | None, opt.option("Text to continue (default: stdin); repeatable.", "--prompt", "-p")
    ] = None
    cut_prompt: Annotated[
        bool, Option("--cut-prompt", help="Cut the start of a prompt that is too long for the model.")
    ] = False
    memory: opt.Memory = None
    device: opt.Device = "auto"
    precision: opt.Precision = "float32"
    json: opt.Json = False
    max_length: opt.MaxLength = None
    no_repeat_ngram: opt.NoRepeatNgram = None
    temperature: opt.Temperature = None
    top_k: opt.TopK = None
    top_p: opt.TopP = None
    n_best: Annotated[int | None, opt.decoding_option("n_best", "--samples")] = None
    seed: opt.Seed = None

    def execute(self) -> None:
        from transduce.data.lines import read_lines
        from transduce.decoding.generator import Generator

        decoding = self.decoding(sample=True)
        generator = load_with_notes(partial(Generator.load, memory=self.memory), self.run, self.device, self.precision)
        prompts = self.prompt if self.prompt is not None else ["\n".join(read_lines(STDIN))]
        generations = generator.generate(prompts, decoding, cut_prompt=self.cut_prompt)
        if self.json:
            print_lines(map(_to_json, generations))
        else:
            print_lines(["\n---\n".join(f"{generation.prompt}{generation.text}" for generation in generations)])


def _to_json(generation: Generation) -> str:
    numbers = {"n_tokens": len(generation.ids), "log_prob": generation.log_prob, "finished": generation.finished}
    return to_json({"prompt": generation.prompt, "text": generation.text, **numbers})


def fill(
    run: opt.Run,
    texts: Annotated[
        list[str] | None, opt.argument("TEXT", "Text with <mask> for each token to predict (default: stdin).")
    ] = None,
    top: Annotated[int, Option(help="Candidates per mask.", min=1)] = 5,
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Predict masked tokens with a run of task "masked". Prints PROBABILITY, TOKEN and TEXT.

    \b
    transduce fill runs/bert "The capital of France is <mask>."
    transduce fill runs/bert --top 10 --json < texts.txt
    """
    from transduce.data.lines import read_lines
    from transduce.decoding.encoders import MaskFiller

    results = MaskFiller.load(run, device=device).fill(list(read_lines(STDIN)) if texts is None else texts, top=top)
    if json:
        print_lines(to_json(asdict(result)) for result in results)
        return
    for result in results:
        for number, candidates in enumerate(result.masks, 1):
            head = [f"mask {number}:"] if len(result.masks) > 1 else []
            print_lines([*head, *(f"{c.probability:6.1%}  {c.token}\t{c.text}" for c in candidates)])


def classify(
    run: opt.Run,
    file: Annotated[Path | None, opt.argument("FILE", "Text, or text<TAB>text (default: stdin).")] = None,
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Predict the label of each line of text. Prints LABEL<TAB>PROBABILITY.

    \b
    transduce classify runs/sst2 reviews.txt > labels.tsv
    echo "a fine film" | transduce classify runs/sst2 --json
    """
    from transduce.data.lines import read_inputs
    from transduce.decoding.encoders import TextClassifier

    classifier = TextClassifier.load(run, device=device)
    lines, n_cut = read_inputs(file or STDIN, classifier.vocabulary), 0
    while chunk := list(islice(lines, _CHUNK)):
        predictions = classifier.classify([tuple(line.split("\t")) for line in chunk])
        n_cut += sum(predicted.full for predicted in predictions)
        print_lines(
            to_json(asdict(predicted)) if json else f"{predicted.label}\t{predicted.probability:.4f}"
            for predicted in predictions
        )
    if n_cut:
        Log().warn(f"{n_cut:,} texts fill or exceed the {classifier.longest} tokens of the model; the rest is cut off")

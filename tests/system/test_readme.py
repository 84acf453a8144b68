"""README.md and docs: commands run in order at small sizes, ```python blocks run, excerpts are in the code, links work.

The blocks of one page run in order in one namespace, in an empty folder. A block fenced as ```py with a path is an
excerpt of that file; a line of dots marks an omission. Other ```py blocks of docs/ are not run here.
"""

import contextlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import transduce
from system.commands import SMALL, succeed, write_corpus
from transduce.config.settings import Settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FEW = "--set training.max_updates=3 " + " ".join(f"--set {value}" for value in SMALL if value.startswith("model."))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def at_small_size(command: str) -> str:
    """Return the command with a shorter training and a vocabulary that fits the small text."""
    if not command.startswith(("transduce train", "transduce doctor")) or "--dry-run" in command:
        return command
    command = re.sub(r" --set (training\.max_minutes|model\.preset)=\S+", "", command)
    few = FEW.replace("--set model.n_encoder_layers=1", "") if "--text" in command else FEW  # decoder-only
    return command if "recipe.toml" in command else f"{command} {few}"


def run_line(line: str) -> None:
    """Run a command, perhaps with the output of `echo` as its input or with its output in a file."""
    words, text = shlex.split(line, comments=True), ""
    if words[0] == "echo":
        assert words[2] == "|", line
        text, words = f"{words[1]}\n", words[3:]
    out = None
    if ">" in words:
        words, (out,) = words[: words.index(">")], words[words.index(">") + 1 :]
    assert words[0] == "transduce", line
    done = succeed(*words[1:], stdin=text)
    if out is not None:
        Path(out).write_text(done.out, encoding="utf-8")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    write_corpus(folder, "train", 200)
    write_corpus(folder, "valid", 10, split="valid")
    write_corpus(folder, "test", 10, split="test")
    (folder / "book.txt").write_bytes((folder / "train.en").read_bytes())
    (folder / "other.txt").write_bytes((folder / "test.en").read_bytes())
    with contextlib.chdir(folder):
        for line in "".join(blocks("bash")).splitlines():
            run_line(at_small_size(line))
    return folder


def test_the_commands_run(workshop: Path) -> None:
    for run in ("mine", "small", "tested", "again"):
        assert (workshop / "runs" / run / "model.safetensors").exists()
    assert not (workshop / "runs" / "planned").exists()
    assert (workshop / "test.out").read_text(encoding="utf-8").count("\n") == 10
    assert (workshop / "test.nbest.jsonl").read_text(encoding="utf-8").count("\n") == 10
    assert (workshop / "test.scores").read_text().count("\n") == 10
    assert (workshop / "dog.html").exists() and (workshop / "inside" / "index.html").exists()


def test_the_python_runs(workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(workshop)
    for block in blocks("py"):
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") == 3


def test_the_recipe_is_valid() -> None:
    for block in blocks("toml"):
        settings = Settings.from_mapping(tomllib.loads(block))
        assert settings.data.train and settings.data.test


def test_make_targets_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^```py (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


DEFINITION = re.compile(r"\[`(\w+)`\]\(([^)#\s]+\.py)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Return the Python python_blocks of a page, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in FENCE.finditer(text)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=pytest.mark.slow if page.parent.name == "notebooks" else ())
        for page in PAGES
        if python_blocks(page)
    ],
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in python_blocks(page):
        code = compile("\n" * line + source, str(page), "exec")  # a traceback shows the line of the page
        exec(code, namespace)


def code_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_excerpts_match_the_files(page: Path) -> None:
    """Line for line and in order, whatever the indentation."""
    for path, excerpt in EXCERPT.findall(page.read_text(encoding="utf-8")):
        source, place = code_lines((ROOT / path).read_text(encoding="utf-8")), 0
        for part in re.split(r"^\.\.\.$", excerpt, flags=re.MULTILINE):
            wanted = code_lines(part)
            found = [n for n in range(place, len(source)) if source[n : n + len(wanted)] == wanted]
            assert found, f"{page.name} shows an excerpt that {path} does not contain:\n{part}"
            place = found[0] + len(wanted)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_exist(page: Path) -> None:
    targets = LINK.findall(ANY_FENCE.sub("", page.read_text(encoding="utf-8")))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_linked_functions_are_defined_in_the_linked_file(page: Path) -> None:
    for name, target in DEFINITION.findall(page.read_text(encoding="utf-8")):
        source = (page.parent / target).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), f"{page.name}: {target} defines no {name}"


def test_index_names_every_package_every_page_and_the_public_api() -> None:
    index, code = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("README.md", "code.md"))
    packages = {path.parent.name for path in (ROOT / "src" / "transduce").glob("*/__init__.py")}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    assert not [name for name in packages if f"](../src/transduce/{name})" not in code]
    wanted = [
        *(f"]({page})" for page in pages),
        *(f"`{name}`" for name in transduce.__all__ if name != "__version__"),
    ]
    missing = [part for part in wanted if part not in index]
    assert not missing, f"docs/README.md does not contain {missing}"

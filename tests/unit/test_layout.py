"""The layout: imports go down the list of packages, and heavy packages are imported when they are needed."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "transduce"
FILES = sorted(SRC.rglob("*.py"))

# Packages and top-level modules, lowest first. Each imports only from those before it.
ORDER = (
    *("errors", "process", "config", "runs", "metrics_log", "logging", "native"),
    *("text", "nn", "models", "data", "demo"),
    *("machine", "decoding", "bulk", "inspection", "training", "distributed", "evaluation"),
    *(
        "tasks",
        "doctor",
        "pipeline",
        "verification",
        "distillation",
        "comparison",
        "convert",
        "serving",
        "cli",
        "__main__",
    ),
)


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path) -> list[tuple[str, int]]:
    """The modules of the package that a file imports anywhere, in type-checking blocks and functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "transduce" else [node.module]
            )
            found += [(name, node.lineno) for name in names if name]
        elif isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
    return [(name, line) for name, line in found if name.startswith("transduce.")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_go_down(path: Path) -> None:
    here = module_of(path)
    if not here:
        return  # the public API imports lazily from anywhere
    for name, line in imported(path):
        there = name.split(".")[1]
        if there in ("__version__", here[0]):
            continue
        where = f"{path.relative_to(SRC)}:{line} imports {name}"
        assert there in ORDER, f"{where}: {there} is not in ORDER"
        assert ORDER.index(there) < ORDER.index(here[0]), f"{where}: {there} comes after {here[0]} in ORDER"


def test_there_are_few_modules_at_the_top_level() -> None:
    assert len(list(SRC.glob("*.py"))) <= 8


def test_no_import_cycles() -> None:
    """The files have an order in which each imports only earlier ones, within packages too."""
    modules = {".".join(("transduce", *module_of(path))): path for path in FILES if path.name != "__init__.py"}
    needs = {name: {n for n, _ in imported(path) if n in modules and n != name} for name, path in modules.items()}
    while needs:
        free = [name for name, wanted in needs.items() if not wanted]
        assert free, f"import cycle: {sorted(needs)}"
        needs = {name: wanted - set(free) for name, wanted in needs.items() if name not in free}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_and_functions_stay_small(path: Path) -> None:
    """About 350 lines per file, 50 per function, 8 parameters; the limits here leave some room."""
    text = path.read_text(encoding="utf-8")
    n_lines = text.count("\n")
    assert n_lines <= 360, f"{path.name} has {n_lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = (node.end_lineno or 0) - node.body[0].lineno + 1
            assert body <= 60, f"{path.name}: {node.name} has {body} lines"
            n_parameters = len(node.args.args + node.args.posonlyargs + node.args.kwonlyargs)
            is_kernel = any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)  # of pointers
            assert n_parameters <= 9 or is_kernel or path.parent.name == "cli", (
                f"{path.name}: {node.name} has {n_parameters} parameters"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_init_files_only_export_names(path: Path) -> None:
    if path.name == "__init__.py" and path.parent != SRC:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
        assert all(isinstance(node, allowed) for node in tree.body), path


def test_nothing_is_ever_unpickled() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not modules & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            assert name != "torch.save", path
            if name == "torch.load":
                assert path == SRC / "convert" / "folder.py", path
                assert "weights_only=True" in map(ast.unparse, call.keywords), path


@pytest.mark.parametrize(
    "statement",
    [
        "import transduce",
        "from transduce import cli, config, logging, metrics_log;"
        " from transduce.cli import app, request; from transduce.tasks import defaults",
    ],
)
def test_import_does_not_load_torch(statement: str) -> None:
    code = (
        f"import sys\n{statement}\nprint(sorted({{'torch', 'numpy', 'sentencepiece', 'sacrebleu'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import transduce

    for name in transduce.__all__:
        assert getattr(transduce, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        transduce.nonsense  # noqa: B018


def test_base_classes_are_abstract() -> None:
    """A method that a subclass lacks must not act like that of another subclass."""
    from transduce.distributed.group import GroupRanks
    from transduce.nn.attention import Attention, MultiHeadAttention
    from transduce.training.averaging import Average
    from transduce.training.ranks import Ranks

    assert all(map(inspect.isabstract, (Attention, Average, MultiHeadAttention)))
    methods = {name for name, value in vars(Ranks).items() if inspect.isfunction(value) and name[0] != "_"}
    assert methods and methods <= vars(GroupRanks).keys()  # one of several ranks must not act as if it were alone

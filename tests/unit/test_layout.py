"""The layout of the package, shapes of all calls in tests, and regular expressions in linear time."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

import transduce
from import_graph import import_cycles, longest_chain, read_modules
from transduce.data.batch import Batch
from transduce.nn import pooling
from transduce.nn.masks import attention_bias, is_real

SRC = Path(__file__).parents[2] / "src" / "transduce"
MODULES = read_modules(SRC)

# Packages and top-level modules, lowest first. Each imports only from those before it.
ORDER = (
    *("errors", "process", "config", "runs", "metrics_log", "logging"),
    *("text", "nn", "models", "kernels", "data", "demo"),
    *("machine", "decoding", "bulk", "inspection", "training", "distributed", "evaluation"),
    *("tasks", "doctor", "pipeline", "distillation", "comparison", "convert", "serving", "cli"),
    "__main__",
)
LONGEST_CHAIN = 22
"""Modules in the longest chain of imports. This number may only become smaller; the goal is 20."""


def test_imports_go_down() -> None:
    errors = []
    for name, module in MODULES.items():
        for imported, line in module.imports.items():
            if "." not in name or "." not in imported:
                continue  # the public names are imported lazily, from anywhere
            package, needed = name.split(".")[1], imported.split(".")[1]
            assert package in ORDER and needed in ORDER, f"{package} or {needed} is not in ORDER"
            if ORDER.index(needed) > ORDER.index(package):
                errors.append(f"{module.path.relative_to(SRC)}:{line} imports {imported}, which comes later in ORDER")
    assert not errors, "\n".join(errors)


def test_there_are_few_modules_at_the_top_level() -> None:
    assert len(list(SRC.glob("*.py"))) <= 8


def test_there_are_no_import_cycles() -> None:
    assert not import_cycles(MODULES)


def test_no_chain_of_imports_is_longer_than_now() -> None:
    chain = longest_chain(MODULES)
    assert len(chain) <= LONGEST_CHAIN, " > ".join(chain)


def test_every_form_of_import_is_seen(tmp_path: Path) -> None:
    """`from package import module` is an import of the module, and a cycle of three modules is a cycle."""
    sources = {
        "__init__.py": "",
        "a.py": "from p import b",
        "b.py": "def f():\n    import p.c",
        "c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x",
        "d.py": "from p.sub import name\nfrom p.sub import e",
        "sub/__init__.py": "",
        "sub/e.py": "import p.a as renamed",
    }
    for name, text in sources.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(text, encoding="utf-8")
    modules = read_modules(tmp_path / "p")
    assert modules["p.d"].imports == {"p.sub": 1, "p.sub.e": 2}
    assert import_cycles(modules) == [("p.a", "p.b", "p.c")]
    assert longest_chain(modules) == ["p.d", "p.sub.e", "p.a+p.b+p.c"]


def test_files_and_functions_stay_small() -> None:
    """500 lines per file are fine for one concept; about 50 per function, 8 parameters, with some room."""
    errors = []
    for name, module in MODULES.items():
        if (n_lines := module.text.count("\n")) > 500:
            errors.append(f"{name} has {n_lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = (node.end_lineno or 0) - node.body[0].lineno + 1
                if body > 60:
                    errors.append(f"{name}.{node.name} has {body} lines")
                n_parameters = len(node.args.args + node.args.posonlyargs + node.args.kwonlyargs)
                is_kernel = any(ast.unparse(mark).startswith("triton.jit") for mark in node.decorator_list)  # pointers
                if n_parameters > 10 and not is_kernel and module.path.parent.name != "cli":
                    errors.append(f"{name}.{node.name} has {n_parameters} parameters")
    assert not errors, "\n".join(errors)


def test_init_files_only_export_names() -> None:
    for name, module in MODULES.items():
        if module.path.name == "__init__.py" and name != "transduce":
            allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
            assert all(isinstance(node, allowed) for node in module.tree.body), module.path


def test_nothing_is_ever_unpickled() -> None:
    for module in MODULES.values():
        path, nodes = module.path, list(ast.walk(module.tree))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
        for call in (node for node in nodes if isinstance(node, ast.Call)):
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
        " from transduce.cli import app, train; from transduce.tasks import defaults",
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


X, IDS = torch.zeros(2, 3, 4), torch.ones(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (is_real, ["a list"]),
        (attention_bias, [X]),  # not bool
        (pooling.mean, [X, torch.ones(2, 5, dtype=torch.bool)]),  # S is 3, then 5
        (Batch, [IDS, IDS.float(), IDS, 3]),
    ],
)
def test_calls_with_wrong_types_or_shapes_fail(function: Any, wrong: list[Any]) -> None:
    with pytest.raises(TypeCheckError):
        function(*wrong)


SIZE = 1 << 17
UNITS = " \t\n\ra1<&.-'_\"(%\u00c3\u4e00"
WORST = [*(("", unit) for unit in (*UNITS, "<a", "<a ", "&#1")), ("<", "a"), ("</a", " "), ("&#", "1"), (">>", "a")]
"""A beginning and what is repeated behind it: almost a match, everywhere."""


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """The compiled patterns among the global names of all modules, inside containers too."""
    for module in pkgutil.walk_packages(transduce.__path__, "transduce."):
        if module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ImportError:  # an optional dependency is missing
            continue
        for name, value in list(names.items()):
            for pattern in inside(value):
                yield f"{module.name}.{name}: {pattern.pattern!r}", pattern


def inside(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from inside(tuple(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from inside(one)


class TooSlow(Exception):
    """A pattern took more CPU time than a linear one."""


def takes_linear_time(pattern: re.Pattern[Any]) -> bool:
    """2.5 seconds of CPU time for each text; `a*b`, the fastest of quadratic patterns, takes six, others minutes."""
    try:
        for begin, unit in WORST:
            text = begin + (unit * (SIZE // len(unit) + 1))[:SIZE]
            subject = text.encode() if isinstance(pattern.pattern, bytes) else text
            signal.setitimer(signal.ITIMER_VIRTUAL, 2.5)
            for _ in pattern.finditer(subject):
                pass
            pattern.match(subject)
    except TooSlow:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return True


@pytest.mark.skipif(not hasattr(signal, "SIGVTALRM"), reason="needs a timer of CPU time")
def test_patterns_take_linear_time() -> None:
    def fail(*_: object) -> None:
        raise TooSlow

    names = {pattern: name for name, pattern in patterns()}
    before = signal.signal(signal.SIGVTALRM, fail)
    try:
        assert len(names) > 10
        assert not [name for pattern, name in names.items() if not takes_linear_time(pattern)]
    finally:
        signal.signal(signal.SIGVTALRM, before)


PACKAGE = Path(__file__).parents[2] / "src"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    n_examples = sum(len(found.examples) for found in doctest.DocTestFinder().find(module))  # skipped ones too
    assert n_examples > 0, "the examples were not found"
    assert failed == 0, "see the differences above"

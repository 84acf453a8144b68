"""Print counts of the code's structure, by package and as a whole, with the goals that were set for them.

python benchmarks/structure.py [SRC]    # default: src/transduce

A statement is what Python's parser calls one, docstrings included. The packages in a row of the table share a goal.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

SRC = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "src" / "transduce")
FILES = sorted(SRC.rglob("*.py"))
GOALS = {
    "config errors logging metrics_log machine process pipeline": 1800,
    "runs": 1100,
    "text": 1500,
    "data": 2700,
    "demo": 500,
    "nn": 3200,
    "models": 1100,
    "training distributed": 2500,
    "tasks": 1700,
    "decoding bulk": 3700,
    "inspection": 1500,
    "evaluation": 1600,
    "doctor": 1300,
    "convert": 2400,
    "distillation comparison": 1400,
    "serving": 3300,
    "cli": 1200,
}
"""Lines of packages and top-level modules."""
LINES, STATEMENTS, N_FILES, CHAIN = 33_000, 20_500, 230, 25
"""Goals of the whole."""


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imports(nodes: list[ast.stmt] | list[ast.AST]) -> set[str]:
    """Modules of the package that some statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & TREES.keys()


NEEDS = {name: imports(list(ast.walk(tree))) - {name, "transduce"} for name, tree in TREES.items()}


@cache
def chain(name: str) -> tuple[str, ...]:
    """The longest chain of imports that starts at a module."""
    if "." not in name or (SRC.parent / name.replace(".", "/")).is_dir():
        return (name,)  # a package only re-exports names; its files are counted themselves
    return (name, *max((chain(other) for other in sorted(NEEDS[name])), key=len, default=()))


def size_of(paths: list[Path]) -> tuple[int, int, int]:
    """Lines, statements and files."""
    trees = [TREES[name_of(path)] for path in paths]
    n_statements = sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths), n_statements, len(paths)


def print_packages() -> None:
    """Print a table with a row per goal; files that no goal counts are in the last row."""
    rest = list(FILES)
    rows = []
    for names, goal in GOALS.items():
        paths = [path for path in FILES if path.relative_to(SRC).parts[0].removesuffix(".py") in names.split()]
        rest = [path for path in rest if path not in paths]
        rows.append((names, *size_of(paths), goal))
    rows.append(("(others)", *size_of(rest), ""))
    rows.append(("total (at most)", *size_of(FILES), f"{LINES}; {STATEMENTS} statements, {N_FILES} files"))
    print(f"{'package':58} {'lines':>7} {'statements':>10} {'files':>5}  goal, lines")
    for names, lines, statements, files, goal in rows:
        print(f"{names:58} {lines:7,} {statements:10,} {files:5}  {goal}")


def main() -> None:
    print_packages()
    functions = [
        (name, node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted(((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}") for name, node in functions)
    wide = [
        f"{name}.{node.name}"
        for name, node in functions
        if len(node.args.args + node.args.posonlyargs + node.args.kwonlyargs) > 8 and ".cli" not in name
    ]
    lazy = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if ".cli" not in name and name != "transduce.__main__"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom) and imports([node])
    ]
    longest = max(map(chain, TREES), key=len)
    print(f"\nmodules at the top level            {len(list(SRC.glob('*.py')))}")
    print(f"longest file                        {max((p.read_text().count(chr(10)), p.name) for p in FILES)}")
    print(f"longest function, lines             {lengths[-1]}")
    print(f"functions over 50 lines             {sum(n > 50 for n, _ in lengths)}")
    print(f"functions over 8 parameters         {len(wide)} outside the command line")
    print(f"longest chain of imports            {len(longest)} (at most {CHAIN}): {' > '.join(longest)}")
    print(f"own lazy imports outside cli        {len(lazy)}")


if __name__ == "__main__":
    main()

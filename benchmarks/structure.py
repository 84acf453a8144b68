"""Print the size of each package, its budget, the longest chain of imports, and import cycles.

python benchmarks/structure.py [SRC]    # default: src/transduce

A statement is what Python's parser calls one, docstrings included. The packages in a row of the table share a budget.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from import_graph import Module, import_cycles, imported_modules, longest_chain, read_modules  # noqa: E402

BUDGETS = {
    "cli": 1500,
    "serving": 3700,
    "convert": 3000,
    "bulk": 550,
    "distillation comparison": 1000,
    "doctor": 850,
    "tasks pipeline": 1700,
    "evaluation": 1600,
    "inspection": 1800,
    "training distributed": 2700,
    "decoding": 3200,
    "kernels": 1200,
    "models": 1100,
    "nn": 2900,
    "data": 3100,
    "text": 1200,
    "demo": 500,
    "runs": 1150,
    "config __init__ __main__ errors logging machine metrics_log process": 2200,
}
"""Lines of packages and top-level modules."""
LINES, STATEMENTS, FILES, CHAIN = 35_000, 21_800, 190, 20
"""Budgets of the whole."""


def print_packages(modules: dict[str, Module]) -> None:
    """Print a table with a row per budget; modules without a budget are in a row of their own."""
    rows = {row: [name for name in modules if package_of(name) in row.split()] for row in BUDGETS}
    rows["(others)"] = sorted(modules.keys() - {name for names in rows.values() for name in names})
    rows["total"] = list(modules)
    total = f"{LINES:,} lines, {STATEMENTS:,} statements, {FILES} files"
    print(f"{'package':68} {'lines':>7} {'statements':>10} {'files':>5}  budget")
    for row, names in rows.items():
        chosen = [modules[name] for name in names]
        n_statements = sum(isinstance(node, ast.stmt) for module in chosen for node in ast.walk(module.tree))
        n_lines = sum(module.text.count("\n") for module in chosen)
        budget = BUDGETS.get(row, total if row == "total" else "")
        print(f"{row:68} {n_lines:7,} {n_statements:10,} {len(names):5}  {budget}")


def package_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def main() -> None:
    modules = read_modules(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "src" / "transduce"))
    print_packages(modules)
    functions = [
        (f"{name}.{node.name}", node)
        for name, module in modules.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted(((node.end_lineno or 0) - node.lineno + 1, name) for name, node in functions)
    wide = [
        name
        for name, node in functions
        if len(node.args.args + node.args.posonlyargs + node.args.kwonlyargs) > 8 and package_of(name) != "cli"
    ]
    lazy = {
        (name, statement.lineno)
        for name, function in functions
        if package_of(name) not in ("cli", "__main__")
        for statement in ast.walk(function)
        if isinstance(statement, ast.Import | ast.ImportFrom) and list(imported_modules(statement, modules))
    }
    longest_file = max(modules.values(), key=lambda module: module.text.count("\n"))
    chain = longest_chain(modules)
    print(f"\nlongest file                  {longest_file.path.name}, {longest_file.text.count(chr(10))} lines")
    print(f"longest function              {lengths[-1][1]}, {lengths[-1][0]} lines")
    print(f"functions over 50 lines       {sum(n > 50 for n, _ in lengths)}")
    print(f"functions over 8 parameters   {len(wide)} outside the command line")
    print(f"own lazy imports outside cli  {len(lazy)}")
    print(f"longest chain of imports      {len(chain)} (at most {CHAIN}): {' > '.join(chain)}")
    cycles = import_cycles(modules)
    print(f"import cycles                 {len(cycles)} (none allowed)")
    for cycle in cycles:
        print(f"  {' + '.join(cycle)}")


if __name__ == "__main__":
    main()

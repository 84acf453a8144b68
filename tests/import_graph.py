"""Imports between the modules of a package, in functions and type-checking blocks too."""

import ast
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A parsed file. `imports`: names of imported modules of the same package, each with a line that imports it."""

    path: Path
    text: str
    tree: ast.Module
    imports: dict[str, int]


def read_modules(package: Path) -> dict[str, Module]:
    """All modules of a package and its subpackages by dotted name."""
    paths = {_dotted_name(path, package): path for path in sorted(package.rglob("*.py"))}
    modules = {}
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        imports = {
            imported: node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for imported in imported_modules(node, paths)
        }
        modules[name] = Module(path, text, tree, imports)
    return modules


def imported_modules(node: ast.Import | ast.ImportFrom, known: Container[str]) -> Iterator[str]:
    """Yield the `known` modules that a statement imports: for `from a import b` the module `a.b`, otherwise `a`."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.name
        else:
            assert node.level == 0, f"line {node.lineno}: relative import"
            name = f"{node.module}.{alias.name}"
            name = name if name in known else str(node.module)
        if name in known:
            yield name


def import_cycles(modules: dict[str, Module]) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others."""
    return sorted({group for group in _groups(modules).values() if len(group) > 1})


def longest_chain(modules: dict[str, Module]) -> list[str]:
    """The longest chain of imports. A cycle is one link: the names of its modules, joined by `+`."""
    graph, groups = _graph(modules), _groups(modules)

    @cache
    def chain_from(group: tuple[str, ...]) -> list[str]:
        needed = {groups[imported] for name in group for imported in graph[name]} - {group}
        return ["+".join(group), *max(map(chain_from, sorted(needed)), key=len, default=[])]

    return max(map(chain_from, groups.values()), key=len)


def _groups(modules: dict[str, Module]) -> dict[str, tuple[str, ...]]:
    """For each module, itself and those with which it is in a cycle."""
    graph = _graph(modules)
    reachable = {}
    for name in graph:
        reached, waiting = set[str](), [name]
        while waiting:
            new = graph[waiting.pop()] - reached
            reached |= new
            waiting += new
        reachable[name] = reached
    return {
        name: tuple(sorted({name, *(other for other in reached if name in reachable[other])}))
        for name, reached in reachable.items()
    }


def _graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """The imports, without those of the package's own `__init__.py`, which loads public names when they are used."""
    return {
        name: {imported for imported in module.imports if "." in imported}
        for name, module in modules.items()
        if "." in name
    }


def _dotted_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

"""The shape of the package in numbers, read from its text: what `test_structure` lets fall and never rise."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import shardtensor

PACKAGE = Path(shardtensor.__file__).parent
REEXPORTS = PACKAGE / "compat"
"""Thin modules under the names of torch.distributed._shard: their names are other modules' by intent."""

FILES = sorted(PACKAGE.rglob("*.py"))
OPTIONAL = frozenset("transformers safetensors fsspec IPython".split())


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The dotted name of a module, as it is imported."""
    parts = ("shardtensor", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imported(node: ast.AST) -> list[str]:
    """What an import statement names: modules, and ``module.name`` for names of a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def eager(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from eager(child)


@cache
def for_types(path: Path) -> frozenset[int]:
    """The ids of a module's nodes that only type checkers read."""
    checked = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return frozenset(id(inner) for node in checked for inner in ast.walk(node))


def lines() -> int:
    """Lines of Python in the package."""
    return sum(len(path.read_text().splitlines()) for path in FILES)


def importers() -> dict[str, set[str]]:
    """From each module of the package to the modules that import it, inside functions and for types only, too."""
    found: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            for target in imported(node):
                module = target if target in MODULES else target.rpartition(".")[0]
                if module in found and module != name:
                    found[module].add(name)
    return found


def of_one_importer() -> list[str]:
    """Modules that one other module alone imports, but for ``__init__``: a file that may be a part of that one."""
    packages = {name_of(path) for path in FILES if path.stem == "__init__"}
    found = {name: by - packages for name, by in importers().items()}
    return sorted(
        name for name, by in found.items() if len(by) == 1 and not REEXPORTS.is_relative_to(MODULES[name].parent)
    )


def circles() -> dict[str, list[str]]:
    """From a folder to the modules in it that import each other in a circle; imports for types alone do not count."""
    after: dict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            for target in imported(node) if id(node) not in for_types(path) else ():
                module = target if target in MODULES else target.rpartition(".")[0]
                if module in MODULES and MODULES[module].parent == path.parent and module != name:
                    after[name].add(module)
    reached = {name: _reached(name, after) for name in MODULES}
    found: dict[str, list[str]] = defaultdict(list)
    for name in MODULES:
        if name in reached[name]:
            found[MODULES[name].parent.name].append(name)
    return dict(found)


def _reached(name: str, after: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(after[name])
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += after[module]
    return seen


def defined_twice() -> list[str]:
    """Public functions and classes that more than one module defines."""
    count = Counter(
        node.name
        for path in FILES
        if REEXPORTS not in path.parents
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, times in count.items() if times > 1)


def late_imports() -> list[str]:
    """Imports inside functions, but for torch and what imports it in pure folders, and for optional packages."""
    found = []
    for path in FILES:
        early = {id(node) for node in eager(tree_of(path))}
        for node in ast.walk(tree_of(path)):
            targets = imported(node)
            if not targets or id(node) in early or id(node) in for_types(path):
                continue
            if path.relative_to(PACKAGE).parts[0] == "cli" or targets[0].partition(".")[0] in OPTIONAL:
                continue
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")  # type: ignore[attr-defined]
    return found

"""Every single change to a file that a mutation run may make: where it is, what stands there, and what else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}


@attrs.frozen
class Change:
    """Replace the bytes `start` to `end` of a file by `new`; `first` is the first line of the function around them."""

    file: str
    function: str
    line: int
    first: int
    start: int
    end: int
    new: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.text}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What names a change when lines move."""
        return self.file, self.function, self.text

    def applied(self, source: bytes) -> bytes:
        """The text of the changed file; what follows keeps its lines."""
        gone = source[self.start : self.end].count(b"\n") - self.new.count("\n")
        end = source.find(b"\n", self.end)
        return source[: self.start] + self.new.encode() + source[self.end : end] + b"\n" * gone + source[end:]


def changes_of(path: Path, name: str) -> list[Change]:
    """The changes of a file, in its order; `name` is what reports call it."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, new, function, first in _walk(ast.parse(source), "", 0):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = f"{' '.join(source[start:end].decode().split())}  ->  {new}"
        if isinstance(node, ast.Constant):
            text += f"  in  {source.splitlines()[node.lineno - 1].decode().strip()}"
        found.append(Change(name, function or "(module)", node.lineno, first, start, end, new, text))
    return found


def _walk(node: ast.AST, function: str, first: int) -> Iterator[tuple[ast.AST, str, str, int]]:
    """The nodes below one that can be replaced, by what, and the function that they are in."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.ClassDef):
            parts: list[ast.AST] = list(node.body)
        else:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            parts = [*node.args.defaults, *(default for default in node.args.kw_defaults if default), *node.body]
    elif isinstance(node, ast.AnnAssign):
        parts = [node.value] if node.value else []
    elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg) or _is_strict(node):
        parts = []
    else:
        parts = list(ast.iter_child_nodes(node))
    for part in parts:
        if not _is_text(part):
            yield from ((part, new, function, first) for new in _replacements(part))
            yield from ((test, new, function, first) for test, new in _tests(part))
            yield from _walk(part, function, first)


def _is_text(node: ast.AST) -> bool:
    """Whether a node makes text for people, or is for type checkers alone."""
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) == "Protocol" for base in node.bases)
    if isinstance(node, ast.FunctionDef):
        returns = ast.unparse(node.returns) if node.returns else ""
        return returns == "str" or returns.endswith("Error") or node.name == "__repr__"
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name.endswith(("Error", "warn", "does_not_fit", "cast", "TypeVar", "register", "lru_cache"))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_strict(node: ast.AST) -> bool:
    """Whether a node is the ``strict=`` of a zip, which asserts that lengths agree."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _tests(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Conditions that say nothing which another change would turn around."""
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield node.test, f"(not {ast.unparse(node.test)})"
    if isinstance(node, ast.comprehension):
        yield from ((test, "True") for test in node.ifs)


def _replacements(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        texts = isinstance(node, ast.BinOp) and any(_is_string(side) for side in (node.left, node.right))
        if not texts:
            yield _with(node, op=SWAPS[type(node.op)]())
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            ops = [SWAPS[type(op)]() if i == at else other for i, other in enumerate(node.ops)]
            yield _with(node, ops=ops)
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=SWAPS[type(node.op)]())
        for at in range(len(node.values)):
            rest = [value for i, value in enumerate(node.values) if i != at]
            yield _with(node, values=rest) if len(rest) > 1 else f"({ast.unparse(rest[0])})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield str(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        yield str(1 if node.value != 1 else 0)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield "pass"
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Assign) and _sets_a_part(node.targets)):
        yield "pass"
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return None"
    if isinstance(node, ast.Continue):
        yield "break"
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in CALLS:
            yield _with(node, func=ast.Name(CALLS[name]))
        if name == "math.lcm":
            yield f"math.prod(({', '.join(map(ast.unparse, node.args))},))"


def _with(node: ast.AST, **fields: object) -> str:
    """The text of a node with other fields."""
    kept = {name: getattr(node, name) for name in node._fields}
    new = ast.unparse(ast.fix_missing_locations(type(node)(**{**kept, **fields})))
    return f"({new})" if isinstance(node, ast.expr) else new


def _sets_a_part(targets: list[ast.expr]) -> bool:
    return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))

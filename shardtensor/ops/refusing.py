"""What `strict` says of a call whose operands would have to move: the rule, the operands, the ways out, their cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import attrs
import torch

from shardtensor.errors import RuleError
from shardtensor.layout.explain import say_step
from shardtensor.layout.layout import Layout
from shardtensor.layout.route import route
from shardtensor.rules.refusal import fault_in, ways_out
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS
from shardtensor.tensor.placing import spec_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


def refuse(name: str, rule: Rule, operands: Sequence[torch.Tensor]) -> NoReturn:
    """Raise the RuleError of a call that would lay operands out anew. Sends nothing; the same on every rank."""
    names = names_of(name, len(operands))
    layouts = tuple(x._layout if isinstance(x, ShardedTensor) else tuple(x.shape) for x in operands)
    facts: dict[str, object] = {"rule": str(rule)}
    columns = [_columns(x) for x in operands]
    widths = [max(len(row[i]) for row in columns) for i in range(2)]
    for said, row in zip(names, columns, strict=True):
        facts[said] = "   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    ways = ways_out(rule, layouts, tuple(x.element_size() for x in operands))
    calls = [[_call(names[i], operands[i], layout) for i, layout in way.moves] for way in ways]
    size_bytes = max(x.element_size() for x in operands)
    for way, lines in zip(ways, calls, strict=True):
        if way.output.partial:
            output = _named(way.output, next(x for x in operands if isinstance(x, ShardedTensor)))
            lines.append(("and of the result", _steps(output, output.reduced(), size_bytes)))
    width = max(len(call) for way in calls for call, _ in way)
    told = ["\n".join(f"{call:<{width}}   {steps}" for call, steps in lines) for lines in calls]
    raise RuleError(f"{name}: {fault_in(rule, layouts, names)}", facts, told)


def names_of(name: str, count: int) -> list[str]:
    """What messages call the operands of an operation: as its row has them."""
    row = ROWS.get(name.rpartition(".")[2].strip("_"))
    known = row.call.operands if row is not None else ()
    if row is not None and row.pattern is not None and row.pattern.listed:
        return [f"{known[0]}[{i}]" for i in range(count)]
    if len(known) >= count:
        return list(known[:count])
    return ["input", "other"][:count] if count <= 2 else [f"operand {i + 1}" for i in range(count)]


def _columns(x: torch.Tensor) -> tuple[str, str]:
    spec = str(x.sharding_spec()) if isinstance(x, ShardedTensor) else "plain"
    return spec, f"{' x '.join(map(str, x.shape)) or 'scalar'} {str(x.dtype).removeprefix('torch.')}"


def _call(name: str, x: torch.Tensor, layout: Layout) -> tuple[str, str]:
    """The call that lays an operand out, and the steps it takes."""
    assert isinstance(x, ShardedTensor)
    layout = _named(layout, x)
    return f'reshard({name}, "{spec_of(layout, x.device)}")', _steps(x._layout, layout, x.element_size())


def _named(layout: Layout, x: ShardedTensor) -> Layout:
    """The layout, its axes called as the spec of `x` calls them where both are over one grid."""
    same = x._layout.grid == layout.grid and x._layout.ranks == layout.ranks
    return attrs.evolve(layout, names=x._layout.names) if same else layout


def _steps(source: Layout, target: Layout, size_bytes: int) -> str:
    return "; ".join(", ".join(say_step(step, size_bytes).split("   ")) for step in route(source, target))

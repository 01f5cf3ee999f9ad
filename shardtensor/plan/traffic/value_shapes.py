"""The global shapes of values as modules of a plan take and give them, where names and weights tell."""

from __future__ import annotations

from functools import cached_property

from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.flows.modules import around, is_inside
from shardtensor.plan.traffic.expert_traffic import Dealing, dealings


class Shapes:
    """Of values of so many samples and tokens.

    Args:
        batch: samples of one data rank.
        seq: tokens of a sample.
        rank: whose modules are meant: experts are on some ranks only.
    """

    def __init__(self, flows: Flows, batch: int, seq: int, rank: int) -> None:
        self._flows, self._modules = flows, flows.modules
        self.batch, self.seq, self._rank = batch, seq, rank

    @property
    def tokens(self) -> int:
        """Of one data rank."""
        return self.batch * self.seq

    @cached_property
    def dealings(self) -> dict[str, Dealing]:
        """The modules whose tokens are sent to experts, by path."""
        return dealings(self._modules)

    def dealing_around(self, path: str) -> Dealing | None:
        """What sends tokens to the experts that a module is one of, or a part of."""
        return next((self.dealings[above] for above in around(path) if above in self.dealings), None)

    def is_here(self, path: str) -> bool:
        """Whether this rank has a module: experts that are modules each are on some ranks only."""
        return self.dealing_around(path) is None or path in self._held

    @cached_property
    def _held(self) -> set[str]:
        """The modules in which this rank holds something."""
        layouts = {placed.layout for params in self._modules.owned.values() for placed in params.values()}
        here = {layout for layout in layouts if layout.numel(self._rank)}
        found: set[str] = set()
        for owner, params in self._modules.owned.items():
            if owner not in found and any(placed.layout in here for placed in params.values()):
                found |= {owner, *around(owner)}
        return found

    def with_last(self, path: str, last: int) -> tuple[int, ...]:
        """The shape of a value of this width in a module: samples and tokens are one dim for experts."""
        dealing = self.dealing_around(path)
        if dealing is not None:
            return dealing.rows_of_one(self.tokens, self._modules.times(dealing.axes)), last
        return (self.tokens, last) if path in self.dealings else (self.batch, self.seq, last)

    def into(self, path: str, name: str) -> tuple[int, ...] | None:
        """Of an argument; None for one that sends nothing: it has no gradient, or there is no such value."""
        if not name:
            return self.with_last(path, self._width_into(path))
        if name == "top_k_weights":
            return (self.tokens, self.dealings[path].top_k) if path in self.dealings else None
        is_cross = any(word in path.lower() for word in ("cross", "encdec", "encoder_attn"))
        if is_cross and ("states" in name or "encoder" in name):
            return self.with_last(path, self._width_into(path))
        return None

    def out_of(self, path: str) -> tuple[int, ...]:
        """Of the result of a module that is no known layer."""
        last = [layer for layer in self._modules.layers.values() if is_inside(layer.path, path)]
        made = [layer for layer in last if layer.kind.name == "linear" and layer.stated.out is not None]
        return self.with_last(path, made[-1].width("out") if made else self._width_into(path))

    def _width_into(self, path: str) -> int:
        """The last dim of what enters a module: that of the first layer in it which takes it."""
        for layer in self._flows.meetings.served.get(path, []):
            return layer.width("in" if layer.kind.name == "linear" else "embed")
        return self._hidden

    @cached_property
    def _hidden(self) -> int:
        """The width of values between modules."""
        for kind, dim in (("embedding", "embed"), ("norm", "embed"), ("linear", "in")):
            for layer in self._modules.layers.values():
                if layer.kind.name == kind:
                    return layer.width(dim)
        return 0

    @property
    def hidden(self) -> int:
        """The width of values between modules."""
        return self._hidden

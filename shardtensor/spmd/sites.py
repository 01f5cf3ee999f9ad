"""The user's line that each operation of a trace belongs to, and random numbers that are drawn again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from shardtensor.comm.call_site import OWN, call_site
from shardtensor.spmd.markers import Node

aten: Any = torch.ops.aten


class Sites(TorchFunctionMode):
    """Records the user's line for each operation, and which random numbers are drawn again.

    A checkpoint restores the state of the generator before it runs a part of the forward again. A draw from a state
    that an earlier draw was from has the same numbers, so its node is replaced by the earlier one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.site = ""
        self.again: dict[Node, Node] = {}
        self._place = 0  # how many draws there were before the state of the generator
        self._drawn: dict[int, Node] = {}
        self._counted: set[Node] = set()
        self._places: dict[int, tuple[torch.Tensor, int]] = {}  # of states that were read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.site = call_site(sys._getframe(1))
        fx_traceback.current_meta["custom"] = {"where": self.site}
        proxies = get_proxy_mode()
        if proxies is None:
            return func(*args, **(kwargs or {}))
        end = proxies.tracer.graph._root
        before = end.prev
        try:
            return func(*args, **(kwargs or {}))
        finally:  # a checkpoint ends its second run by an exception
            self._count_draws(before, end)

    def _count_draws(self, before: Node, end: Node) -> None:
        node = before.next
        while node is not end:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node not in self._counted:
                self._counted.add(node)
                if self._place in self._drawn:
                    self.again[node] = self._drawn[self._place]
                else:
                    self._drawn[self._place] = node
                self._place += 1
            node = node.next

    @contextlib.contextmanager
    def random_states(self) -> Iterator[None]:
        """Follow the states of the generators that the step reads and restores; leave them as they are."""
        owners = [torch, torch.random, torch.cuda, torch.cuda.random]
        was = [(owner, owner.get_rng_state, owner.set_rng_state) for owner in owners]

        def get(*_: Any, **__: Any) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                state = torch.ByteTensor(8)
            self._places[id(state)] = state, self._place
            return state

        def put(state: torch.Tensor, *_: Any, **__: Any) -> None:
            self._place = self._places[id(state)][1]

        try:
            for owner in owners:
                owner.get_rng_state, owner.set_rng_state = get, put  # type: ignore[attr-defined]
            yield
        finally:
            for owner, getter, setter in was:
                owner.get_rng_state, owner.set_rng_state = getter, setter  # type: ignore[attr-defined]


def mark_sites(graph: fx.Graph, in_backward: set[Node]) -> None:
    """Give each node the user's line, and those of backward the line of the forward that they belong to."""
    sites: dict[Any, str] = {}
    for node in graph.nodes:
        where = (node.meta.get("custom") or {}).get("where", "")
        number = node.meta.get("seq_nr")
        if node in in_backward:
            where = sites.get(number, where)
        elif number is not None and where:
            sites[number] = where
        node.meta["custom"] = {"where": where, "backward": node in in_backward}


def draw_again(graph: fx.Graph, node: Node, earlier: Node) -> None:
    """Let a draw of the same random numbers return those of the earlier one."""
    if len(earlier.target._schema.returns) > 1:
        node.replace_all_uses_with(earlier)
        graph.erase_node(node)
        return
    with graph.inserting_after(earlier):  # later operations may write to the drawn tensor
        kept = graph.call_function(aten.clone.default, (earlier,))
    kept.meta = dict(earlier.meta)
    node.replace_all_uses_with(kept)
    graph.erase_node(node)


def site_of(error: Exception) -> str:
    """Return the innermost line of the user's that an error went through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if not f"{trace.tb_frame.f_globals.get('__name__')}.".startswith(OWN):
            code = trace.tb_frame.f_code
            found = f"{Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found

"""Ranks of placements that name a worker of torch.distributed.rpc."""

from __future__ import annotations

from shardtensor.errors import LayoutError, RuleError
from shardtensor.spec.placement import Placement

_seen: dict[str, int] = {}


def rpc_is_up() -> bool:
    """Whether this process has called ``torch.distributed.rpc.init_rpc``."""
    from torch.distributed import rpc

    return rpc.is_available() and rpc._is_current_rpc_agent_set()


def rank_of(placement: Placement) -> int | None:
    """Return the global rank that a placement names, as a number or by its RPC worker; None if it names neither."""
    name = placement.worker_name()
    if name is None:
        return placement.rank()
    from torch.distributed import rpc

    if not rpc_is_up():
        raise RuleError(
            f"RPC framework needs to be initialized for using worker names: {name}",
            {"placement": placement},
            ["call torch.distributed.rpc.init_rpc first", 'name the rank instead, as in "rank:0/cpu"'],
        )
    try:
        rank: int = rpc.get_worker_info(name).id
    except RuntimeError:
        raise LayoutError(
            f"Invalid worker name: {name}", {"placement": placement}, "use a name that a rank gave to init_rpc"
        ) from None
    _seen[name] = rank
    return rank


def rank_seen(placement: Placement) -> int | None:
    """Return the rank that `rank_of` last returned for the placement's worker, even if RPC has been shut down since."""

    return placement.rank() if placement.worker is None else _seen.get(placement.worker)

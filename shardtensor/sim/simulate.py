"""`simulate`: run a function as every rank of a world, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.comm import process_group
from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.mesh import Mesh, read_mesh
from shardtensor.sim.group import SimGroup
from shardtensor.sim.world import World


def simulate(mesh: str | int | Mesh, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` as every rank of a world in this process and return the results, by rank.

    Inside of `fn` the world is what None means as a process group: tensors made from a spec lie on its ranks, and
    ``as_group()`` tells ``rank``, ``size`` and, with two axes or more, ``mesh``. Forward, backward, optimizers and
    hooks do what they do on as many processes. Ranks take turns, in rank order, wherever they wait in a collective;
    so a run is deterministic. Each rank starts with the caller's state of torch's and Python's default generators and
    has them for itself from there on: it draws what a process alone would draw. The caller's are as before, afterwards.

    The ranks share all else that a process has: module-level variables, and the arguments. Let `fn` make its own model.

    Args:
        mesh: the axes and their sizes, ``"tp=4"`` or ``"dp=2, tp=2"``, major first; or a number of ranks.
        fn: what each rank runs.
        args, kwargs: what it is called with.

    Returns:
        One result a rank.

    Raises:
        DisagreementError: (a ValueError, raised on the ranks) their collectives do not fit together, or they would
            wait for ever: names the calls, their group, and where in the code they are.
        Exception: whatever `fn` raised first on a rank, with a note that tells the rank and how the others ended.

    Example:
        >>> import torch
        >>> import shardtensor as st
        >>> def total():
        ...     x = st.distribute(torch.arange(6.0), "[tp]")
        ...     return x.local_tensor().tolist(), x.sum().item()
        >>> simulate("tp=3", total)
        [([0.0, 1.0], 15.0), ([2.0, 3.0], 15.0), ([4.0, 5.0], 15.0)]
    """
    axes = read_mesh(mesh)
    world = World(axes)

    def enter(rank: int) -> None:
        process_group.simulated.set(_group_of(world, rank))

    return world.run(lambda rank: fn(*args, **kwargs), enter)


def _group_of(world: World, rank: int) -> Group:
    mesh = world.mesh
    if mesh.size == 1:
        group: Group = SingleRankGroup(0)
    else:
        group = SimGroup(world, world.members[rank], mesh.ranks)
    return group.on_mesh(mesh, {}) if len(mesh.axes) > 1 else group

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

    Inside `fn`, None as a process group means this world: tensors made from a spec are sharded over its ranks, and
    ``as_group()`` has ``rank``, ``size`` and, with two axes or more, ``mesh``. Forward, backward, optimizers and hooks
    do the same as on as many processes. One rank runs at a time, until it waits in a collective; then the next in rank
    order runs, so a run is deterministic. Each rank has its own default generators of torch and Python, which start
    with the caller's state: it draws the same numbers as a process would. The caller's generators do not change.

    The ranks share everything else in the process, such as module-level variables and the arguments. So `fn` should
    make its own model.

    Args:
        mesh: the axes and their sizes, ``"tp=4"`` or ``"dp=2, tp=2"``, major first; or a number of ranks.
        fn: the function that each rank runs.
        args, kwargs: its arguments.

    Returns:
        The results, one for each rank.

    Raises:
        DisagreementError: (a ValueError, raised on the ranks) their collectives do not match, or they would wait for
            ever; it names the calls, their group, and their places in the code.
        Exception: the first exception that `fn` raised, with a note that names its rank and how the others ended.

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

"""`materialize` allocates and initializes a module that was built, and sharded, on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, PlanError, ShardTensorError
from shardtensor.tensor.drawing import agree_on_state
from shardtensor.tensor.memory import Location, become, owned, put_in_place, with_memory
from shardtensor.tensor.placing import device_for, own_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


def materialize(module: nn.Module, device: torch.device | str | None = None, init: Init | None = None) -> nn.Module:
    """Allocate and initialize every meta tensor of a module, and return the module.

    Each rank allocates its own parts only. Then the submodules set their values one after another, in the order in
    which they are built: children before their module, each module once. Random functions on a sharded tensor draw the
    numbers of the dense tensor, in small pieces. So with the same seed the numbers are, bit for bit, those of a dense
    module that is reset in this order; for stock layers also those of a newly built one. Besides its parts a rank
    holds at most the largest single tensor for a moment. The generator states of the group's first rank are used.

    Parameters stay the same objects, tied ones stay tied (the last module that sets a tied one decides its values), and
    tensors that have values keep them. If anything fails, the module is on the meta device as before.

    Args:
        module: built under ``torch.device("meta")`` and sharded there by `shard_module` or `shard_parameter`; parts of
            it may have values. All ranks of the groups of its sharded tensors call this.
        device: of the memory. By default that of the specs' placements, else the device that the group uses.
        init: sets the values of a submodule, in place of its own ``reset_parameters()``; called as ``module.apply``
            would call it, but only for modules with meta tensors in or below them: ``model._init_weights``, for
            example. If it assigns a new tensor, ``m.inv_freq = ...``, the old tensor gets its values.

    Raises:
        PlanError: (a RuntimeError) nothing sets the values of some tensors: no ``reset_parameters`` in their module
            or above it, or one that leaves them out. The error names them all.
        LayoutError: (a ValueError) `device` is the meta device, or one that does not exist.
        DisagreementError: (a ValueError) ranks have different modules.

    Example:
        >>> with torch.device("meta"):
        ...     mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> import shardtensor as st
        >>> mlp = st.shard_module(mlp, {"0": "[tp, ...]", "2.weight": "[-, tp]"})
        >>> _ = torch.manual_seed(0)
        >>> mlp = materialize(mlp)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(mlp[0].weight.full_tensor(), nn.Linear(4, 8).weight)
        True
    """
    found = on_meta(module)
    groups = _groups(module)
    fault, where, to_fill = None, None, set[nn.Module]()
    try:
        where = _devices(found, device)
        if init is None:
            to_fill = having_resets(module, found)
        else:
            to_fill = {m for m in module.modules() if any(t.is_meta for below in m.modules() for _, t in owned(below))}
    except ShardTensorError as error:
        fault = error
    facts = {", ".join(each.names): str(each) for each in found} | {"init": str(init is not None)}
    _agree(groups, f"materialize({type(module).__name__})", facts, fault)
    assert where is not None
    try:
        with torch.no_grad():
            for each, place in zip(found, where, strict=True):
                each.get_memory(place)
            owners = [owner for owner in built_order(module) if owner in to_fill]
            _fill(owners, init or _reset, found, groups, where)
        _agree(groups, f"materialize({type(module).__name__}), values", {}, _without_values(found, init))
    except BaseException:
        for each in found:
            each.undo()
        raise
    return module


def _groups(module: nn.Module) -> list[Group]:
    """Return the groups of all sharded tensors, in order; ranks that are not in one take no part in it."""
    tensors = (tensor for owner in module.modules() for _, tensor in owned(owner))
    groups = dict.fromkeys(tensor._group for tensor in tensors if isinstance(tensor, ShardedTensor))
    return [group for group in groups if group.index >= 0]


def _agree(groups: Sequence[Group], call: str, facts: dict[str, str], fault: ShardTensorError | None) -> None:
    for group in groups:
        agree(group, call, facts, fault)
    if fault is not None:
        raise fault


def _devices(found: Sequence[MetaTensor], device: torch.device | str | None) -> list[torch.device]:
    """Return the device of each tensor; plain ones get that of the first sharded one."""
    for each in found:
        if not isinstance(each.tensor, ShardedTensor) and is_traceable_wrapper_subclass(each.tensor):
            raise LayoutError(
                f"`{each.names[0]}` is a {type(each.tensor).__name__}, whose parts are not ours to make",
                fix="let the library that made it give it memory first: Module.to_empty of its module, for example",
            )
    if device is not None:
        return [_there(torch.device(device))] * len(found)
    default = torch.get_default_device()
    like = torch.device("cpu") if default.type == "meta" else default
    places = [
        device_for(each.tensor.sharding_spec(), each.tensor._group, like)
        if isinstance(each.tensor, ShardedTensor)
        else None
        for each in found
    ]
    first = next((place for place in places if place is not None), like)
    return [first if place is None else place for place in places]


def _there(device: torch.device) -> torch.device:
    if device.type == "meta":
        raise LayoutError("tensors on the meta device have no memory", fix='name another device, such as "cuda"')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LayoutError(f"there is no device {device} here", {"cuda devices": torch.cuda.device_count()})
    return own_device("cuda") if device == torch.device("cuda") else device


def _fill(
    owners: Iterable[nn.Module],
    init: Init,
    found: Sequence[MetaTensor],
    groups: Sequence[Group],
    where: Sequence[torch.device],
) -> None:
    """Call the modules' initializers in order, and record which tensors they wrote."""
    device = where[0] if where else torch.device("cpu")
    for group in groups:
        for stream in dict.fromkeys((torch.device("cpu"), *where)):
            agree_on_state(group, stream, None)  # plain tensors are then also drawn alike on every rank
    found_ids = {id(each.tensor) for each in found}
    with device:
        for owner in owners:
            kept = [(name, t, local_of(t).detach().clone()) for name, t in owned(owner) if id(t) not in found_ids]
            init(owner)
            for name, tensor, values in kept:
                if getattr(owner, name, None) is not tensor:
                    setattr(owner, name, tensor)
                local_of(tensor).detach().copy_(values)
        for each in found:
            each.take()


def _without_values(found: Sequence[MetaTensor], init: Init | None) -> PlanError | None:
    names = [name for each in found if not each.is_set for name in each.names]
    if not names:
        return None
    return PlanError(
        f"{'init' if init is not None else 'reset_parameters()'} left tensors without values",
        {"tensors": ", ".join(names)},
        FIXES if init is None else ("let init set them too: `module.name.copy_(...)`, or `module.name = ...`",),
    )


@attrs.define(eq=False)
class MetaTensor:
    """A meta tensor, its names, and its materialized value."""

    tensor: torch.Tensor
    locations: list[Location] = attrs.field(factory=list)
    names: list[str] = attrs.field(factory=list)
    undo: Callable[[], None] = lambda: None
    is_set: bool = False

    def __str__(self) -> str:
        spec = f"{self.tensor.sharding_spec()} of " if isinstance(self.tensor, ShardedTensor) else ""
        return f"{spec}{tuple(self.tensor.shape)} {self.tensor.dtype} on meta"

    def get_memory(self, device: torch.device) -> None:
        old, copied = self.tensor, with_memory(self.tensor, device)
        self.tensor = put_in_place(old, copied, self.locations)
        _bytes(local_of(self.tensor)).fill_(_UNSET)

        def undo() -> None:
            for owner, name in self.locations:
                setattr(owner, name, old)
            if self.tensor is old:  # the object stayed; `copied` has its old content
                become(old, copied)

        self.undo = undo

    def take(self) -> None:
        """Record whether this tensor has values; copy those of a tensor that was assigned in its place."""
        found = _bytes(local_of(self.tensor))
        self.is_set = not found.numel() or [*map(int, found.aminmax())] != [_UNSET, _UNSET]
        for owner, name in self.locations:
            value = getattr(owner, name, None)
            if value is self.tensor:
                continue
            self.is_set = not isinstance(value, torch.Tensor) or not value.is_meta
            if isinstance(value, torch.Tensor) and not value.is_meta and self._can_take(value):
                self.tensor.copy_(value)
                setattr(owner, name, self.tensor)

    def _can_take(self, value: torch.Tensor) -> bool:
        is_alike = (value.shape, value.dtype) == (self.tensor.shape, self.tensor.dtype)
        return is_alike or isinstance(self.tensor, ShardedTensor)  # it must stay: torch raises for another shape


_UNSET = 0xAB
"""Each byte of memory to which nothing was written."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def on_meta(module: nn.Module) -> list[MetaTensor]:
    """Return the tensors on the meta device that a module and those below it own, each once."""
    found: dict[int, MetaTensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in owned(owner):
            if tensor.is_meta:
                each = found.setdefault(id(tensor), MetaTensor(tensor))
                each.locations.append((owner, name))
                each.names.append(f"{path}.{name}" if path else name)
    return list(found.values())


Init = Callable[[nn.Module], Any]
"""A user's function that sets the values of one module."""

RESETS = ("reset_parameters", "_reset_parameters")
"""Names of the methods that initialize modules; the second is that of ``nn.MultiheadAttention``."""

FIXES = (
    "materialize(module, init=function), which is called with each submodule and sets its tensors",
    "give the module's class a reset_parameters() that sets them",
    "build the module's buffers outside torch.device('meta'): they keep their values",
)


def built_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterable[nn.Module]:
    """Yield a module and all below it, each once, children first."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from built_order(child, seen)
    yield module


def having_resets(module: nn.Module, found: Sequence[MetaTensor]) -> set[nn.Module]:
    """Return the modules whose own methods set the tensors: each tensor's nearest one, its module or one above."""
    modules = dict(module.named_modules())
    paths = {owner: path for path, owner in modules.items()}
    resettable: set[nn.Module] = set()
    missing: dict[str, list[str]] = {}
    for owner, name in (location for each in found for location in each.locations):
        path = paths[owner]
        while _reset_of(modules[path]) is None and path:
            path = path.rpartition(".")[0]
        if _reset_of(modules[path]) is None:
            missing.setdefault(f"{paths[owner] or 'the module'} ({type(owner).__name__})", []).append(name)
        resettable.add(modules[path])
    if missing:
        raise PlanError(
            "modules hold tensors without values and have no reset_parameters()",
            {who: ", ".join(names) for who, names in missing.items()},
            FIXES,
        )
    return resettable


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((method for name in RESETS if callable(method := getattr(module, name, None))), None)


def _reset(module: nn.Module) -> None:
    reset = _reset_of(module)
    assert reset is not None, "it has one"
    reset()

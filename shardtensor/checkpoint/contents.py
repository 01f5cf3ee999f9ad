"""What a checkpoint is made of: the tensors of models and optimizers by name, and all other values as JSON.

``model/<name>`` are the tensors of ``model.state_dict()``, ``optimizer/<parameter>/<key>`` those of the optimizer's
state; of a dict of models or optimizers, ``model.<key>/...``. Names do not depend on wrappers.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn, optim

from shardtensor.checkpoint.random_states import rng_state
from shardtensor.checkpoint.tensor_file import ITEM_BYTES
from shardtensor.checkpoint.values import encode
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError, ShardTensorError
from shardtensor.fsdp.module import FSDPModule
from shardtensor.layout.layout import Layout, replicated
from shardtensor.optim.fqn import optim_state_dict, plain_name
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import from_dtensor
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class Item:
    """A tensor of a checkpoint: its name, its layout, and this rank's local tensor."""

    name: str
    local: torch.Tensor
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return dtype_name(self.local.dtype)

    @property
    def whole_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.local.element_size()


@attrs.define
class Contents:
    """The tensors and the other values of a checkpoint; `own_items` and `own_values` are those of this rank alone."""

    items: dict[str, Item] = attrs.field(factory=dict)
    aliases: dict[str, str] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    own_items: dict[str, Item] = attrs.field(factory=dict)
    own_values: dict[str, Any] = attrs.field(factory=dict)

    def by_section(self) -> dict[str, list[Item]]:
        """Return the tensors of each model and each optimizer."""
        found: dict[str, list[Item]] = {}
        for item in self.items.values():
            section = item.name.partition("/")[0]
            if section.startswith(("model", "optimizer")):
                found.setdefault(section, []).append(item)
        return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def sections(kind: str, value: Any, leaf: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the objects of an argument by the name of their section: ``model``, or ``model.<key>`` of a dict."""
    if value is None:
        return {}
    if isinstance(value, leaf) or not isinstance(value, Mapping):
        return {kind: value}
    for key in value:
        if not isinstance(key, str) or not key.replace("_", "a").replace("-", "a").isalnum():
            raise CheckpointError(
                f"the keys of a dict passed as {kind}= become names of files",
                {"key": repr(key)},
                "use letters and digits",
            )
    return {f"{kind}.{key}": item for key, item in value.items()}


def models_of(model: Any) -> dict[str, Any]:
    """Return the modules, or state dicts, of the argument ``model=`` by section."""
    if isinstance(model, Mapping) and not any(isinstance(item, nn.Module | Mapping) for item in model.values()):
        return {"model": model}
    return {name: _unwrapped(each) for name, each in sections("model", model, nn.Module).items()}


def _unwrapped(module: Any) -> Any:
    """Return the user's module inside DistributedDataParallel and DataParallel, which put ``module.`` before names."""
    is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return module.module if is_wrapper else module


def config_texts(models: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the configuration files of models of transformers, by name."""
    library = sys.modules.get("transformers")
    texts: dict[str, str] = {}
    for section, model in models.items():
        if library is None or not isinstance(model, library.PreTrainedModel):
            continue
        folder = f"{section.partition('.')[2]}/" if "." in section else ""
        config = copy.deepcopy(model.config)
        own = next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))
        config.architectures = [own.__name__]
        config.dtype = next((param.dtype for param in model.parameters()), None)
        texts[f"{folder}config.json"] = config.to_json_string()
        if model.can_generate() and model.generation_config is not None:
            texts[f"{folder}generation_config.json"] = model.generation_config.to_json_string()
    return texts


def state_tensors(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """Return the tensors of a module or state dict by name, each once; the other names of tied ones; other values."""
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for full_name, value in state.items():
        name = plain_name(full_name)
        if not isinstance(value, torch.Tensor):
            rest[name] = value
        elif first.setdefault(id(value), name) != name:
            aliases[name] = first[id(value)]
        else:
            tensors[name] = value
    return tensors, aliases, rest


def item_of(name: str, tensor: torch.Tensor, group: Group | None) -> Item:
    """Return the item of a tensor; a plain one is replicated on the ranks of `group`, or a rank's own without one.

    Raises:
        CheckpointError: it is a partial sum, a sparse tensor, or of a dtype that files do not hold.
    """
    if is_dtensor(tensor):
        tensor = from_dtensor(tensor.detach())
    if isinstance(tensor, ShardedTensor):
        local, layout = tensor._local, tensor._layout
    else:
        local, layout = tensor, replicated(tuple(tensor.shape), range(1) if group is None else group.ranks)
    fault = None
    if layout.partial:
        fault = "is a partial sum", "reduce it first: st.reshard(tensor, spec) with a spec that is not partial"
    elif local.layout != torch.strided or local.is_quantized:
        fault = f"is {local.layout}" if not local.is_quantized else "is quantized", "save its dense parts"
    elif dtype_name(local.dtype) not in ITEM_BYTES:
        fault = f"has dtype {local.dtype}", "save it as another dtype"
    if fault is not None:
        raise CheckpointError(f'tensor "{name}" {fault[0]}: a checkpoint does not hold it', fix=fault[1])
    return Item(name, local.detach(), layout)


def collect(
    group: Group,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    dataloader: Any = None,
    rng: bool = True,
) -> Contents:
    """Return the contents of a checkpoint of these objects. All ranks call it: ranks that step different parameters
    exchange the outlines of their state."""
    made = Contents()
    models = models_of(model)
    for section, each in models.items():
        tensors, aliases, rest = state_tensors(each)
        prefix = f"{section}/"
        made.items.update((prefix + name, item_of(prefix + name, tensor, group)) for name, tensor in tensors.items())
        made.aliases.update((prefix + name, prefix + first) for name, first in aliases.items())
        if rest:
            made.values[section] = _encoded(rest, section, made.items, group)
    for section, each in sections("optimizer", optimizer, optim.Optimizer).items():
        made.values[section] = _encoded(optimizer_state(models, each), section, made.items, group)
    for section, each in sections("scheduler", scheduler, ()).items():
        made.values[section] = _encoded(each.state_dict(), section, made.items, group)
    if extra is not None:
        made.values["extra"] = _encoded(extra, "extra", made.items, group)
    own: dict[str, Any] = {"rng": rng_state()} if rng else {}
    own.update((name, each.state_dict()) for name, each in sections("dataloader", dataloader, ()).items())
    made.own_values = {name: _encoded(each, name, made.own_items, None) for name, each in own.items()}
    return made


def optimizer_state(models: Mapping[str, Any], optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state and groups of an optimizer by the names of the parameters in the models, and its class."""
    module = module_of(models, optimizer)
    state = optimizer.state_dict() if module is None else optim_state_dict(module, optimizer)
    return {"class": inner_class(optimizer), "state": state["state"], "param_groups": state["param_groups"]}


def module_of(models: Mapping[str, Any], optimizer: optim.Optimizer) -> Any:
    """Return the module, or dict of modules, that names an optimizer's parameters; None if it has names of its own."""
    modules = {name.partition(".")[2]: each for name, each in models.items() if isinstance(each, nn.Module)}
    if modules:
        return modules.get("", modules)
    if isinstance(optimizer, ShardedOptimizer):
        return None
    raise CheckpointError(
        f"the parameters of {type(optimizer).__name__} have no names without their model",
        fix="pass model= as well as optimizer=",
    )


def inner_class(optimizer: optim.Optimizer) -> str:
    """Return the name of the class whose state an optimizer holds."""
    inner = getattr(optimizer, "_inner", None) or getattr(optimizer, "optim", None)
    return type(inner if isinstance(inner, optim.Optimizer) else optimizer).__name__


def _encoded(value: Any, path: str, items: dict[str, Item], group: Group | None) -> Any:
    """Return a value as JSON; its tensors with dims become items. Without a group they are this rank's own."""
    scalars = _read_scalars(value)

    def replace(found: Any, name: str) -> Any:
        if isinstance(found, torch.dtype | torch.device):
            return {"$dtype" if isinstance(found, torch.dtype) else "$device": str(found).removeprefix("torch.")}
        array = sys.modules.get("numpy")
        if array is not None and isinstance(found, array.ndarray | array.generic):
            return {"$numpy": replace(torch.from_numpy(array.array(found)), name)}
        if not isinstance(found, torch.Tensor):
            return None
        if id(found) in scalars:
            number = encode(scalars[id(found)], name, replace)
            return {"$scalar": [dtype_name(found.dtype), number]}
        if found.is_meta:
            raise CheckpointError(f'tensor "{name}" is on the meta device and has no values')
        name = name.replace("/state/", "/", 1)
        while name in items:
            name += "+"
        items[name] = item_of(name, found, group)
        return {"$tensor": name}

    return encode(value, path, replace)


def _read_scalars(value: Any) -> dict[int, Any]:
    """Return the numbers of all plain 0-d tensors in a value by id; those of one device in one copy for each dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in _tensors_in(value):
        if tensor.dim() == 0 and not isinstance(tensor, ShardedTensor) and not is_dtensor(tensor):
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    read: dict[int, Any] = {}
    for (device, _), tensors in found.items():
        numbers = torch.stack([each.detach() for each in tensors]).tolist() if device.type != "meta" else []
        read.update(zip(map(id, tensors), numbers, strict=False))
    return read


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 100 and isinstance(value, Mapping | list | tuple):  # deeper ones are refused later
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth + 1)


def fault_of(error: Exception) -> ShardTensorError:
    """Return an error as one that all ranks can raise."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, ShardTensorError):
        return CheckpointError(error.fault, dict(error.rows))
    return CheckpointError(f"{type(error).__name__}: {error}")

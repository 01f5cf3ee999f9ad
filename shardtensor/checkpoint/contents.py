"""What a checkpoint is made of: the tensors of models and optimizers by name, and all other values as JSON.

``model/<name>`` are the tensors of ``model.state_dict()``, ``optimizer/<parameter>/<key>`` those of the optimizer's
state; of a dict of models or optimizers, ``model.<key>/...``. Names do not depend on wrappers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn, optim
from xxhash import xxh3_64_hexdigest

from shardtensor.checkpoint.items import Item, encoded, item_of
from shardtensor.checkpoint.manifest import TensorRecord, describe, folder_of
from shardtensor.checkpoint.random_states import rng_state
from shardtensor.checkpoint.together import agree_or_raise, fault_of
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError, ShardTensorError
from shardtensor.fsdp.module import FSDPModule
from shardtensor.optim.fqn import optim_state_dict, plain_name
from shardtensor.optim.sharded_optimizer import ShardedOptimizer, inner_optimizer


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


def sections(kind: str, value: Any, leaf: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the objects of an argument by the name of their section: ``model``, or ``model.<key>`` of a dict."""
    if value is None:
        return {}
    if isinstance(value, leaf) or not isinstance(value, Mapping):
        return {kind: value}
    for key in value:
        is_name = isinstance(key, str) and key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
        if not is_name or key == "state":
            raise CheckpointError(
                f"the keys of a dict passed as {kind}= become names of files",
                {"key": repr(key)},
                'use letters a to z and digits, and not "state"',
            )
    return {f"{kind}.{key}": item for key, item in value.items()}


def models_of(model: Any) -> dict[str, Any]:
    """Return the modules, or state dicts, of the argument ``model=`` by section."""
    if isinstance(model, Mapping):
        values = list(model.values())
        if not values or not all(isinstance(each, nn.Module | Mapping) for each in values):
            return {"model": model}  # a state dict
    wrappers = nn.parallel.DistributedDataParallel | nn.DataParallel  # they put ``module.`` before names
    found = sections("model", model, nn.Module)
    return {name: each.module if isinstance(each, wrappers) else each for name, each in found.items()}


def config_texts(models: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the configuration files of models of transformers, by name."""
    library = sys.modules.get("transformers")
    texts: dict[str, str] = {}
    for section, model in models.items():
        if library is None or not isinstance(model, library.PreTrainedModel):
            continue
        folder = folder_of(section)
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
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
            rest[name] = value
        elif first.setdefault(id(value), name) != name:
            aliases[name] = first[id(value)]
        else:
            tensors[name] = value
    return tensors, aliases, rest


def collect(
    group: Group,
    call: str,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    dataloader: Any = None,
    rng: bool = True,
    facts: Mapping[str, str] = MappingProxyType({}),
    fault: ShardTensorError | None = None,
) -> Contents:
    """Return the contents of a checkpoint of these objects, in one order on all ranks, which all call it.

    Ranks compare the names, and what each tensor is; `facts` of the call, too. Then ranks that step different
    parameters exchange the outlines of their state.

    Raises:
        CheckpointError: on every rank: something cannot be saved on a rank, or ranks differ; or a rank has a `fault`.
    """
    made = Contents()
    models: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    try:
        models = models_of(model)
        optimizers = sections("optimizer", optimizer, optim.Optimizer)
        for section, each in models.items():
            _add_model(made, section, each, group)
        for section, each in sections("scheduler", scheduler, ()).items():
            made.values[section] = encoded(each.state_dict(), section, made.items, group)
        if extra is not None:
            made.values["extra"] = encoded(extra, "extra", made.items, group, is_of_first=True)
        own: dict[str, Any] = {"rng": rng_state()} if rng else {}
        own.update((name, each.state_dict()) for name, each in sections("dataloader", dataloader, ()).items())
        made.own_values = {name: encoded(each, name, made.own_items, None) for name, each in own.items()}
    except Exception as error:  # on one rank: the others raise it, too
        fault = fault or fault_of(error)
    agree_or_raise(group, call, {**facts, "optimizers": ", ".join(optimizers), **_outline(made)}, fault)
    if optimizers:
        fault, added = None, Contents()
        try:
            for section, each in optimizers.items():
                added.values[section] = encoded(optimizer_state(models, each), section, added.items, group)
        except Exception as error:
            fault = fault_of(error)
        agree_or_raise(group, call, _outline(added), fault)
        made.items |= added.items
        made.values |= added.values
    _take_first_layouts(made, group)
    made.items = dict(sorted(made.items.items()))
    return made


def _add_model(made: Contents, section: str, model: Any, group: Group) -> None:
    tensors, aliases, rest = state_tensors(model)
    buffers = {id(each) for each in model.buffers()} if isinstance(model, nn.Module) else ()
    for key, tensor in tensors.items():
        name = f"{section}/{key}"
        made.items[name] = item_of(name, tensor, group, is_of_first=id(tensor) in buffers)
    made.aliases.update((f"{section}/{name}", f"{section}/{first}") for name, first in aliases.items())
    if rest:
        made.values[section] = encoded(rest, f"state of {section}", made.items, group, is_of_first=True)


def _outline(made: Contents) -> dict[str, str]:
    """Return what must be equal on every rank: each tensor's shape, dtype and layout, and the other values."""
    facts = {
        f'tensor "{name}"': f"{' x '.join(map(str, item.shape)) or 'scalar'} {item.dtype} {item.layout}"
        for name, item in made.items.items()
    }
    for name, value in made.values.items():
        text = repr(_keys(value) if name.startswith(("extra", "model")) else value)
        digest = xxh3_64_hexdigest(text.encode())
        facts[f"values of {name}"] = text if len(text) < 200 else f"{text[:160]}... (#{digest})"
    facts["values of each rank"] = ", ".join(made.own_values)
    return facts


def _keys(value: Any) -> Any:
    """Return the keys of nested dicts, without values."""
    if isinstance(value, dict):
        return {key: _keys(item) for key, item in value.items()}
    return None


def _take_first_layouts(made: Contents, group: Group) -> None:
    """Give tensors that groups of ranks hold under one name the layout of the first of these groups.

    A parameter that `fully_shard` shards along one axis of a mesh, and that is replicated along another, has a layout
    on each rank that names the ranks of its own group.
    """
    own = {name: describe(item.layout)[1] for name, item in made.items.items() if len(item.layout.ranks) != group.size}
    if not any(each[0] for each in group.exchange(bytes([bool(own)]))):
        return
    first: dict[str, dict[str, Any]] = {}
    for report in group.exchange_objects(own):
        for name, texts in report.items():
            first.setdefault(name, texts)
    for name, texts in first.items():
        item = made.items[name]
        layout = TensorRecord(item.shape, item.dtype, **texts).layout
        if set(layout.ranks) != set(item.layout.ranks):
            made.items[name] = attrs.evolve(item, local=item.local.new_empty(0), layout=layout)


def optimizer_state(models: Mapping[str, Any], optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state and groups of an optimizer by the names of the parameters in the models, and its class."""
    module = module_of(models, optimizer)
    state = optimizer.state_dict() if module is None else optim_state_dict(module, optimizer)
    return {
        "class": type(inner_optimizer(optimizer)).__name__,
        "state": state["state"],
        "param_groups": state["param_groups"],
    }


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

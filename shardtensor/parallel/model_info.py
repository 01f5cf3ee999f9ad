"""The model that a plan is checked against, from a real module: one built on the meta device takes no memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardtensor.parallel.layers import layer_class
from shardtensor.parallel.parameter import dim_names
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo, kind_named
from shardtensor.tensor.memory import owned


def model_info(module: nn.Module, source: str = "", *, all_buffers: bool = False) -> Model:
    """Return the names, shapes and modules of a module, as plans use them.

    Names omit what wrappers add to them; tied tensors appear under each of their names. Buffers that are not saved are
    part of the code and left out.

    Args:
        module: on any device; ``with torch.device("meta"):`` builds one without memory.
        source: its name in messages; by default its class.
        all_buffers: include those that are not saved.

    Example:
        >>> model = model_info(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
        >>> [(tensor.name, tensor.shape, tensor.dims) for tensor in model.tensors][:2]
        [('0.weight', (8, 4), ('out', 'in')), ('0.bias', (8,), ('out',))]
        >>> model.modules["0"].counts["out_features"]
        8
    """
    tensors: dict[str, TensorInfo] = {}
    names: dict[int, list[str]] = {}
    modules: dict[str, ModuleInfo] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        path = unwrapped(path)
        modules[path] = _module(part)  # a wrapper comes before its module, which has the same path and replaces it
        for name, tensor in owned(part):
            is_buffer = name in part._buffers
            if is_buffer and not all_buffers and name in part._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape, dims = tuple(tensor.shape), None if is_buffer else dim_names(part, name)
            tensors[full] = TensorInfo(full, shape, dims, dtype, is_buffer, tensor.requires_grad)
            names.setdefault(id(tensor), []).append(full)
    tied = tuple(tuple(dict.fromkeys(each)) for each in names.values() if len(set(each)) > 1)
    return Model(tuple(tensors.values()), source or type(module).__name__, modules, tied, config_of(module))


def modules_by_path(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by their paths in plans: the wrapped module, not its wrapper."""
    return {unwrapped(path): part for path, part in module.named_modules(remove_duplicate=False)}


def own_paths(module: nn.Module) -> dict[str, str]:
    """Return the paths of modules as the module has them, by their paths in plans."""
    return {unwrapped(path): path for path, _ in module.named_modules(remove_duplicate=False)}


def _module(module: nn.Module) -> ModuleInfo:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        arguments = tuple(inspect.signature(type(module).forward).parameters.values())
    except AttributeError:  # a scripted module has a forward, and its class has none
        arguments = ()
    counts = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_")
    }
    return ModuleInfo(_class_name(module), tuple(each.name for each in arguments if each.kind in named)[1:], counts)


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, which selects its arithmetic; with its package if only the name is known."""
    cls = type(module)
    kind = kind_named(cls.__name__)
    if isinstance(module, nn.Embedding):
        return "Embedding"
    if kind is not None and not cls.__module__.startswith("torch.") and layer_class(cls) is None:
        return f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__


def config_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the configuration of a module that has one, as those of Hugging Face do; else an empty dict."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return to_dict() if to_dict is not None else {}

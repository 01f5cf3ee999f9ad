"""The plan of a command's options, and its model: from ``dims`` lines, a file's header, or a module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import NotTraced, SpecError
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import dtype_of, model_from_dims, no_tensors, other_family, refuse_quantised
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.text.reading import read_plan

OWN_MODEL = "give --module PKG:FN; FN() makes a small one of the same names, or it and step(module, sample) -> loss"


def resolved_of(path: Any, options: Any) -> Resolved:
    """Return the plan of a path or name, matched to the model that a command's options name.

    Args:
        options: with `model`, `world`, `set`, `safetensors` and `module`; `dtype`, if they have it.

    Raises:
        SpecError, PlanError: the plan, the configuration or the model cannot be read.
    """
    config, source = read_config(options.model)
    with family_first(options, config, source):
        plan = read_plan(path, config=config, world=options.world, params=dict(options.set), config_source=source)
    model = model_of(plan, config=config, config_source=source, safetensors=options.safetensors, module=options.module)
    return resolve(plan, model.cast(getattr(options, "dtype", None)))


@contextmanager
def family_first(options: Any, config: Mapping[str, Any], source: str) -> Iterator[None]:
    """If a plan cannot be read because it is for another family than `config`, raise that error instead."""
    try:
        yield
    except SpecError as error:
        if options.module is None and options.safetensors is None and config:
            raise other_family(error.sources, config, options.world, source) or error from None
        raise


def model_of(
    plan: Plan,
    *,
    config: Mapping[str, Any],
    config_source: str = "config.json",
    safetensors: str | Path | None = None,
    module: str | None = None,
) -> Model:
    """Return the names and shapes of the tensors of a plan's model.

    Imports torch only for a `module`, or if transformers makes the model of `config`: for a plan without ``dims``.

    Args:
        plan: its ``dims`` lines, and those of ``NAME.dims.shard`` beside it, are used without the options below.
        config: the keys of the model's config.json.
        safetensors: an index, or a file: its headers are used; names of dims still come from ``dims`` lines.
        module: ``package.module:function``; the function returns the model.

    Raises:
        SpecError, PlanError: there are no names and shapes, or their source cannot be read.
    """
    if module is not None:
        return attrs.evolve(_from_module(module), config=config)
    if safetensors is None:
        return _from_text(plan, config, config_source)
    from shardtensor.plan.models.safetensors_shapes import model_from_safetensors

    return model_from_safetensors(safetensors, _dims_if_any(plan, config_source), config)


def _from_text(plan: Plan, config: Mapping[str, Any], config_source: str) -> Model:
    """Return the model of the ``dims`` lines; if there are none, the one that transformers makes of the config.json."""
    try:
        named = model_from_dims(plan, config_source)
        return named if config else attrs.evolve(named, source="")  # they are from the plan itself
    except SpecError as error:
        if error.code != "E301" or "model_type" not in config:
            raise
    from shardtensor.cli.model_source import transformers_model
    from shardtensor.parallel.model_info import model_info

    refuse_quantised(config, config_source)
    try:
        module = transformers_model(config)
    except ImportError:
        facts = {"needed": f"transformers, which makes the model of {config_source}; it is not installed"}
        raise no_tensors(plan, facts, ["install transformers"]) from None
    except ValueError as error:
        raise no_tensors(plan, {"transformers": str(error).partition("\n")[0]}) from None
    return attrs.evolve(model_info(module, config_source), config=config)


def _dims_if_any(plan: Plan, config_source: str) -> Model | None:
    """Return a model with names of dims; None if the plan has no dims beside it, or those of another family."""
    try:
        return model_from_dims(plan, config_source)
    except SpecError as error:
        if error.code in ("E104", "E106", "E301"):
            return None
        raise


def builder_of(text: str) -> Callable[[], Any]:
    """Return the function that ``--module`` names.

    Raises:
        SpecError: E303, it does not exist.
    """
    package, _, name = text.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:  # an installed command does not search there
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "write package.module:function"
        raise SpecError(f"--module {text} is not there", {"found": str(error)}, fix, code="E303") from None


def case_of(options: Any, resolved: Resolved) -> Any:
    """Return the `Case` of a command's options: the module of ``--module``, or a small one of the config.json.

    Raises:
        NotTraced: there is no such module, or none that runs on all ranks in this process.
    """
    if not is_installed("torch"):
        raise NotTraced("torch is not installed", "install it: `pip install torch`")
    from shardtensor.trace.case import own_case, small_case

    config = resolved.plan.config
    if options.module is not None:
        return own_case(options.plan, resolved.plan, config, builder_of(options.module))
    if "model_type" not in config:
        raise NotTraced("no module is given")
    if not is_installed("transformers"):
        raise NotTraced(
            "transformers, which makes the model of a config.json, is not installed", "install transformers"
        )
    try:
        keys = full_config(config)
        return small_case(options.plan, resolved.plan, keys, transformers_model)
    except ValueError as error:
        raise NotTraced(str(error).partition("\n")[0]) from None


def _from_module(text: str) -> Model:
    made = builder_of(text)()
    from shardtensor.parallel.model_info import model_info

    return model_info(made[0] if isinstance(made, tuple) else made)  # with a step beside it, for --numeric


def transformers_model(config: Mapping[str, Any], device: str = "meta") -> Any:
    """Return the module that transformers makes of a model's configuration; on the meta device no tensor has memory.

    Args:
        config: the keys of its config.json. Its first architecture is the class, or its base model if it has none.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no such model.
    """
    import torch
    import transformers

    try:
        hf_config = transformers.AutoConfig.for_model(**config)
        if device != "meta":
            hf_config._experts_implementation = "eager"  # the fused ones do not compute in float64
        name = next(iter(config.get("architectures") or ()), "")
        with torch.device(device):
            model_class = getattr(transformers, name, None)
            model = model_class(hf_config) if model_class else transformers.AutoModel.from_config(hf_config)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"transformers makes no model of this configuration: {error}") from None
    return model.to(getattr(torch, dtype_of(config)))


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keys of a configuration, those with their default values too.

    Raises:
        ValueError: transformers has no such model.
    """
    import transformers

    try:
        return {**transformers.AutoConfig.for_model(**config).to_dict(), **config}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        version = getattr(transformers, "__version__", "")
        raise ValueError(f"transformers {version} makes no model of this configuration: {error}") from None


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None

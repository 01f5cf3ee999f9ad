"""Every function that a Tensor subclass can override, called with ShardedTensors: the dense answer or an error.

Arguments are made from the functions' names of parameters; where the dense call refuses them, the sharded one need only
refuse or answer. Never a local answer: what comes back is compared with the call on the whole.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import FULL, device
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import shardtensor as st

# What these give is no function of values, or is no error but an abort.
LEFT_OUT = {
    "torch.Tensor.__cuda_array_interface__.__get__",
    "torch._assert_async",
    "torch.empty_like",
    "torch.Tensor.new_empty",
    "torch.Tensor.share_memory_",
}
SIZED = {  # parameters that are no tensors
    "dim": 0, "dim0": 0, "dim1": 1, "axis": 0, "axis0": 0, "axis1": 1, "dims": (0, 1), "n": 2, "k": 1, "p": 2, "q": 2,
    "size": (4, 4), "shape": (4, 4), "index": 0, "start": 0, "length": 2, "end": 2, "step": 1, "repeats": 2,
    "sections": 2, "indices_or_sections": 2, "chunks": 2, "split_size_or_sections": 2, "split_size": 2, "upper": True,
    "source": 0, "destination": 1, "value": 2.0, "fill_value": 2.0, "min": 1.0, "max": 9.0, "decimals": 0,
    "diagonal": 0, "offset": 0, "shifts": 1, "correction": 1, "unbiased": True, "keepdim": True, "descending": False,
    "largest": True, "sorted": True, "exponent": 2, "alpha": 1, "beta": 1, "eps": 1e-5, "num_classes": 40,
    "kernel_size": 2, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "training": False, "inplace": False,
    "reduction": "sum", "lambd": 0.5, "normalized_shape": (4,), "num_groups": 2, "output_size": 2, "scale_factor": 2,
    "equation": "ij,jk->ik", "maxnorm": 1, "sizes": (2, 2), "reps": (2, 1), "tile_dims": (2, 1),
    "dtype": torch.float64, "weights": None, "generator": None, "negative_slope": 0.1, "high": 5, "low": 0,
    "mean": 0.0, "std": 0.0,
}  # fmt: skip
LISTED = {"tensors", "operands", "tensor_list", "self_list", "tensors1", "tensors2"}
BOOLEAN = {"mask", "condition"}
INTEGER = {"indices", "index_", "target", "ids", "tensor_indices_or_sections"}


VECTOR = {"vec", "vec1", "vec2"}


def operands() -> list[dict[str, torch.Tensor]]:
    """Sets of dense tensors by kind; some functions take only one of them."""
    base = torch.arange(16.0, dtype=torch.float64, device=device()).view(4, 4) + 1
    positive = base @ base.T / 20 + 4 * torch.eye(4, dtype=torch.float64, device=device())
    floats = [positive, base / 20, base.long(), (base / 20).view(1, 4, 4), (base / 20).view(1, 1, 4, 4), base[0] / 20]
    return [{"float": x, "int": x.long() % 4, "bool": x > 1, "vector": x.reshape(-1)[:4]} for x in floats]


@lru_cache
def parameters_of(dummy: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(dummy).parameters.values())


def arguments(
    dummy: Callable[..., Any], kinds: dict[str, torch.Tensor], optional: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the names of the parameters, those with a default only if `optional`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    names = {parameter.name for parameter in parameters_of(dummy)}
    for parameter in parameters_of(dummy):
        name, has_default = parameter.name, parameter.default is not parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if has_default and (not optional or name not in SIZED):
            continue
        if name in LISTED:
            value: Any = [kinds["float"], kinds["float"]]
        elif name in BOOLEAN:
            value = kinds["bool"]
        elif name in INTEGER or (name == "index" and names & {"source", "value", "src", "sparse_grad"}):
            value = kinds["int"]
        elif name in VECTOR:
            value = kinds["vector"]
        elif name in SIZED and not (name in ("source", "value") and "index" in names):
            value = SIZED[name]
        else:
            value = kinds["float"]
        if parameter.kind is parameter.KEYWORD_ONLY or has_default:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def copies(values: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    made: dict[int, torch.Tensor] = {}
    return tree_map(lambda x: made.setdefault(id(x), make(x.clone())) if isinstance(x, torch.Tensor) else x, values)


def call(function: Any, values: Any) -> tuple[Any, Any, Exception | None]:
    """What a call from one state of the generator returns, its arguments afterwards, or its error."""
    torch.manual_seed(0)
    random.seed(0)
    args, kwargs = values
    try:
        return function(*args, **kwargs), values, None
    except Exception as error:
        return None, values, error


def plain(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def differ(found: Any, want: Any) -> str | None:
    """How an answer differs from the dense one; None when it does not."""
    a, b = tree_flatten(found)[0], tree_flatten(want)[0]
    if len(a) != len(b):
        return f"{len(a)} results instead of {len(b)}"
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return f"{type(x).__name__} instead of {type(y).__name__}"
        if isinstance(y, torch.Tensor):
            x = plain(x)
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"{tuple(x.shape)} {x.dtype} instead of {tuple(y.shape)} {y.dtype}"
            try:
                torch.testing.assert_close(x.detach(), y.detach(), equal_nan=True, check_device=False)
            except (AssertionError, NotImplementedError, RuntimeError) as error:
                return f"other values: {str(error).splitlines()[0]}"
        elif isinstance(y, int | float | str | bool | torch.Size | torch.dtype | torch.device) and x != y:
            return f"{x!r} instead of {y!r}"
    return None


def is_collective(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("torch.distributed")


SPECS = {
    1: ("[tp balanced]",) * 2,
    2: ("[tp balanced, -]", "[-, tp balanced]"),
    3: ("[-, tp balanced, -]", "[-, -, tp balanced]"),
    4: ("[-, -, tp balanced, -]", "[-, tp balanced, -, -]"),
}


def walk(step: int) -> dict[str, Any]:
    """What went wrong, which functions answered and which refused, of every `step`-th function."""
    wrong, answered, refused, tensors = {}, [], {}, operands()
    functions = sorted(get_testing_overrides().items(), key=lambda item: str(resolve_name(item[0])))
    for number, (function, dummy) in enumerate(functions[::step]):
        name = resolve_name(function) or function.__name__
        if name in LEFT_OUT or "__torch" in name or is_collective(function):
            continue
        for kinds in tensors:
            for optional in (False, True):
                values = arguments(dummy, kinds, optional)
                want, want_args, error = call(function, copies(values, lambda x: x))
                if error is not None or not any(isinstance(x, torch.Tensor) for x in tree_leaves(values)):
                    continue
                shards = copies(values, lambda x: st.distribute(x, SPECS[x.dim()][number % 2]))  # noqa: B023
                found, found_args, error = call(function, shards)
                if error is not None:
                    refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    continue
                answered.append(name)
                how = differ(found, want) or differ(found_args, want_args)
                if how is not None:
                    wrong[name] = how
            if name in answered:
                break
    return {"wrong": wrong, "answered": sorted(set(answered)), "refused": refused}


def check_walk(step: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return walk(step)


@pytest.mark.parametrize(("size", "step"), [(1, 6), (2, 1)] if FULL else [(1, 24), (2, 6)])
def test_no_function_answers_for_one_shard(world, size, step):
    results = world(check_walk, size, step=step, timeout_s=300)
    assert results[0]["wrong"] == {}
    assert all(result["answered"] == results[0]["answered"] for result in results)
    assert len(results[0]["answered"]) > 1000 / step


def check_collectives() -> None:
    x = st.zeros("[tp balanced]", 5)
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.all_gather_single(t, t)):
        with pytest.raises((RuntimeError, AttributeError)):
            call(x)


def test_collectives_of_torch_do_not_take_a_sharded_tensor(world):
    world(check_collectives, 2)

"""Every function that a Tensor subclass can override, called with ShardedTensors: the dense answer or an error.

Arguments are made from the functions' names of parameters; where the dense call refuses them, the sharded one need only
refuse or answer. Never a local answer: what comes back is compared with the call on the whole.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch.overrides import get_overridable_functions, get_testing_overrides, resolve_name
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import shardtensor as st

# What these do is no function of values: they look at processes, draw device state, or end in torch's own abort.
LEFT_OUT = {
    "torch.Tensor.__torch_dispatch__",
    "torch.Tensor.__cuda_array_interface__.__get__",
    "torch._assert_async",
    "torch.Tensor.share_memory_",
    "torch.unique",
}
SIZED = {  # parameters that are no tensors
    "dim": 0, "dim0": 0, "dim1": 1, "axis": 0, "axis0": 0, "axis1": 1, "dims": (0, 1), "n": 2, "k": 1, "p": 2, "q": 2,
    "size": (4, 4), "shape": (4, 4), "index": 0, "start": 0, "length": 2, "end": 2, "step": 1, "repeats": 2,
    "sections": 2, "indices_or_sections": 2, "chunks": 2, "split_size_or_sections": 2, "split_size": 2, "upper": True,
    "source": 0, "destination": 1, "value": 2.0, "fill_value": 2.0, "min": 1.0, "max": 9.0, "decimals": 0, "diagonal": 0,
    "offset": 0, "shifts": 1, "correction": 1, "unbiased": True, "keepdim": True, "descending": False, "largest": True,
    "sorted": True, "exponent": 2, "alpha": 1, "beta": 1, "eps": 1e-5, "num_classes": 40, "kernel_size": 2, "stride": 1,
    "padding": 0, "dilation": 1, "groups": 1, "training": False, "inplace": False, "reduction": "sum", "lambd": 0.5,
    "normalized_shape": (4,), "num_groups": 2, "output_size": 2, "scale_factor": 2, "equation": "ij,jk->ik", "maxnorm": 1,
    "sizes": (2, 2), "reps": (2, 1), "tile_dims": (2, 1), "dtype": torch.float64, "weights": None, "generator": None,
    "negative_slope": 0.1, "high": 5, "low": 0, "mean": 0.0, "std": 0.0, "k_": 1, "other_dim": 0, "destination_": 1,
}  # fmt: skip
LISTED = {"tensors", "operands", "tensor_list", "self_list", "tensors1", "tensors2"}
BOOLEAN = {"mask", "condition"}
INTEGER = {"indices", "index_", "target", "ids", "tensor_indices_or_sections"}


def operands() -> Iterator[dict[str, torch.Tensor]]:
    """Sets of dense tensors by kind, all of one shape; some functions take only one of them."""
    base = torch.arange(16.0, dtype=torch.float64, device=device()).view(4, 4) + 1
    positive = base @ base.T + 4 * torch.eye(4, dtype=torch.float64, device=device())
    yield {"float": base, "int": base.long() % 4, "bool": base % 2 == 0}
    yield {"float": positive, "int": base.long() % 4, "bool": base % 2 == 0}
    yield {"float": (base / 20), "int": base.long() % 4, "bool": base % 3 == 0}
    yield {"float": base.long(), "int": base.long() % 4, "bool": base % 3 == 0}
    yield {"float": base % 2 == 0, "int": base.long() % 4, "bool": base % 3 == 0}
    cube = (base / 20).view(1, 1, 4, 4)
    yield {"float": cube, "int": cube.long() % 4, "bool": cube > 1}
    line = torch.arange(4.0, dtype=torch.float64, device=device())
    yield {"float": line, "int": line.long(), "bool": line > 1}
    yield {"float": base.to(torch.complex64), "int": base.long() % 4, "bool": base % 3 == 0}


def arguments(dummy: Callable[..., Any], kinds: dict[str, torch.Tensor], defaults: bool) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in inspect.signature(dummy).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is not parameter.empty and (not defaults or name not in SIZED):
            continue
        if name in LISTED:
            value: Any = [kinds["float"], kinds["float"]]
        elif name in BOOLEAN:
            value = kinds["bool"]
        elif name in INTEGER or (name == "index" and "dim" in inspect.signature(dummy).parameters):
            value = kinds["int"]
        elif name in SIZED:
            value = SIZED[name]
        else:
            value = kinds["float"]
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty:
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


def walk(spec: str) -> dict[str, Any]:
    named = {id(f): f"{resolve_name(f)}" for fs in get_overridable_functions().values() for f in fs}
    wrong, answered, refused, dense_refused, unlike = {}, [], {}, [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function, dummy in sorted(get_testing_overrides().items(), key=lambda item: str(resolve_name(item[0]))):
            name = str(named.get(id(function), resolve_name(function)))
            if name in LEFT_OUT or "__torch" in name:
                continue
            was_answered = False
            for kinds in operands():
                for defaults in (False, True):
                    values = arguments(dummy, kinds, defaults)
                    if not any(isinstance(x, torch.Tensor) for x in tree_leaves(values)):
                        continue
                    want, want_args, dense_error = call(function, copies(values, lambda x: x))
                    if dense_error is not None:
                        continue
                    shards = copies(values, lambda x: st.distribute(x, spec if x.dim() == 2 else OTHERS[x.dim()]))
                    found, found_args, error = call(function, shards)
                    if error is not None:
                        refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                        continue
                    was_answered = True
                    how = differ(found, want) or differ(found_args, want_args)
                    if how is not None:
                        wrong[name] = how
                if was_answered:
                    break
            if was_answered:
                answered.append(name)
                refused.pop(name, None)
            elif name not in refused:
                dense_refused.append(name)
    return {"wrong": wrong, "answered": answered, "refused": refused, "dense_refused": dense_refused, "unlike": unlike}


OTHERS = {1: "[tp balanced]", 4: "[-, -, tp balanced, -]"}


@pytest.mark.parametrize("size", [1, 2])
def test_no_function_answers_for_one_shard(world, size):
    for spec in ("[tp balanced, -]", "[-, tp balanced]") if size > 1 else ("[tp, -]",):
        results = world(walk, size, spec=spec, timeout_s=300)
        assert results[0]["wrong"] == {}
        assert all(result == results[0] for result in results)
        assert len(results[0]["answered"]) > 500

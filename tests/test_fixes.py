"""Every way out that an error of the package names works when it is followed, and every rank gets the same error."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import MixedPrecisionPolicy, fully_shard
from shardtensor.fsdp.summary import fsdp_summary
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parse import as_spec

Act = Callable[[], Any]


@attrs.frozen
class Case:
    """What goes wrong, and each way out: words of the message, and what they say to do.

    Attributes:
        differs: whether the message of each rank has facts of that rank alone.
    """

    wrong: Act
    ways: dict[str, Act]
    mesh: str = "tp=2"
    differs: bool = False


def weight(spec: str = "[tp, -]", rows: int = 4, columns: int = 6) -> st.ShardedTensor:
    return st.distribute(torch.arange(float(rows * columns)).view(rows, columns), spec)


def linear(spec: str | None = "[tp, -]") -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4))
    if spec:
        st.shard_parameter(module, "0.weight", spec)
    return module


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def units(**options: Any) -> Any:
    model = mlp()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def grid(*axes: tuple[str, int]) -> Any:
    return as_group().on_mesh(Mesh(axes), {})


def strictly(act: Act) -> Any:
    with st.strict():
        return act()


def step(model: nn.Module, width: int = 4) -> None:
    model(torch.ones(2, width)).sum().backward()


def blocked() -> st.ShardedTensor:
    """Two stretches on each rank, with a hole between them."""
    return st.distribute(torch.arange(8.0), "[tp blocks(2)]")


def addends() -> st.ShardedTensor:
    return st.init_from_local_tensor(torch.ones(4, 6), "[-, -] partial(tp)", (4, 6))


def placed(first: int, second: int) -> list[st.ShardMetadata]:
    """Three elements from `first` on rank 0, three from `second` on rank 1."""
    return [st.ShardMetadata([start], [3], f"rank:{rank}/cpu") for rank, start in enumerate((first, second))]


SPECS = {
    "a misspelt modifier": Case(
        lambda: st.parse_spec("[tp unti(2), -]"),
        {"did you mean `unit`?": lambda: st.parse_spec("[tp unit(2), -]")},
    ),
    "an axis twice": Case(
        lambda: Spec("tp", "tp"),
        {"keep one of the two, or make the mesh of two axes": lambda: [weight("[tp, -]"), weight("[dp, tp]")]},
        mesh="dp=1, tp=2",
    ),
    "named and in order": Case(
        lambda: Spec("tp", out="tp"),
        {"name all the cut dims, or none": lambda: [Spec(out="tp"), Spec("tp", None)]},
    ),
    "named and in order, in text": Case(
        lambda: st.parse_spec("[tp, in: dp]"), {"every dim in order": lambda: st.parse_spec("[tp, dp]")}
    ),
    "two ellipses": Case(lambda: Spec(..., "tp", ...), {"keep one": lambda: Spec(..., "tp")}),
    "no spec": Case(
        lambda: st.zeros(3.5, 4, 6),
        {'write text such as "[tp, -]", or make a Spec': lambda: [st.zeros("[tp, -]", 4, 6), st.zeros(Spec("tp"), 4)]},
    ),
    "text is wanted": Case(
        lambda: st.parse_spec(Spec("tp", None)), {"as_spec takes objects too": lambda: as_spec(Spec("tp", None))}
    ),
    "an axis that is not there": Case(
        lambda: weight("[pp, -]"), {"use one of dp, tp": lambda: weight("[tp, -]")}, mesh="dp=1, tp=2"
    ),
    "an uneven cut": Case(
        lambda: weight("[tp, -]", 5),
        {
            "`balanced` or `sizes(...)` or `pad(n)`": lambda: [
                weight(f"[tp {modifier}, -]", 5) for modifier in ("balanced", "sizes(3, 2)", "pad(2)")
            ],
            "choose another axis": lambda: weight("[dp, -]", 5),
        },
        mesh="dp=1, tp=2",
    ),
    "shards that overlap": Case(
        lambda: st.EnumerableShardingSpec(placed(0, 2)),
        {"give each element to one shard": lambda: st.EnumerableShardingSpec(placed(0, 3))},
    ),
    "no shards": Case(
        lambda: st.EnumerableShardingSpec([]), {"list every shard": lambda: st.EnumerableShardingSpec(placed(0, 3))}
    ),
    "no placements": Case(
        lambda: st.ChunkShardingSpec(0, []),
        {'name a place, as in ["rank:0/cuda:0"]': lambda: st.ChunkShardingSpec(0, ["rank:0/cuda:0"])},
    ),
    "a grid of other pieces": Case(
        lambda: st.GridShardingSpec([2, 2], ["rank:0/cpu", "rank:1/cpu"]),
        {"name one placement for each piece": lambda: st.GridShardingSpec([2, 1], ["rank:0/cpu", "rank:1/cpu"])},
    ),
    "a shard of other lengths": Case(
        lambda: st.ShardMetadata([0], [1, 2], "rank:0/cpu"),
        {"give one offset and one size for each dim": lambda: st.ShardMetadata([0, 0], [1, 2], "rank:0/cpu")},
    ),
    "a mesh without sizes": Case(
        lambda: st.count_bytes("tp", lambda: 0),
        {
            'name each axis and its size, as in "tp=4" or "dp=2, tp=4"': lambda: [
                st.count_bytes(mesh, lambda: 0) for mesh in ("tp=4", "dp=2, tp=4")
            ]
        },
    ),
}

TENSORS = {
    "a new partial tensor": Case(
        lambda: st.zeros("[-, -] partial(tp)", 4, 6),
        {"make it whole, or use init_from_local_tensor": lambda: [st.zeros("[-, -]", 4, 6), addends()]},
    ),
    "an array of numpy": Case(
        lambda: weight().numpy(),
        {
            "local_tensor() or local_shards()": lambda: [weight().local_tensor().numpy(), weight().local_shards()],
            "full_tensor()": lambda: weight().full_tensor().numpy(),
            "shardtensor.full_state_dict(model)": lambda: st.full_state_dict(linear())["0.weight"].numpy(),
        },
    ),
    "the memory of the whole": Case(
        lambda: weight().untyped_storage(),
        {
            "local_tensor() or local_shards()": lambda: weight().local_tensor().untyped_storage(),
            "full_tensor()": lambda: weight().full_tensor().untyped_storage(),
            "shardtensor.full_state_dict(model)": lambda: st.full_state_dict(linear())["0.weight"].untyped_storage(),
        },
    ),
    "several shards": Case(
        lambda: blocked().local_tensor(),
        {"local_shards() returns all of them, each with its tensor": lambda: blocked().local_shards()[1].tensor},
        differs=True,
    ),
    "data of a plain tensor": Case(
        lambda: setattr(weight(), "data", torch.zeros(4, 6)),
        {
            "use copy_(tensor), under no_grad, to take its values, or distribute(tensor, spec) first": lambda: [
                torch.no_grad()(weight().copy_)(torch.zeros(4, 6)),
                setattr(weight(), "data", st.distribute(torch.zeros(4, 6), "[tp, -]")),
            ]
        },
    ),
    "data of another layout": Case(
        lambda: setattr(weight(), "data", weight("[-, tp]")),
        {"use copy_(tensor) to take its values": lambda: weight().copy_(weight("[-, tp]"))},
    ),
    "set_ to another layout": Case(
        lambda: weight().set_(weight("[-, tp]")), {"use copy_(source)": lambda: weight().copy_(weight("[-, tp]"))}
    ),
    "another shape in place": Case(lambda: weight().squeeze_(), {"use squeeze": lambda: weight().squeeze()}),
    "a gather with out on all ranks": Case(
        lambda: weight().gather(0, torch.empty(4, 6)),
        {"pass out=None on every rank but 0": lambda: weight().gather(0, [torch.empty(4, 6), None][as_group().rank])},
    ),
    "a gather without out": Case(
        lambda: weight().gather(0),
        {
            "pass out=torch.empty((4, 6)) there": lambda: weight().gather(
                0, [torch.empty((4, 6)), None][as_group().rank]
            )
        },
    ),
    "a gather into another shape": Case(
        lambda: weight().gather(0, [torch.empty(6, 4), None][as_group().rank]),
        {
            "pass a tensor of the global shape": lambda: weight().gather(0, [torch.empty(4, 6), None][as_group().rank]),
            "torch.gather(tensor, dim, index)": lambda: torch.gather(weight(), 1, torch.zeros(4, 1, dtype=torch.int64)),
        },
    ),
    "in place on addends": Case(
        lambda: addends().add_(1),
        {"reduce it first: x = distribute(x, spec)": lambda: st.distribute(addends(), "replicate").add_(1)},
    ),
    "a checkpoint of addends": Case(
        lambda: addends().__create_chunk_list__(),
        {"reduce it first: st.reshard(tensor, spec)": lambda: st.reshard(addends(), "[tp, -]").__create_chunk_list__()},
    ),
    "shards of other sizes": Case(
        lambda: st.Shard(torch.ones(2), st.ShardMetadata([0], [3], "rank:0/cpu")),
        {"give the metadata the sizes of the tensor": lambda: st.Shard(torch.ones(3), placed(0, 3)[0])},
    ),
    "no global size": Case(
        lambda: st.init_from_local_shards([]),
        {
            "pass it after the shards, or None for the dim along which they add up": lambda: [
                st.init_from_local_shards([st.Shard(torch.ones(3), placed(0, 3)[as_group().rank])], size)
                for size in (6, None)
            ]
        },
    ),
    "a local tensor of another size": Case(
        lambda: st.init_from_local_tensor(torch.ones(3 - as_group().rank), "[tp]", 6),
        {
            "pass the true global size, or a spec with sizes(...)": lambda: [
                st.init_from_local_tensor(torch.ones(3), "[tp]", 6),
                st.init_from_local_tensor(torch.ones(3 - as_group().rank), "[tp sizes(3, 2)]", 5),
            ]
        },
        differs=True,
    ),
    "a local tensor that is not contiguous": Case(
        lambda: st.init_from_local_tensor(torch.ones(6, 2).t(), "[tp, -]", (4, 6)),
        {
            "call contiguous() first": lambda: st.init_from_local_tensor(
                torch.ones(6, 2).t().contiguous(), "[tp, -]", (4, 6)
            )
        },
    ),
}

OPERATIONS = {
    "strict, and an operand must move": Case(
        lambda: strictly(lambda: weight() + weight("[-, tp]")),
        {
            'reshard(other, "[tp, -]")': lambda: strictly(lambda: weight() + st.reshard(weight("[-, tp]"), "[tp, -]")),
            'reshard(input, "[-, tp]")': lambda: strictly(lambda: st.reshard(weight(), "[-, tp]") + weight("[-, tp]")),
        },
    ),
    "strict, without a rule": Case(
        lambda: strictly(lambda: torch.special.airy_ai(weight())),
        {
            "call full_tensor() on its operands": lambda: strictly(
                lambda: torch.special.airy_ai(weight().full_tensor())
            ),
            "leave strict() to let it gather": lambda: torch.special.airy_ai(weight()),
        },
    ),
    "strict, and flat operands": Case(
        lambda: strictly(lambda: torch.cumsum(weight("flat(tp)"), 0)),
        {
            f'reshard(input, "{spec}")': lambda spec=spec: strictly(
                lambda: torch.cumsum(st.reshard(weight("flat(tp)"), spec), 0)
            )
            for spec in ("[tp, -]", "[-, tp]", "replicate")
        },
    ),
    "forward mode": Case(
        lambda: jvp(weight("[-, tp]")),
        {
            "full_tensor(), and differentiate the function of plain tensors": lambda: jvp(
                weight("[-, tp]").full_tensor()
            ),
            "torch.autograd.functional.jvp": lambda: torch.autograd.functional.jvp(
                lambda x: (x @ weight("[-, tp]").t()).sum(), torch.ones(2, 6), torch.ones(2, 6)
            ),
        },
    ),
    "an average of whole numbers": Case(
        lambda: st.init_from_local_tensor(torch.ones(4, dtype=torch.int64), "[-] partial(tp, avg)", 4).full_tensor(),
        {
            "sum them, or convert to a float dtype": lambda: [
                st.init_from_local_tensor(torch.ones(4, dtype=torch.int64), "[-] partial(tp)", 4).full_tensor(),
                st.init_from_local_tensor(torch.ones(4), "[-] partial(tp, avg)", 4).full_tensor(),
            ]
        },
    ),
    "out of another shape": Case(
        lambda: torch.mul(weight(), 2, out=torch.zeros(6, 4)),
        {"make out of the shape of the result": lambda: torch.mul(weight(), 2, out=weight())},
    ),
}


def jvp(keys: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: (x @ keys.t()).sum(), (torch.ones(2, 6),), (torch.ones(2, 6),))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def shard(rules: Any, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return st.shard_module(mlp() if model is None else model, rules, **options)


def flows() -> dict[str, Any]:
    return {"0": st.colwise("tp"), "2": st.rowwise("tp")}


MODULES = {
    "a parameter that is sharded": Case(
        lambda: st.shard_parameter(linear(), "0.weight", "[-, tp]"),
        {
            "set it to nn.Parameter(distribute(param.full_tensor(), spec))": lambda: setattr(
                linear()[0], "weight", nn.Parameter(st.distribute(linear()[0].weight.full_tensor(), "[-, tp]"))
            )
        },
    ),
    "a partial parameter": Case(
        lambda: linear("[tp, -] partial(dp)"),
        {"leave partial(...) out": lambda: linear("[tp, -]")},
        mesh="dp=1, tp=2",
    ),
    "no such parameter": Case(
        lambda: st.shard_parameter(mlp(), "0.wait", "[tp, -]"),
        {"name one of its parameters": lambda: st.shard_parameter(mlp(), "0.weight", "[tp, -]")},
    ),
    "no tensor": Case(
        lambda: st.shard_parameter(mlp(), "0.in_features", "[tp, -]"),
        {"name a parameter": lambda: st.shard_parameter(mlp(), "0.weight", "[tp, -]")},
    ),
    "a rule that matches nothing": Case(
        lambda: shard({"3.weight": "[tp, -]"}),
        {
            "name a parameter or a module, or write a pattern": lambda: [
                shard({rule: spec})
                for rule, spec in (
                    ("2.weight", "[tp, -]"),
                    ("2", "[tp, ...]"),
                    ("{0,2}.weight", "[tp, -]"),
                    ("**.bias", "[tp]"),
                )
            ]
        },
    ),
    "two rules for one tensor": Case(
        lambda: shard({"**.weight": "[tp, -]", "0.weight": "[-, tp]"}),
        {"narrow one of the patterns": lambda: shard({"2.weight": "[tp, -]", "0.weight": "[-, tp]"})},
    ),
    "two cuts of a tied tensor": Case(
        lambda: shard({"0.weight": "[tp, -]", "1.weight": "[-, tp]"}, tied()),
        {
            "give both the same cut, or drop the one of": lambda: [
                shard({"0.weight": "[tp, -]", "1.weight": "[tp, -]"}, tied()),
                shard({"0.weight": "[tp, -]"}, tied()),
            ]
        },
    ),
    "a rule that is no spec": Case(
        lambda: shard({"0.weight": 3}), {'write a spec, such as "[tp, -]"': lambda: shard({"0.weight": "[tp, -]"})}
    ),
    "an argument that forward lacks": Case(
        lambda: shard({**flows(), "0": {**st.colwise("tp"), "in hidden": "replicate"}}),
        {"write `in` alone": lambda: shard(flows())},
    ),
    "a ShardedTensor in a flow": Case(
        lambda: shard(flows())(weight("[tp, -]", 2, 4)),
        {
            "give the module that it comes from an `out` in the plan": lambda: shard(flows())(torch.ones(2, 4)),
            "leave `in` and `out` of this layer out of the plan": lambda: shard({"0.weight": "[tp, -]"})(
                weight("[tp, -]", 2, 4)
            ),
        },
    ),
    "a plain tensor in place of a cut one": Case(
        lambda: torch.func.functional_call(shard(flows()), {"0.weight": torch.ones(8, 4)}, torch.ones(2, 4)),
        {
            "torch.empty_like(module.weight).copy_(tensor)": lambda: torch.func.functional_call(
                (model := shard(flows())),
                {"0.weight": torch.empty_like(model[0].weight).copy_(torch.ones(8, 4))},
                torch.ones(2, 4),
            )
        },
    ),
    "no data parallel module": Case(
        lambda: st.no_sync(mlp()).__enter__(),
        {
            "call no_sync on the module that data_parallel returned": lambda: st.no_sync(
                st.data_parallel(mlp(), "dp")
            ).__enter__()
        },
        mesh="dp=2",
    ),
    "materialize on meta": Case(
        lambda: st.materialize(on_meta(), device="meta"),
        {'name another device, such as "cuda"': lambda: st.materialize(on_meta(), device="cpu")},
    ),
    "no way to first values": Case(
        lambda: st.materialize(table()),
        {
            "materialize(module, init=function)": lambda: st.materialize(table(), init=fill),
            "give the module's class a reset_parameters()": lambda: st.materialize(table(Reset)),
            "build the module's buffers outside torch.device('meta')": lambda: st.materialize(table(device="cpu")),
        },
    ),
}


class Table(nn.Linear):
    def __init__(self, device: str | None) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.ones(4, device=device))


class Reset(Table):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "table"):
            self.table.fill_(1)


def table(kind: type[Table] = Table, device: str | None = None) -> nn.Module:
    with torch.device("meta"):
        return st.shard_module(nn.Sequential(kind(device)), {"0.weight": "[tp, -]"})


def fill(module: nn.Module) -> None:
    if isinstance(module, Table):
        module.reset_parameters()
        module.table.fill_(1)


def on_meta() -> nn.Module:
    return st.shard_module(mlp().to("meta"), {"0.weight": "[tp, ...]"})


def unit(model: nn.Module, **options: Any) -> Any:
    return fully_shard(model, **options)


def stepped(model: Any, optimizer: Any, change: Act = lambda: None) -> None:
    loss = model(torch.ones(2, 4)).sum()
    change()
    loss.backward()
    optimizer.step()


def written_between(model: nn.Module, early: bool) -> None:
    loss = model(torch.ones(2, 4)).sum()
    if not early:
        loss.backward()
    with torch.no_grad():
        model[0].weight.mul_(2)
    if early:
        loss.backward()


def deep() -> nn.Module:
    """Large units that are gathered again in backward."""
    model = nn.Sequential(*(nn.Linear(4 if i == 0 else 200, 200) for i in range(4)))
    for layer in model:
        unit(layer, reshard_after_forward=True)
    return unit(model)


class List(nn.Module):
    """A container that is never called, inside of one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FSDP = {
    "twice": Case(
        lambda: unit(unit(mlp())),
        {"call fully_shard once for each module": lambda: [unit(mlp()), units()]},
        mesh="dp=2",
    ),
    "top down": Case(
        lambda: unit(unit(mlp())[0]), {"call fully_shard bottom up: inner modules first": lambda: units()}, mesh="dp=2"
    ),
    "a container": Case(
        lambda: unit(List().layers),
        {
            "call it for each module in the container, or for the module that holds it": lambda: [
                [unit(layer) for layer in List().layers],
                unit(List()),
            ]
        },
        mesh="dp=2",
    ),
    "a tie between units": Case(
        lambda: [unit(layer) for layer in tied()],
        {"on one that holds both": lambda: step_ids(unit(tied()))},
        mesh="dp=2",
    ),
    "no such axis": Case(
        lambda: units(mesh="tp"),
        {
            'pass the DeviceMesh of the data ranks, mesh["dp"], or names of axes, "dp" or "rep*dp"': lambda: [
                units(mesh="dp"),
                units(mesh="rep*dp"),
            ]
        },
        mesh="rep=2, dp=2",
    ),
    "a mesh of three axes": Case(
        lambda: units(mesh=grid(("pp", 1), ("rep", 2), ("dp", 2))),
        {
            'name the data axes: mesh["dp"], or mesh["rep", "dp"] to repeat along the first': lambda: [
                step(units(mesh="dp")),
                step(units(mesh="rep*dp")),
            ]
        },
        mesh="pp=1, rep=2, dp=2",
    ),
    "a number of ranks that does not divide": Case(
        lambda: units(reshard_after_forward=3),
        {
            "give a divisor of their number": lambda: step(units(reshard_after_forward=2)),
            "give True (all of them) or False (each rank)": lambda: [
                step(units(reshard_after_forward=value)) for value in (True, False)
            ],
        },
        mesh="dp=4",
    ),
    "a sum of bytes": Case(
        lambda: units(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)),
        {
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)": lambda: step(
                units(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            ),
            "freeze the parameter: requires_grad_(False)": lambda: unit(
                mlp().requires_grad_(False), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)
            )(torch.ones(2, 4)),
        },
        mesh="dp=2",
    ),
    "a cut of a dim that is not there": Case(
        lambda: unit(mlp(), shard_placement_fn=lambda p: Shard(1)),
        {
            "return None to let its ranges end anywhere": lambda: unit(
                mlp(), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None
            )
        },
        mesh="dp=2",
    ),
    "a rank that is not there": Case(
        lambda: unit(mlp(), shard_placement_fn=lambda p: "only(dp, 2)"),
        {"use 0 to 1": lambda: [unit(mlp(), shard_placement_fn=lambda p, i=i: f"only(dp, {i})") for i in (0, 1)]},
        mesh="dp=2",
    ),
    "a placement that has no meaning": Case(
        lambda: unit(mlp(), shard_placement_fn=lambda p: "[dp balanced, ...]"),
        {
            "return None or flat(dp), and ranges end anywhere; flat(dp, unit=row)": lambda: [
                unit(mlp(), shard_placement_fn=lambda p, form=form: form)
                for form in (None, "flat(dp)", "flat(dp, unit=row)", "flat(dp, unit=16)")
            ],
            "return only(dp, 1)": lambda: unit(mlp(), shard_placement_fn=lambda p: "only(dp, 1)"),
            "return torch's Shard(dim)": lambda: unit(mlp(), shard_placement_fn=lambda p: Shard(0)),
        },
        mesh="dp=2",
    ),
    "a cut of a cut dim": Case(
        lambda: over_tp(lambda p: Shard(1) if p.dim() > 1 else None),
        {
            "cut another dim, or return flat(dp)": lambda: [
                over_tp(lambda p: Shard(0) if p.dim() > 1 else None),
                over_tp(lambda p: "flat(dp)"),
            ]
        },
        mesh="dp=2, tp=2",
    ),
    "sharded over the data ranks": Case(
        lambda: unit(linear("[dp, -]")),
        {"shard_module(module, plan, process_group=mesh), then fully_shard(module, mesh=": lambda: over_tp(None)},
        mesh="dp=2",
    ),
    "written between forward and backward": Case(
        lambda: written_between(deep(), early=True),
        {"call backward before the optimizer steps": lambda: written_between(deep(), early=False)},
        mesh="dp=2",
    ),
    "second derivatives": Case(
        lambda: unit(mlp())(torch.ones(2, 4)).sum().backward(create_graph=True),
        {
            "keep what needs second derivatives out of fully_shard": lambda: (
                mlp()(torch.ones(2, 4)).sum().backward(create_graph=True)
            )
        },
        mesh="dp=2",
    ),
    "gradients of some parameters": Case(
        lambda: torch.autograd.grad((model := unit(mlp()))(torch.ones(2, 4)).sum(), [model[0].weight]),
        {
            "call loss.backward() without inputs=, and read param.grad; freeze others": lambda: [
                (model := mlp())[2].requires_grad_(False),
                unit(model),
                step(model),
                model[0].weight.grad.full_tensor(),
            ]
        },
        mesh="dp=2",
    ),
    "a pickle": Case(
        lambda: pickle.dumps(units()),
        {
            "save model.state_dict(), build the module anew, fully_shard it and load that": lambda: (
                units().load_state_dict(pickle.loads(pickle.dumps(units().state_dict())))
            )
        },
        mesh="dp=2",
    ),
    "no method of this name": Case(
        lambda: st.register_fsdp_forward_method(units(), "generate"),
        {"name one of its methods": lambda: st.register_fsdp_forward_method(units(), "extra_repr")},
        mesh="dp=2",
    ),
    "resharding by a number": Case(
        lambda: units().set_reshard_after_forward(2),
        {"give a number of ranks to fully_shard(reshard_after_forward=)": lambda: step(units(reshard_after_forward=2))},
        mesh="dp=4",
    ),
    "division by zero": Case(
        lambda: units().set_gradient_divide_factor(0),
        {"give a number above 0": lambda: units().set_gradient_divide_factor(2)},
        mesh="dp=2",
    ),
    "a list with a plain module": Case(
        lambda: st.share_comm_ctx([mlp()]),
        {"call fully_shard on it first": lambda: st.share_comm_ctx([units()])},
        mesh="dp=2",
    ),
    "a summary of a plain module": Case(
        lambda: fsdp_summary(mlp()), {"call fully_shard first": lambda: str(fsdp_summary(units()))}, mesh="dp=2"
    ),
    "a parameter that was taken out": Case(
        lambda: step(without_bias(units())),
        {"change modules before fully_shard": lambda: step(unit(without_bias(mlp())))},
        mesh="dp=2",
    ),
    "on meta": Case(
        lambda: step(units_on_meta()),
        {
            "materialize(model)": lambda: step(st.materialize(units_on_meta())),
            'model.to_empty(device="cpu"), then set or load values': lambda: [
                (model := units_on_meta()).to_empty(device="cpu"),
                model.load_state_dict(mlp().state_dict()),
                step(model),
            ],
        },
        mesh="dp=2",
    ),
    "ranks that use different parameters": Case(
        lambda: [(model := unit(Branch())), *(branch(model, as_group().rank) for _ in range(2))],
        {
            "fully_shard(..., find_unused=True)": lambda: [
                (model := unit(Branch(), find_unused=True)),
                *(branch(model, as_group().rank) for _ in range(2)),
            ],
            "let every rank use every parameter, or none": lambda: [branch(model, 0) for model in [unit(Branch())] * 2],
        },
        mesh="dp=2",
    ),
}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](x)


def without_bias(model: Any) -> Any:
    model[0].bias = None
    return model


def branch(model: nn.Module, way: int) -> None:
    model(torch.ones(2, 4), way).sum().backward()


def step_ids(model: nn.Module) -> None:
    model(torch.arange(8)).sum().backward()


def units_on_meta() -> Any:
    with torch.device("meta"):
        return units()


def over_tp(placement: Any) -> Any:
    mesh = grid(("dp", as_group().size // 2), ("tp", 2))
    model = st.shard_module(mlp(), {"{0,2}.weight": "[-, tp]"}, process_group=mesh)
    return unit(model, mesh=mesh.axis("dp"), shard_placement_fn=placement)


def adam(model: nn.Module | None = None, **options: Any) -> st.ShardedOptimizer:
    return st.ShardedOptimizer(linear() if model is None else model, torch.optim.Adam, **{"lr": 0.1, **options})


def trained(model: nn.Module | None = None) -> st.ShardedOptimizer:
    model = linear() if model is None else model
    step(model, 6)
    optimizer = adam(model)
    optimizer.step()
    return optimizer


def renamed(state: Any, old: str, new: str) -> Any:
    rename = {old: new}
    state = copy.deepcopy(state)
    state["state"] = {rename.get(key, key): value for key, value in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [rename.get(key, key) for key in group["params"]]
    return state


def groups(*rates: float) -> list[dict[str, Any]]:
    model = linear()
    pairs = list(model.named_parameters())
    if len(rates) == 1:
        return [{"params": pairs, "lr": rates[0]}]
    return [{"params": [pair], "lr": rate} for pair, rate in zip(pairs, rates, strict=True)]


OPTIMIZERS = {
    "two parameters of one name": Case(
        lambda: st.ShardedOptimizer([("w", nn.Parameter(weight())), ("w", nn.Parameter(weight()))], torch.optim.SGD),
        {
            "give each its own name": lambda: st.ShardedOptimizer(
                [("v", nn.Parameter(weight())), ("w", nn.Parameter(weight()))], torch.optim.SGD
            )
        },
    ),
    "a result": Case(
        lambda: st.ShardedOptimizer({"w": nn.Parameter(weight()) * 2}, torch.optim.SGD),
        {
            "detach() it first": lambda: st.ShardedOptimizer(
                {"w": (nn.Parameter(weight()) * 2).detach().requires_grad_()}, torch.optim.SGD
            )
        },
    ),
    "parameters that the model lacks": Case(
        lambda: st.optim_state_dict(mlp(), adam()),
        {
            "pass the model whose parameters() the optimizer was made with": lambda: st.optim_state_dict(
                (m := linear()), adam(m)
            )
        },
    ),
    "state of other parameters": Case(
        lambda: adam().load_state_dict(renamed(trained().state_dict(), "0.weight", "first.weight")),
        {
            "rename its keys, or leave these parameters out on both sides": lambda: adam().load_state_dict(
                renamed(renamed(trained().state_dict(), "0.weight", "first.weight"), "first.weight", "0.weight")
            )
        },
    ),
    "other hyperparameters in one group": Case(
        lambda: adam(groups(0.1)).load_state_dict(adam(groups(0.1, 0.2)).state_dict()),
        {
            "make the groups as they were when it was saved": lambda: adam(groups(0.3, 0.4)).load_state_dict(
                adam(groups(0.1, 0.2)).state_dict()
            )
        },
    ),
    "state of another shape": Case(
        lambda: adam().load_state_dict(trained(nn.Sequential(nn.Linear(6, 8))).state_dict()),
        {
            "load a state dict of this model; whole tensors have the global shape": lambda: adam().load_state_dict(
                trained(nn.Sequential(nn.Linear(6, 4))).state_dict()
            )
        },
    ),
    "numbers of other groups": Case(
        lambda: adam().load_state_dict(torch.optim.Adam(mlp().parameters()).state_dict()),
        {
            "save it from an optimizer made with named_parameters()": lambda: adam().load_state_dict(
                torch.optim.Adam(nn.Sequential(nn.Linear(6, 4)).named_parameters()).state_dict()
            )
        },
    ),
    "parameters that were replaced": Case(
        lambda: [
            (model := linear()),
            (optimizer := adam(model)),
            setattr(model[0], "weight", nn.Parameter(weight())),
            optimizer.step(),
        ],
        {
            "make a new ShardedOptimizer for them and load the old one's state_dict() into it": lambda: [
                (model := linear()),
                (old := trained(model)),
                setattr(model[0], "weight", nn.Parameter(weight())),
                (new := adam(model)).load_state_dict(old.state_dict()),
                new.step(),
            ]
        },
    ),
}


def loss(targets: torch.Tensor) -> torch.Tensor:
    return st.ParallelCrossEntropy(6, "[..., tp]")(torch.ones(2, 3), targets)


LOSSES = {
    "class probabilities": Case(
        lambda: loss(torch.ones(2, 6) / 6),
        {
            "give class indices": lambda: loss(torch.arange(2)),
            "call torch.nn.functional.cross_entropy with ShardedTensors": lambda: F.cross_entropy(
                st.distribute(torch.ones(2, 6), "[-, tp]"), torch.ones(2, 6) / 6
            ),
        },
    ),
}

CASES = {**SPECS, **TENSORS, **OPERATIONS, **MODULES, **FSDP, **OPTIMIZERS, **LOSSES}
ROW = re.compile(r"^ +(?:fix|either|or)\b:? +(.*)$", re.MULTILINE)


def follow(case: Case) -> str:
    """The message; then each way out is taken, and has to work."""
    try:
        case.wrong()
    except st.ShardTensorError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was wrong")
    for act in case.ways.values():
        act()
    return text


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode calls it
@pytest.mark.filterwarnings("ignore::shardtensor.tensor.dispatch.GatherWarning")
@pytest.mark.parametrize("name", CASES)
def test_each_way_out_works(name: str) -> None:
    case = CASES[name]
    texts = st.simulate(case.mesh, follow, case)
    assert len(set(texts)) == 1 or case.differs
    ways = ROW.findall(texts[0])
    assert len(ways) == len(case.ways) > 0, texts[0]
    for way, words in zip(ways, case.ways, strict=True):
        assert words in way

"""Errors of `shard_module` and of what a module that it sharded is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from parallel.test_dispatch_options import EXPERTS, PLAN, TOP_K, WIDTH, Block
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardtensor as st
from fixes.case import Act, Case, grid, mlp
from shardtensor.parallel.hooks import register_hook
from shardtensor.plan.plan import Plan

COLUMN = {"weight": "[tp, -]", "bias": "[tp]", "out": "[..., tp]"}
ROW = {"weight": "[-, tp]", "bias": "replicate", "in": "[..., tp]", "out": "partial(tp) -> replicate"}
RULES = {"0": COLUMN, "2": ROW}
GATHERED = {"weight": "[tp, -]", "bias": "[tp]", "out": "[..., tp] -> replicate"}


def laid(rules: Mapping[str, Any], model: Any = mlp, **options: Any) -> Act:
    return lambda: st.shard_module(model(), rules, **options)


class Heads(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.num_heads, self.name = 4, "four"


class Scaled(nn.Module):
    """Two inputs, one of which a layer takes; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> dict[str, torch.Tensor]:
        return {"y": self.down(self.up(x) * scale), "half": x * 0.5}


def scaled(scale: Any, **rules: Any) -> Act:
    def act() -> None:
        module = st.shard_module(Scaled(), {"up": COLUMN, "down": ROW, "in x": "replicate", **rules})
        module(torch.ones(2, 4), scale() if callable(scale) else scale)

    return act


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"half": x * 0.5, "up": self.up(x)}


def upwards(out: str) -> Act:
    return lambda: st.shard_module(Up(), {"up": COLUMN, out: "[..., tp] -> replicate"})(torch.ones(2, 4))


def wanting() -> torch.Tensor:
    return torch.ones(2, 4, requires_grad=True).sum(-1, keepdim=True)


class Whole(nn.Module):
    """Its parameter is sharded, and it gives a whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class ModuleFlows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Listed(nn.Module):
    """Its forward does not name what it takes."""

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return values[0]


def ordered(out: str, axes: str) -> Act:
    """A layer that is cut over two axes, and one that takes its result where nobody gathers it."""
    first = {"weight": f"[{axes}, -]", "bias": f"[{axes}]", "out": out}
    last = {
        "weight": f"[-, {axes}]",
        "bias": "replicate",
        "in": f"[..., {axes}]",
        "out": f"partial({axes}) -> replicate",
    }
    rules = {"0": first} if "->" in out else {"0": first, "2": last}
    return lambda: st.shard_module(mlp(), rules, process_group=grid(("a", 2), ("b", 2)))


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.GELU(), layer)


class Gives(st.Sharder):
    """A sharder that shards the layer, or forgets to return it."""

    def __init__(self, result: bool = True) -> None:
        self.result = result

    def shard(self, module: nn.Module) -> Any:
        return module if self.result else None


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, **options))


@register_hook("seldom")
def seldom(site: Any, axis: str, times: int = 1) -> Any:
    return lambda: None


def using(call: str) -> Act:
    return laid({"0": {**COLUMN, "use": call}, "2": ROW})


class Masked(Block):
    """Experts whose forward takes more than tokens."""

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> Any:
        return super().forward(states) * mask


def dispatched(said: str, use: str, kind: type[Block] = Block, **more: Any) -> Act:
    def act() -> None:
        root = nn.Module()
        root.moe = kind(said)
        for name, value in more.items():
            setattr(root.moe, name, value)
        st.shard_module(root, st.load_plan(PLAN.replace("USE", f"use {use}"), world=2)).moe(torch.ones(3, WIDTH))

    return act


ALONE = f"dispatch(ep, top_k={TOP_K}, normalize=true, logits=false)"
TABLE = {"weight": "[tp, -]", "out": "partial(tp) -> replicate"}


@register_hook("own_dispatch")
def own_dispatch(site: Any, axis: str) -> Any:
    """A hook of one's own: experts are chosen by sigmoids."""
    block, subgroup = site.module, site.group_along(axis)

    def forward(states: torch.Tensor) -> torch.Tensor:
        weights, ids = block.gate(states).sigmoid().topk(block.top_k)
        sent = st.dispatch_tokens(states, ids, EXPERTS, subgroup)
        held = block.experts[EXPERTS // subgroup.size * subgroup.index :]
        rows = sent.tokens.split(list(sent.counts))
        return sent.combine(torch.cat([expert(x) for expert, x in zip(held, rows, strict=False)]), weights=weights)

    def apply() -> None:
        block.forward = forward

    return apply


def table(kind: Any) -> nn.Module:
    with torch.device("meta"):
        return st.shard_module(nn.Sequential(nn.Linear(4, 4), kind()), {"0.weight": "[tp, -]"})


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Known(Plain):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def wrapped() -> nn.Module:
    """A sharded layer beside one of torch's DTensors, both on the meta device."""
    with torch.device("meta"):
        model = st.shard_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0.weight": "[tp, -]"})
    model[1].weight = nn.Parameter(TwoTensor(torch.ones(4, 4, device="meta"), torch.ones(4, 4, device="meta")))
    return model


def fill(module: nn.Module) -> None:
    if isinstance(module, Plain):
        nn.init.ones_(module.scale)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


class Outside(Plain):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("scale", torch.ones(4, device="cpu"))


def planned(mesh: str) -> Plan:
    return Plan.from_rules(RULES, mesh)


class Bag(nn.Module):
    """A container without a forward, and what calls what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Module()
        self.layers.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers.one(x)


def stored(by: str) -> Act:
    plan = Plan.from_rules({"**": "replicate", "store **": f"flat(dp) by {by}"}, "dp=2", data="dp")
    return lambda: st.shard_module(Bag(), plan)


CASES: dict[str, Case] = {
    "what does not count": Case(
        laid({"0": {"weight": "replicate", "bias": "replicate", "local name": "[tp]"}}, lambda: nn.Sequential(Heads())),
        {
            "name a whole number that forward reads from self": laid(
                {"0": {"weight": "replicate", "bias": "replicate", "local num_heads": "[tp]"}},
                lambda: nn.Sequential(Heads()),
            )
        },
    ),
    "no hook of that name": Case(using("seldon(tp)"), {"did you mean `seldom`?": using("seldom(tp)")}),
    "no hook near that name": Case(
        using("zzz()"),
        {
            'define it with @register_hook("zzz")': lambda: [
                register_hook("zzz")(lambda site: lambda: None),
                using("zzz()")(),
            ][1:]
        },
    ),
    "other arguments": Case(using("seldom()"), {"change the arguments": using("seldom(tp, times=2)")}),
    "biases of scores that no argument takes": Case(
        using("hf_alibi_of_heads(tp)"), {"leave it out": laid({"0": COLUMN, "2": ROW})}
    ),
    "no experts": Case(
        laid({"0": {**COLUMN, "use": "dispatch(tp, top_k=1)"}, "2": ROW}),
        {"write it in the block of the experts' module": dispatched("alone", ALONE)},
    ),
    "experts that choose others": Case(
        dispatched("alone", ALONE, top_k=3),
        {"write a hook of your own with @register_hook": dispatched("alone", "own_dispatch(ep)", top_k=3)},
    ),
    "a forward that gives something else": Case(
        dispatched("alone", f"dispatch(ep, top_k={TOP_K})"), {f"write `use {ALONE}`": dispatched("alone", ALONE)}
    ),
    "a forward that no option says": Case(
        dispatched("sigmoid", f"dispatch(ep, top_k={TOP_K})"),
        {"with @register_hook": dispatched("sigmoid", "own_dispatch(ep)")},
    ),
    "a forward that fails on a few tokens": Case(
        dispatched("masked", f"dispatch(ep, top_k={TOP_K})", kind=Masked),
        {"with @register_hook": dispatched("alone", "own_dispatch(ep)", kind=Masked)},
    ),
    "a tensor of another library on meta": Case(
        lambda: st.materialize(wrapped()),
        {
            "let the library that made it give it memory first": lambda: [
                (model := wrapped())[1].to_empty(device="cpu"),
                st.materialize(model),
            ]
        },
    ),
    "modules without first values": Case(
        lambda: st.materialize(table(Plain)),
        {
            "materialize(module, init=function)": lambda: st.materialize(table(Plain), init=fill),
            "give the module's class a reset_parameters()": lambda: st.materialize(table(Known)),
            "build the module's buffers outside torch.device('meta')": lambda: st.materialize(table(Outside)),
        },
    ),
    "axes in another order": Case(
        ordered("[..., b*a] -> replicate", "b*a"),
        {
            "write `a*b`, or let the value pass as it is": lambda: [
                ordered("[..., a*b] -> replicate", "a*b")(),
                ordered("[..., b*a]", "b*a")(),
            ]
        },
        mesh="a=2, b=2",
    ),
    "a padded value": Case(
        laid(
            {"0": {"in": "replicate -> [..., tp pad(8)]", "out": "[..., tp pad(8)] -> replicate"}},
            lambda: nn.Sequential(ModuleFlows()),
        ),
        {
            "let the value pass as it is": laid(
                {"0": {"in": "replicate", "out": "replicate"}}, lambda: nn.Sequential(ModuleFlows())
            )
        },
    ),
    "a table with max_norm": Case(
        laid({"0": TABLE}, lambda: embedding(max_norm=1.0)),
        {"leave out its `in` and `out`": laid({"0": {"weight": "[tp, -]"}}, lambda: embedding(max_norm=1.0))},
    ),
    "a plan for more ranks": Case(
        lambda: st.shard_module(mlp(), planned("tp=4")),
        {"load it for this world: load_plan(..., world=2)": lambda: st.shard_module(mlp(), planned("tp=2"))},
    ),
    "a plan for other axes": Case(
        lambda: st.shard_module(mlp(), planned("dp=2, tp=2"), process_group=grid(("a", 2), ("b", 2))),
        {
            "give the default group": lambda: st.shard_module(mlp(), planned("dp=2, tp=2")),
            "make the DeviceMesh with the axes of the plan": lambda: st.shard_module(
                mlp(), planned("dp=2, tp=2"), process_group=grid(("dp", 2), ("tp", 2))
            ),
        },
        mesh="x=4",
    ),
    "two names of one axis": Case(
        laid({"0.weight": "[tp, -]", "2.weight": "[dp, -]", "0": {"out": "[..., tp] -> replicate"}}),
        {
            "use one name": laid(
                {"0": {"weight": "[tp, -]", "bias": "[tp]", "out": "[..., tp] -> replicate"}, "2.weight": "[tp, -]"}
            ),
            "pass a DeviceMesh with these axes as process_group": lambda: laid(
                {"0.weight": "[tp, -]", "2.weight": "[dp, -]", "0": {"out": "[..., tp] -> replicate"}},
                process_group=grid(("dp", 1), ("tp", 2)),
            )(),
        },
    ),
    "a second argument that wants a gradient": Case(
        scaled(wanting),
        {
            "write `in scale: replicate` in the plan": scaled(wanting, **{"in scale": "replicate"}),
            "give it without a gradient: detach()": scaled(lambda: wanting().detach()),
        },
    ),
    "a result that is not there": Case(
        upwards("out z"), {"name one of its results after `out` in the plan, in place of `z`": upwards("out up")}
    ),
    "a whole result of a cut module": Case(
        lambda: st.shard_module(
            nn.Sequential(Whole()), {"0": {"table": "[tp, -]", "in": "replicate", "out": "[..., tp] -> replicate"}}
        )(torch.ones(2, 4)),
        {
            "write `out: replicate -> [..., tp]`": lambda: st.shard_module(
                nn.Sequential(Whole()),
                {
                    "0": {"table": "[tp, -]", "in": "replicate", "out": "replicate -> [..., tp]"},
                    "out": "[..., tp] -> replicate",
                },
            )(torch.ones(2, 4)),
        },
    ),
    "a submodule called out": Case(
        laid({"0": {"out": "replicate"}}, lambda: nn.ModuleDict({"0": nn.ModuleDict({"out": nn.Linear(4, 4)})})),
        {
            "write `{out}` for the submodule": laid(
                {"0": {"{out}.weight": "[tp, -]"}},
                lambda: nn.ModuleDict({"0": nn.ModuleDict({"out": nn.Linear(4, 4)})}),
            )
        },
    ),
    "two flows": Case(
        laid({"{0,2}": {"out": "replicate"}, "0": {**COLUMN, "out": "[..., tp] -> replicate"}}),
        {"narrow one pattern": laid({"2": {"out": "replicate"}, "0": {**COLUMN, "out": "[..., tp] -> replicate"}})},
    ),
    "a sharder at the root": Case(
        laid({"": Gives()}), {"call its shard(module) yourself": lambda: Gives().shard(mlp())}
    ),
    "no submodule": Case(laid({"one": {"in": "replicate"}}), {"name a submodule": laid({"0": {"in": "replicate"}})}),
    "a rule inside of a sharder": Case(
        laid({"0": Gives(), "0.weight": "[tp, -]"}), {"let the sharder shard what lies below it": laid({"0": Gives()})}
    ),
    "a sharder that returns nothing": Case(
        laid({"0": Gives(False)}), {"return the module that takes its place": laid({"0": Gives()})}
    ),
    "one module, two flows": Case(
        laid({"{0,2}": GATHERED, "2": {"in": "replicate"}}, shared),
        {"give both the same": laid({"{0,2}": GATHERED}, shared)},
    ),
    "no such argument": Case(
        laid({"0": {"in z": "replicate"}}, lambda: nn.Sequential(Listed())),
        {"name one of them, or write `in`": laid({"0": {"in": "replicate"}}, lambda: nn.Sequential(Listed()))},
    ),
    "a gather unit that is never called": Case(
        stored("layers"), {"name modules with a forward after `by`: `by layers.*`": stored("layers.*")}, mesh="dp=2"
    ),
}

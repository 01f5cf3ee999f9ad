"""Experts over ranks: what all ranks get for their own tokens is what one process gets for the tokens of all."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh
from shardtensor.parallel import experts as experts_module

EMBED, HIDDEN = 6, 5
EXPERTS = (1, 2, 5, 8)
AMOUNTS = ((3, 0, 7, 2), (0, 0, 5, 0), (4, 4, 4, 4), (0, 0, 0, 0))
"""Tokens of each rank."""


def integers(*shape, dtype=torch.float64):
    """Small whole numbers as floats: sums are exact in any order."""
    return torch.randint(-3, 4, shape).to(device(), dtype)


def drawn(amounts, num_experts, top_k, to_one=False, dtype=torch.float64):
    """Tokens, ids, weights and output gradients of every rank, equal on all."""
    torch.manual_seed(len(amounts) * 100 + num_experts * 10 + top_k)
    found = []
    for n in amounts:
        ids = torch.rand(n, num_experts).topk(top_k, -1).indices.to(device())
        ids = torch.full_like(ids, num_experts - 1) if to_one else ids
        found.append((integers(n, EMBED, dtype=dtype), ids, integers(n, top_k), integers(n, EMBED)))
    return found


def stacked(num_experts, activation=torch.relu, hidden=HIDDEN):
    torch.manual_seed(7)
    module = st.GatedExperts(num_experts, EMBED, hidden, activation, device=device(), dtype=torch.float64)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(integers(*p.shape))
    return module


def listed(num_experts):
    torch.manual_seed(7)
    made = [nn.Sequential(nn.Linear(EMBED, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, EMBED)) for _ in range(num_experts)]
    for p in (p for module in made for p in module.parameters()):
        p.data = integers(*p.shape)
    return nn.ModuleList(made)


def plainly(call, tokens, ids, weights):
    """The definition: each token by itself, one expert after the other."""
    rows = [
        sum((w * call(int(e), x) for e, w in zip(es, ws, strict=True)), 0 * x)
        for x, es, ws in zip(tokens, ids, weights, strict=True)
    ]
    return torch.stack(rows) if rows else tokens * weights.sum()


def plain_stacked(module):
    def call(e, x):
        gate, up = (module.gate_up_proj[e] @ x).chunk(2)
        return module.down_proj[e] @ (module.activation(gate) * up)

    return call


def all_alike(call, dense_call, dense, parts, rank):
    """Run this rank's part, and the parts of all by the definition; outputs and gradients of values are equal."""
    tokens, ids, weights, grad = parts[rank]
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    out = call(tokens, ids, weights)
    (out * grad).sum().backward()
    all_tokens = [t.clone().requires_grad_() for t, *_ in parts]
    all_weights = [w.clone().requires_grad_() for _, _, w, _ in parts]
    want = plainly(dense_call, torch.cat(all_tokens), torch.cat([i for _, i, _, _ in parts]), torch.cat(all_weights))
    (want * torch.cat([g for *_, g in parts])).sum().backward()
    want_here = want.split([len(t) for t in all_tokens])[rank]
    for found, wanted in (
        (out, want_here),
        (tokens.grad, all_tokens[rank].grad),
        (weights.grad, all_weights[rank].grad),
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for p in dense.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def grads_alike(module, dense):
    wanted = dict(dense.named_parameters())
    for name, p in module.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p, st.ShardedTensor) else p.grad
        torch.testing.assert_close(grad, wanted[name].grad, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def stacked_is_dense(spec):
    group = as_group()
    spec = spec or f'chunk(dim=0, placements=["rank:0-{group.size - 1}/{device().type}"])'  # 5 over 4: 2, 2, 1, 0
    for num_experts in EXPERTS:
        for amounts in AMOUNTS:
            for top_k, to_one in ((1, False), (min(2, num_experts), False), (1, True)):
                parts = drawn(amounts[: group.size], num_experts, top_k, to_one)
                dense, module = stacked(num_experts), stacked(num_experts)
                st.shard_module(module, {"**": spec})
                all_alike(module, plain_stacked(dense), dense, parts, group.rank)
                grads_alike(module, dense)


@every_size
@pytest.mark.worlds("sim")
@pytest.mark.parametrize("spec", ["[ep balanced, -, -]", None], ids=["balanced", "chunk"])
def test_stacked_experts_are_dense_for_any_counts(world, size, spec):
    world(stacked_is_dense, size, spec=spec)


def listed_is_dense(cases):
    group = as_group()
    for num_experts, amounts, top_k in cases:
        parts = drawn(amounts[: group.size], num_experts, top_k)
        dense, of_module = listed(num_experts), listed(num_experts)
        module = copy.deepcopy(st.ExpertList(num_experts, of_module.__getitem__))
        assert all(f"{number}.0.weight" in module.state_dict() for number in module.numbers)
        all_alike(module, lambda e, x, dense=dense: dense[e](x), dense, parts, group.rank)
        assert all(p.grad is not None for p in module.parameters())
        grads_alike(module, dense)
    return list(module.numbers)


CASES = [(e, a, k) for e in EXPERTS for a in AMOUNTS for k in (1, 2) if k <= e]


@every_size
@pytest.mark.worlds("sim")
def test_a_list_of_experts_is_dense_for_any_counts(world, size):
    held = world(listed_is_dense, size, cases=CASES)
    assert [number for numbers in held for number in numbers] == list(range(8))


def on_real_processes():
    listed_is_dense([(5, AMOUNTS[0], 2), (2, AMOUNTS[1], 1)])
    group, num_experts = as_group(), 5
    parts = drawn(AMOUNTS[0], num_experts, 2)
    dense, module = stacked(num_experts), stacked(num_experts)
    st.shard_module(module, {"**": "[ep balanced, -, -]"})
    all_alike(module, plain_stacked(dense), dense, parts, group.rank)
    grads_alike(module, dense)
    with pytest.raises(st.DisagreementError, match="width of tokens of rank 0 does not match"):
        st.dispatch_tokens(torch.ones(2, 3 + group.rank // 2), torch.zeros(2, 1, dtype=torch.long), 4)


def test_experts_over_real_processes(world):
    world(on_real_processes)


def split_experts(num_experts, hidden):
    """ep x tp: tokens, equal along tp, of each ep coordinate."""
    group = as_group().on_mesh(Mesh((("ep", 2), ("tp", 2))), {})
    ep = group.rank // 2
    for amounts in ((3, 4), (0, 5), (0, 0)):
        parts = drawn(amounts, num_experts, min(2, num_experts))
        dense, module = (stacked(num_experts, hidden=hidden) for _ in range(2))
        plan = {
            "gate_up_proj": "[ep balanced, tp blocks(2) balanced, -]",
            "down_proj": "[ep balanced, -, tp balanced]",
        }
        st.shard_module(module, plan, process_group=group)
        all_alike(module, plain_stacked(dense), dense, parts, ep)
        grads_alike(module, dense)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize(("num_experts", "hidden"), [(3, 5), (1, 4), (4, 1)])
def test_experts_that_are_split_over_a_second_axis(world, num_experts, hidden):
    world(split_experts, 4, num_experts=num_experts, hidden=hidden)


class ColumnRow(nn.Module):
    """An expert whose hidden dim is cut over tp, written out."""

    def __init__(self, dense, tp):
        super().__init__()
        self.tp = tp
        width = HIDDEN // tp.size
        rows = slice(tp.index * width, HIDDEN if tp.index == tp.size - 1 else (tp.index + 1) * width)
        self.up, self.down = nn.Parameter(dense[0].weight.data[rows]), nn.Parameter(dense[2].weight.data[:, rows])

    def forward(self, x):
        from shardtensor.comm.collectives import all_reduce, sum_gradient

        return all_reduce(F.linear(torch.relu(F.linear(sum_gradient(x, self.tp), self.up)), self.down), self.tp)


def split_list():
    group = as_group().on_mesh(Mesh((("ep", 2), ("tp", 2))), {})
    parts = drawn((3, 4), 3, 2)
    dense = listed(3)
    for module in dense:
        module[0].bias.data.zero_(), module[2].bias.data.zero_()
    made = copy.deepcopy(dense)
    module = st.ExpertList(3, lambda e: ColumnRow(made[e], group.axis("tp")), process_group=group)
    all_alike(module, lambda e, x: dense[e](x), dense, parts, group.rank // 2)
    with pytest.raises(st.LayoutError, match="no mesh axis is called `experts`"):
        st.ExpertList(3, made.__getitem__, group, axis="experts")


@pytest.mark.worlds("sim")
def test_a_list_of_experts_that_are_split_over_a_second_axis(world):
    world(split_list, 4)


def trains_as_dense(shape):
    """A whole layer with its router on a mesh, a loss that is the mean over data ranks, gradients summed by hand."""
    group = as_group().on_mesh(Mesh(tuple(shape.items())), {})
    data = group.axis("dp", "ep")
    place = group.mesh.coordinate(group.rank)
    mine = place[0] * shape["ep"] + place[1]
    torch.manual_seed(5)
    dense = st.MoE(nn.Linear(EMBED, 5, bias=False), stacked(5, F.silu, 4), top_k=2).to(device(), torch.float64)
    module = copy.deepcopy(dense)
    plan = {"experts.gate_up_proj": "[ep balanced, tp blocks(2), -]", "experts.down_proj": "[ep balanced, -, tp]"}
    st.shard_module(module, plan, process_group=group)
    xs = [torch.randn(2, n, EMBED, dtype=torch.float64, device=device()) for n in (3, 5, 1, 2)[: data.size]]
    x = xs[mine].clone().requires_grad_()
    module(x).square().sum().div(data.size).backward()
    xs = [x.clone().requires_grad_() for x in xs]
    (sum(dense(x).square().sum() for x in xs) / data.size).backward()
    torch.testing.assert_close(x.grad, xs[mine].grad)
    data.all_reduce(module.gate.weight.grad)
    torch.testing.assert_close(module.gate.weight.grad, dense.gate.weight.grad)
    for name in ("gate_up_proj", "down_proj"):
        p, want = getattr(module.experts, name), getattr(dense.experts, name).grad
        group.axis("dp").all_reduce(p._local.grad)
        torch.testing.assert_close(p.grad.full_tensor(), want)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 1, 4)])
def test_a_layer_and_its_router_have_the_gradients_of_one_loss(world, sizes):
    world(trains_as_dense, 4, shape=dict(zip(("dp", "ep", "tp"), sizes, strict=True)))


# -- who asks for gradients ------------------------------------------------------------------------------------------


def gradients_of_some():
    """Only some ranks have tokens or experts that train: backward still meets on all."""
    group = as_group()
    tokens = integers(3, EMBED)
    ids = torch.tensor([[0], [1], [1]], device=device())
    for asking in (group.rank == 0, False):
        x = tokens.clone().requires_grad_(asking)
        module = st.ExpertList(2, listed(2).__getitem__)
        if group.rank == 1:
            module.requires_grad_(False)  # expert 0 trains, expert 1 does not, and ranks 2 and 3 have none
        weights = torch.ones(3, 1, dtype=torch.float64, device=device())
        module(x, ids, weights).sum().backward()
        if group.rank == 0:
            assert module.get_submodule("0.0").bias.grad is not None
        assert (x.grad is not None) == asking
    with torch.no_grad():
        assert not module(tokens, ids, weights).requires_grad
    sent = st.dispatch_tokens(torch.arange(4, device=device()).view(4, 1), ids.new_tensor([[0], [1], [2], [3]]), 4)
    assert sent.tokens.flatten().tolist() == [group.rank] * group.size
    assert sent.combine(sent.tokens, sent.tokens.new_ones(4, 1)).flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.worlds("sim")
def test_ranks_that_ask_for_no_gradients_take_part_in_the_backward_of_others(world):
    world(gradients_of_some, 4)


def second_gradients():
    parts = drawn((2, 3), 3, 2)
    tokens, ids, weights, _ = parts[as_group().rank]

    def call(tokens, weights):
        sent = st.dispatch_tokens(tokens, ids, 3)
        return sent.combine(sent.tokens.pow(3), weights)

    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    (first,) = torch.autograd.grad((call(tokens, weights).square()).sum(), tokens, create_graph=True)
    found = torch.autograd.grad(first.square().sum(), (tokens, weights))
    out = (tokens.pow(3).unsqueeze(1) * weights.unsqueeze(-1)).sum(1)
    (first,) = torch.autograd.grad(out.square().sum(), tokens, create_graph=True)
    for a, b in zip(found, torch.autograd.grad(first.square().sum(), (tokens, weights)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.worlds("sim")
def test_gradients_of_gradients(world):
    world(second_gradients, 2)


def checkpointed():
    parts = drawn((2, 3), 3, 2)
    tokens, ids, weights, grad = parts[as_group().rank]
    found = []
    for again in (False, True):
        module = st.shard_module(stacked(3), {"**": "[ep balanced, -, -]"})
        x = tokens.clone().requires_grad_()
        args = (module, x, ids, weights)
        out = torch.utils.checkpoint.checkpoint(*args, use_reentrant=False) if again else module(*args[1:])
        (out * grad).sum().backward()
        found.append([out.detach(), x.grad, *(p.grad.full_tensor() for p in module.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.worlds("sim")
def test_activation_checkpointing(world):
    world(checkpointed, 2)


# -- one tensor for all experts' products ----------------------------------------------------------------------------


def test_grouped_products_are_those_of_a_loop(monkeypatch):
    module = st.GatedExperts(4, 8, 8).bfloat16()
    tokens = torch.randn(6, 8, dtype=torch.bfloat16)
    ids = torch.tensor([[0], [2], [2], [0], [2], [2]])  # experts 1 and 3 get nothing
    found = []
    for grouped in (False, True):
        monkeypatch.setattr(experts_module, "_takes_grouped", lambda *args, grouped=grouped: grouped)
        x = tokens.clone().requires_grad_()
        module.zero_grad()
        out = module(x, ids, torch.ones(6, 1))
        out.float().square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(found[0], found[1])


def test_autocast_casts_before_rows_travel():
    moe = st.MoE(nn.Linear(8, 4), st.GatedExperts(4, 8, 8), top_k=2)
    listed = st.MoE(moe.gate, st.ExpertList(4, lambda _: nn.Linear(8, 8)), top_k=2)
    x = torch.randn(3, 8, requires_grad=True)
    for module in (moe, listed):
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in moe.parameters())


# -- compile ---------------------------------------------------------------------------------------------------------


def compiled():
    torch._dynamo.reset()
    group = as_group()
    torch.manual_seed(2)
    moe = st.MoE(nn.Linear(EMBED, 5), st.GatedExperts(5, EMBED, HIDDEN), top_k=2)
    moe.experts = st.shard_module(moe.experts, {"**": "[ep balanced, -, -]"})
    compiled_moe = torch.compile(moe, backend="aot_eager", dynamic=True)
    for n in (4, 3, 7, 5, 6, 2):
        x = torch.randn(n + group.rank, EMBED)
        with torch._dynamo.config.patch(error_on_recompile=n not in (4, 3)):
            torch.testing.assert_close(compiled_moe(x), moe(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="how many rows an expert gets is data"):
        torch.compile(moe, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("size", [2])
def test_what_stands_around_experts_compiles_and_counts_do_not_recompile_it(world, size):
    world(compiled, size)


# -- faults ----------------------------------------------------------------------------------------------------------


def told(size, call):
    """What every rank is told."""

    def body():
        with pytest.raises(st.ShardTensorError) as caught:
            call(as_group().rank)
        return str(caught.value)

    texts = st.simulate(size, body)
    assert len(set(texts)) == 1
    return texts[0]


def test_faults_are_one_error_on_all_ranks():
    ids = torch.zeros(2, 1, dtype=torch.long)
    strays = torch.tensor([[-1], [9]])
    text = told(3, lambda rank: st.dispatch_tokens(torch.ones(2, 3), strays if rank == 1 else ids, 4))
    assert text == (
        "dispatch_tokens: rank 1 has a fault, so nothing was done on any rank\n"
        "  rank 1  tokens ask for experts that do not exist\n"
        "            experts        0 to 3\n"
        "            other numbers  2 of 2\n"
        "            fix            give num_experts as the number of experts of all ranks together"
    )
    text = told(2, lambda rank: st.dispatch_tokens(torch.ones(2, 3), ids.float() if rank else ids, 4))
    assert re.search(r"rank 1 +tokens must be rows, and experts whole numbers", text)
    text = told(2, lambda rank: st.dispatch_tokens(torch.ones(2, 3 + rank), ids, 4))
    assert text == (
        "dispatch_tokens: width of tokens of rank 0 does not match with width of tokens of rank 1; nothing was moved\n"
        "  width of tokens  rank 0  3\n"
        "                   rank 1  4\n"
        "  fix              give every rank of the group the same width of tokens"
    )
    text = told(2, lambda rank: st.dispatch_tokens(torch.ones(2, 3, dtype=torch.float16 if rank else None), ids, 4))
    assert "dtype of rank 0 does not match" in text
    text = told(2, lambda rank: st.dispatch_tokens(st.ones("[tp, -]", 2, 3), ids, 4))
    assert "experts take each rank's own tokens as plain tensors, and this is a ShardedTensor" in text

    def call_list(rank):
        return st.ExpertList(2, lambda _: nn.Identity())(torch.ones(2, 3), ids, torch.ones(2, 1 + rank))

    assert re.search("rank 1  each expert of a token needs a weight", told(2, call_list))
    with pytest.raises(st.LayoutError, match="for each rank how many experts"):
        st.dispatch_tokens(torch.ones(2, 3), ids, [1, 2])


def refused_layouts(gate_up, down):
    group = as_group().on_mesh(Mesh((("ep", 2), ("tp", 2))), {})
    module = st.shard_module(
        st.GatedExperts(4, 6, 4), {"gate_up_proj": gate_up, "down_proj": down}, process_group=group
    )
    with pytest.raises(st.RuleError) as caught:
        module(torch.ones(2, 6), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    return str(caught.value)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize(
    ("gate_up", "down", "fault"),
    [
        ("[ep, tp, -]", "[ep, -, tp]", "a rank must hold the rows of gate and up that meet its columns of down"),
        ("[ep, tp blocks(2), -]", "[ep, -, -]", "both must be cut over the same axis inside of the experts"),
        ("[ep, -, -]", "[tp, -, -]", "both must deal the experts alike"),
        ("[ep, -, tp]", "[ep, -, -]", "the dim of the tokens must be whole"),
    ],
)
def test_layouts_that_cannot_be_computed_are_refused(world, gate_up, down, fault):
    texts = set(world(refused_layouts, 4, gate_up=gate_up, down=down))
    assert texts == {
        f"GatedExperts: {fault}\n"
        f"  gate_up_proj  {gate_up}\n"
        f"  down_proj     {down}\n"
        "  either        deal them whole: [ep, -, -] and [ep, -, -]\n"
        "  or            split each of them, too: [ep, tp blocks(2), -] and [ep, -, tp]"
    }

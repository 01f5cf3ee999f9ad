"""torch's operations on lists equal their dense answers, over lists that mix layouts and plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size

import shardtensor as st
from shardtensor.tensor.dispatch import HANDLERS

SHAPES = ((5, 3), (2, 7), (1, 3), (4,), (3, 3), (2, 2), ())
SPECS = ("ROWS", "[-, tp balanced]", "ROWS", "ROWS", "replicate", None, None)
OTHER = ("flat(tp)", "[-, tp balanced]", None, "ROWS", "ROWS", "ROWS", None)
WORDS = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
UNARY = WORDS.split()
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min", "pow")


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(shape, generator=generator) + 0.5).to(device()) for shape in SHAPES]


def laid_out(dense, specs=SPECS):
    rows = f'chunk(dim=0, placements=["rank:0-{dist.get_world_size() - 1}/{device().type}"])'
    return [
        x.clone() if spec is None or not x.dim() else st.distribute(x, spec.replace("ROWS", rows))
        for x, spec in zip(dense, specs, strict=True)
    ]


def check(got, want):
    for x, y in zip(got, want, strict=True):
        x = x.full_tensor() if isinstance(x, st.ShardedTensor) else x
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)


def both(name, *lists, **options):
    """The operation and its form in place, over dense lists and over sharded ones of two sets of layouts."""
    for specs in (SPECS, OTHER):
        want = getattr(torch, name)(*lists, **options)
        args = [
            laid_out(arg, SPECS if i == 0 else specs)
            if isinstance(arg, list) and isinstance(arg[0], torch.Tensor)
            else arg
            for i, arg in enumerate(lists)
        ]
        check(getattr(torch, name)(*args, **options), want)
        out = getattr(torch, name + "_")(*args, **options)
        assert out is None or out is args[0]
        check(args[0], want)


def test_every_operation_on_lists_has_a_handler():
    gathers = {"_foreach_max", "_foreach_mm", "_foreach_powsum"}
    names = {name for name in dir(torch) if name.startswith("_foreach_")} - gathers
    assert {name for name in names if getattr(torch, name) not in HANDLERS} == set()
    unary = {f"_foreach_{name}" for name in UNARY} | {f"_foreach_{name}_" for name in UNARY}
    rest = {name.removeprefix("_foreach_").removesuffix("_") for name in names - unary}
    assert rest - {"clone"} == {*BINARY, "addcdiv", "addcmul", "lerp", "copy", "zero", "norm"}


def elementwise():
    a, b, c = values(0), values(1), values(2)
    for name in UNARY:
        both(f"_foreach_{name}", a)
    for name in BINARY:
        both(f"_foreach_{name}", a, b)
        both(f"_foreach_{name}", a, [0.5 + i for i in range(len(a))])
        both(f"_foreach_{name}", a, 2.0)
    both("_foreach_add", a, b, alpha=3)
    both("_foreach_mul", a, torch.tensor(2.0, device=device()))
    both("_foreach_mul", a, [torch.tensor(2.0, device=device())] * len(a))
    both("_foreach_lerp", a, b, c)
    both("_foreach_lerp", a, b, 0.25)
    both("_foreach_addcmul", a, b, c, value=2.0)
    both("_foreach_addcdiv", a, b, c, [0.5 + i for i in range(len(a))])
    check(torch._foreach_pow(2.0, laid_out(a)), torch._foreach_pow(2.0, a))
    target = laid_out(a)
    check(torch._foreach_clone(target), a) if hasattr(torch, "_foreach_clone") else None
    torch._foreach_copy_(target, laid_out(b, OTHER))
    check(target, b)
    torch._foreach_zero_(target)
    check(target, [torch.zeros_like(x) for x in a])


@pytest.mark.parametrize("size", [1, 3])
def test_elementwise(world, size):
    world(elementwise, size)


def broadcasting_and_gradients():
    wide = torch.rand(4, 3, device=device())
    narrow = torch.rand(3, device=device())
    [x] = laid_out([wide], ["ROWS"])
    check(torch._foreach_add([x], [narrow]), [wide + narrow])
    w, v = wide.clone().requires_grad_(), wide.clone().requires_grad_()
    [x] = laid_out([w], ["ROWS"])
    out = torch._foreach_mul([x], [narrow])
    (out[0].full_tensor() ** 2).sum().backward()
    ((v * narrow) ** 2).sum().backward()
    torch.testing.assert_close(w.grad, v.grad)
    norms = torch._foreach_norm(laid_out([w], ["ROWS"]))
    w.grad = None
    norms[0].backward()
    torch.testing.assert_close(w.grad, wide / wide.norm())


def test_broadcasting_and_gradients(world):
    world(broadcasting_and_gradients, 2)


def norms():
    a = [-x for x in values(0)]
    before = dist.group.WORLD._get_sequence_number_for_group()
    for count, ord in enumerate((2, 1, 3.0, float("inf"), 0, -1.0)):
        got = torch._foreach_norm(laid_out(a), ord)
        assert all(type(x) is torch.Tensor for x in got)
        if dist.get_world_size() > 1:
            assert dist.group.WORLD._get_sequence_number_for_group() == before + count + 1
        check(got, torch._foreach_norm(a, ord))


@every_size
def test_norms_take_one_collective_for_the_list(world, size):
    world(norms, size)


def refused():
    mesh = dist.init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    total = st.distribute(torch.ones(2, 2, device=device()), "replicate partial(tp)", process_group=mesh)
    with pytest.raises(st.RuleError, match="in place on a tensor that is still to be reduced"):
        torch._foreach_mul_([total], 2.0)
    check(torch._foreach_sqrt([total]), [torch.ones(2, 2, device=device())])


def test_partial_tensors_are_reduced_first_and_not_changed_in_place(world):
    world(refused, 2)

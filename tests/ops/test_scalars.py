"""Python values, comparisons and tensors made in the likeness of a sharded one."""

from __future__ import annotations

import pytest
import torch
from harness import device, every_size
from harness.law import specs, values

import shardtensor as st


def python_values() -> None:
    x = values("int", (5, 6), 1)
    for name, spec, group in specs((5, 6)):
        s = st.distribute(x, spec, process_group=group)
        assert s.tolist() == x.tolist(), name
        assert len(s) == 5
        assert (3 in s) == (3 in x)
        assert torch.equal(s, x)
        assert torch.equal(x, s)
        assert not torch.equal(s, x + 1)
        assert not torch.equal(s, x[:4])
        assert torch.allclose(s, x + 1e-9)
        assert s.sum().item() == x.sum().item()
        assert f"{s.sum():.1f}" == f"{x.sum():.1f}"
        with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
            bool(s)
        with pytest.raises(RuntimeError, match="30 elements cannot be converted to Scalar"):
            s.item()
        for _, other, other_group in specs((5, 6)):
            if other_group is group:
                assert torch.equal(s, st.distribute(x, other, process_group=other_group))
    one = st.distribute(torch.full((1, 1), 3.0, device=device()), "[tp balanced, -]")
    assert (one.item(), float(one), int(one), bool(one)) == (3.0, 3.0, 3, True)
    rows = list(st.distribute(x, "[-, tp balanced]"))
    assert len(rows) == 5
    assert torch.equal(rows[2].full_tensor() if isinstance(rows[2], st.ShardedTensor) else rows[2], x[2])


@every_size
def test_python_values_are_global(world, size):
    world(python_values, size)


def likenesses() -> None:
    for name, spec, group in specs((5, 6)):
        x = st.distribute(values("int", (5, 6), 1), spec, process_group=group)
        for y in (
            torch.zeros_like(x),
            torch.ones_like(x),
            torch.full_like(x, 2),
            x.new_zeros(5, 6),
            x.new_ones((5, 6)),
        ):
            assert isinstance(y, st.ShardedTensor), name
            assert y.sharding_spec() == x.sharding_spec()
            assert y.shape == (5, 6)
        assert type(x.new_zeros(3)) is torch.Tensor
        assert x.new_full((2,), 3.0).tolist() == [3, 3]
        assert x.new_tensor([1.0]).tolist() == [1]
        assert torch.zeros_like(x, dtype=torch.float64).dtype == torch.float64
        torch.manual_seed(3)
        found = torch.randn_like(x), torch.rand_like(x)
        torch.manual_seed(3)
        dense = x.full_tensor()
        want = torch.randn_like(dense), torch.rand_like(dense)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@every_size
def test_likenesses_keep_the_layout(world, size):
    world(likenesses, size)


def bad_input() -> None:
    x = st.distribute(values("int", (5, 6), 1), "[tp balanced, -]")
    for call, kind, text in [
        (lambda: x + torch.ones(4), RuntimeError, r"The size of tensor a \(6\) must match"),
        (lambda: x @ torch.ones(5, 2), RuntimeError, "size mismatch|must match|cannot be multiplied"),
        (lambda: x.sum(2), IndexError, "Dimension out of range"),
        (lambda: x.sum((0, 0)), RuntimeError, "appears multiple times"),
        (lambda: x.view(7, 5), RuntimeError, "is invalid for input of size 30"),
        (lambda: x[7], IndexError, "index 7 is out of bounds for dimension 0 with size 5"),
        (lambda: x[0, 0, 0], IndexError, "too many indices"),
        (lambda: x.add_(torch.ones(2, 5, 6)), RuntimeError, "doesn't match the broadcast shape"),
        (lambda: x.copy_(torch.ones(4, 6)), RuntimeError, "must match|broadcast"),
        (lambda: x.transpose(0, 3), IndexError, "Dimension out of range"),
        (lambda: torch.mul(x, 2, out=torch.zeros_like(x[:3])), st.RuleError, "out has another shape"),
        (lambda: torch.cat([x, torch.ones(2, 5)]), RuntimeError, "Sizes of tensors must match"),
        (lambda: x.long().mean(), RuntimeError, "mean"),
    ]:
        with pytest.raises(kind, match=text):
            call()
    with st.strict(), pytest.raises(st.RuleError, match=r"add: axis \"tp\" splits"):
        x + st.distribute(values("int", (5, 6), 2), "[-, tp balanced]")


def test_bad_input_raises_what_torch_raises(world):
    world(bad_input, 2)

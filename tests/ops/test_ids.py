"""Ids that are out of range are one error on every rank, whichever rank holds them; ignored ones are none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import device, every_size

import shardtensor as st

LAYOUTS = [("[tp balanced, -]", "[tp balanced]"), ("[-, tp balanced]", "[tp balanced]"), ("[tp balanced, -]", None)]


def ways() -> list:
    """Functions of logits of five classes and targets."""
    found = []
    for loss in (F.cross_entropy, F.nll_loss):
        for reduction in ("mean", "sum", "none"):
            found.append(lambda x, t, loss=loss, reduction=reduction: loss(x, t, reduction=reduction, ignore_index=-7))
    return found


def laid_out(row: tuple[str, str | None], x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return st.distribute(x, row[0]), target if row[1] is None else st.distribute(target, row[1])


def strays() -> None:
    x = torch.arange(35.0, device=device()).view(7, 5)
    for row in LAYOUTS:
        for way in ways():
            for place in range(7):
                for stray in (5, -1, 99):
                    target = torch.tensor([1, -7, 3, 4, 0, -7, 2], device=device())
                    target[place] = stray
                    with pytest.raises(IndexError, match=f"Target {stray} is out of bounds"):
                        way(*laid_out(row, x, target))
    total = torch.ones(1, device=device())
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


@every_size
def test_a_stray_target_is_one_error_on_every_rank(world, size):
    if device().type == "cuda":
        pytest.skip("a card only asserts")
    world(strays, size)


def ignored() -> None:
    x = torch.arange(35.0, device=device()).view(7, 5).sin()
    for row in LAYOUTS:
        for way in ways():
            for target in ([1, -7, 3, 4, 0, -7, 2], [-7] * 6 + [4], [0] + [-7] * 6, [-7] * 7):
                target = torch.tensor(target, device=device())
                found = way(*laid_out(row, x, target))
                found = found.full_tensor() if isinstance(found, st.ShardedTensor) else found
                torch.testing.assert_close(found, way(x, target), equal_nan=True)


@every_size
def test_ignored_targets_are_no_strays(world, size):
    world(ignored, size)

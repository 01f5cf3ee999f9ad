"""What an exchange copies: the same elements, whatever words it moves and however the tensor lies."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tensor.test_reshard import specs

import shardtensor as st
from shardtensor.comm import exchange
from shardtensor.comm.process_group import as_group
from shardtensor.layout.bind import bind
from shardtensor.layout.route import route


def misplacement(t: torch.Tensor) -> int | None:
    """Words on the CPU, too."""
    return t.storage_offset() * t.element_size() % exchange.WIDEST if t.is_contiguous() else None


def in_words(dtype: torch.dtype, offset: int) -> int:
    group, moves = as_group(), []
    for shape in ((32, 64), (24, 40), (17, 48), (4, 6, 16)):
        numel = torch.Size(shape).numel()
        dense = (torch.arange(numel) % 251).to(dtype).view(shape)
        texts = [text for text in specs(len(shape), group.size) if "partial" not in text]
        for one, other in product(texts, repeat=2):
            try:
                x = st.distribute(dense, one)
                goal = st.distribute(dense, other)
            except st.LayoutError:
                continue
            steps = route(x._layout, goal._layout)
            if [step.kind for step in steps] != ["all_to_all"]:
                continue
            local = x._local
            moved = torch.empty(local.numel() + offset, dtype=dtype)[offset:].view(local.shape).copy_(local)
            for old in (moved, moved.transpose(0, -1).contiguous().transpose(0, -1)):  # and lying otherwise
                new = exchange.exchange(old, steps[0], group, group.rank)
                assert torch.equal(new, goal._local), (shape, one, other)
                moves.append(steps[0])
    return len(moves)


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        (torch.bfloat16, 0),
        (torch.bfloat16, 4),
        (torch.float32, 1),
        (torch.float64, 1),
        (torch.bool, 0),
        (torch.complex128, 3),
    ],
    ids=str,
)
def test_words_never_change_what_is_copied(monkeypatch, dtype, offset):
    monkeypatch.setattr(exchange, "misplacement", misplacement)
    assert min(st.simulate(2, in_words, dtype=dtype, offset=offset)) > 100


def test_rows_become_columns_in_the_widest_words():
    source, target = (bind(st.parse_spec(text), (64, 64), st.Mesh((("tp", 2),))) for text in ("[tp, -]", "[-, tp]"))
    (step,) = route(source, target)

    class Both:
        ranks = range(2)

    def settled(misplaced: int) -> exchange.Copies:
        local = torch.empty(32, 64, dtype=torch.bfloat16)
        return exchange._planned(local, step, Both, 1, misplaced).send.copies  # type: ignore[arg-type]

    assert settled(0).word == torch.complex128
    assert settled(0).pieces[0].size == (2, 32, 4)
    assert settled(8).word == torch.int64
    assert settled(2).word is None

"""The rule of a product fits where torch multiplies, and its output has torch's shape."""

from __future__ import annotations

from itertools import product

import torch

from shardtensor.rules.matmul import matmul_rule

SHAPES = [shape for ndim in range(4) for shape in product((0, 1, 2, 3), repeat=ndim)]


def test_the_rule_of_every_pair_of_shapes():
    for a, b in product(SHAPES, SHAPES):
        rule = matmul_rule(a, b)
        try:
            want = tuple(torch.matmul(torch.empty(a, device="meta"), torch.empty(b, device="meta")).shape)
        except RuntimeError:
            assert rule is None, (a, b)
            continue
        assert rule is not None, (a, b)
        sizes = dict(zip(rule.inputs[0] + rule.inputs[1], a + b, strict=True))
        assert tuple(sizes.get(x, 1) for x in rule.output) == want, (a, b)

"""What notebooks draw: well-formed, escaped, true to the layouts, and without a collective."""

from __future__ import annotations

import pytest
import torch
from test_show_page import EVIL, SPECS, Reader, decoder

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.layout.bind import bind
from shardtensor.layout.html import ROWS, html_table
from shardtensor.layout.picture import html_map, picture_of
from shardtensor.mesh import read_mesh
from shardtensor.plan.loading import load_plan
from shardtensor.spec.parse import parse_spec


def text_of(html):
    return "".join(text for _, text in Reader(html).texts)


@pytest.mark.parametrize(("text", "shape", "mesh"), SPECS)
def test_maps_are_well_formed(text, shape, mesh):
    picture = picture_of(bind(parse_spec(text), shape, read_mesh(mesh)))
    told = text_of(html_map(picture))
    assert all(meaning in told for _, meaning in picture.legend() if picture.axes)


def drawn():
    x = st.distribute(torch.arange(24.0).view(4, 6), "[tp, -]")
    return x._repr_html_() if as_group().rank == 1 else ""


def test_one_rank_alone_draws_a_sharded_tensor():
    told = text_of(st.simulate("tp=2", drawn)[1])
    assert "rank 1 holds [2:4, 0:6] as (2, 6)" in told
    assert "000000\n000000\n111111\n111111\n0 tp 0, rank 0  1 tp 1, rank 1" in told


def test_a_plan_is_a_table_of_its_rules():
    plan = load_plan("mlp", world=2)
    told = text_of(plan._repr_html_())
    assert f"{len(plan.lines)} rules for (tp=2)" in told
    assert "fc2.weight" in told and "replicate partial(tp) -> replicate" in told


def test_a_resolved_plan_is_a_table_of_its_layouts():
    told = text_of(decoder(layers=3, name=EVIL)._repr_html_())
    assert f"{EVIL}.layers.{{0..2}}.q.weight" in told
    assert "[tp, -] flat(dp)" in told and "10 tensors on (dp=2, tp=2), 0 errors" in told
    assert not any(tag == "script" for tag, _ in Reader(decoder(name=EVIL)._repr_html_()).elements)


def test_long_tables_are_cut():
    rows = [[i] for i in range(ROWS + 3)]
    told = text_of(html_table("many", ["i"], rows))
    assert told.endswith(f"{ROWS - 1}3 more")

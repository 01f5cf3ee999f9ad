"""Plans resolved by hand: a model of names and shapes, a layout for each, what is stored; no plan text."""

from __future__ import annotations

from collections.abc import Mapping

from shardtensor.layout.bind import bind
from shardtensor.mesh import read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.line import Line
from shardtensor.plan.match.patterns import matches
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.parse import parse_spec
from shardtensor.spec.parts import Flat

DIMS = {"embed": ("vocab", "embed"), "norm": ("embed",)}


def info(name, shape, **said):
    """A tensor with the dim names that its kind of layer has, by its name."""
    kind = next((dims for word, dims in DIMS.items() if word in name), ("out", "in"))
    dims = kind if name.endswith("weight") and len(kind) == len(shape) else ("out",) if len(shape) == 1 else None
    return TensorInfo(name, tuple(shape), **{"dims": dims, **said})


def decoder(layers=2, hidden=16, ffn=64, vocab=50, kv=None, **said):
    """The tensors of a small Llama."""
    kv = kv or hidden
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        for name, out, into in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", ffn, hidden), ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ):  # fmt: skip
            shapes[f"{at}.{name}.weight"] = (out, into)
        shapes |= {f"{at}.{name}_norm.weight": (hidden,) for name in ("input", "post")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return Model(tuple(info(name, shape, **said) for name, shape in shapes.items()))


MEGATRON = {
    "**.{q,k,v}_proj.weight": "[tp, -]", "**.{gate,up}_proj.weight": "[tp, -]",
    "**.{o,down}_proj.weight": "[-, tp]", "**.{embed_tokens,lm_head}.weight": "[tp pad(8), -]",
}  # fmt: skip


def resolved(
    model: Model,
    mesh: str,
    specs: Mapping[str, str] = {},
    *,
    data: tuple[str, ...] = (),
    store: tuple[str, ...] = (),
    unit: int | str = 1,
    by: tuple[str, ...] = (),
    ties: Mapping[str, str] = {},
) -> Resolved:
    """The plan with these layouts; tensors that no pattern matches are replicated.

    Args:
        store: axes of the ``flat`` that all parameters are stored in; none for no ``store``.
        by: patterns of gather units.
    """
    axes = Axes(read_mesh(mesh), {}, data)
    tensors = {}
    for tensor in model.tensors:
        text = next((spec for pattern, spec in specs.items() if matches(pattern, tensor.name)), "replicate")
        spec = parse_spec(text)
        flat = Flat(store, unit) if store and not tensor.is_buffer else None
        paths = tensor.name.split(".")
        inside = [".".join(paths[:i]) for i in range(len(paths))]
        path = next((p for p in reversed(inside) if any(matches(pattern, p) for pattern in by)), "")
        layout = bind(spec, tensor.shape, axes.mesh, tensor.dims)
        tensors[tensor.name] = Placed(
            tensor, spec, layout, flat, path if flat else None, Line(tensor.name, value=spec),
            ties.get(tensor.name, ""),
        )  # fmt: skip
    return Resolved(Plan(axes, world=axes.mesh.size), model, tensors, {})

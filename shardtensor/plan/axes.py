"""The mesh of a plan: axes, some of them made of named factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parts import Cut, Flat, Partial


@attrs.frozen
class Axes:
    """The axes of a plan's mesh.

    Attributes:
        mesh: of the axes that are not made of others, row-major over the world: ``(dp=2, kvg=8, kvr=2)``.
        made_of: each axis made of factors -> its factors, major first: ``{"tp": ("kvg", "kvr")}``.
        data: axes along which ranks have different samples; names as written, not replaced by factors.

    Example:
        >>> axes = Axes(Mesh((("dp", 2), ("kvg", 2), ("kvr", 2))), {"tp": ("kvg", "kvr")}, ("dp",))
        >>> axes.size("tp"), axes.leaves(["tp"]), str(axes.spelled(Spec("tp", None)))
        (4, ('kvg', 'kvr'), '[kvg*kvr, -]')
    """

    mesh: Mesh
    made_of: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    data: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that is allowed as an axis."""
        return (*self.mesh.names, *self.made_of)

    def leaves(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of `mesh` that some axes are made of, major first."""
        return tuple(leaf for name in names for leaf in self.made_of.get(name, (name,)))

    def size(self, name: str) -> int:
        """Return the number of coordinates of an axis, a factor, or an axis made of factors."""
        sizes = dict(self.mesh.axes)
        total = 1
        for leaf in self.leaves((name,)):
            total *= sizes[leaf]
        return total

    def named(self, leaves: Iterable[str]) -> tuple[str, ...]:
        """Return the plan's names of axes of `mesh`: ``tp`` if all of its factors of more than one rank are given.

        Example:
            >>> axes = Axes(Mesh((("dp", 2), ("kvg", 2), ("kvr", 2))), {"tp": ("kvg", "kvr")})
            >>> axes.named(["kvg", "kvr"]), axes.named(["kvr"])
            (('tp',), ('kvr',))
        """
        rest, found = list(dict.fromkeys(leaves)), []
        for name, factors in self.made_of.items():
            factors = tuple(leaf for leaf in factors if self.size(leaf) > 1)
            if factors and set(factors) <= set(rest):
                found.append(name)
                rest = [leaf for leaf in rest if leaf not in factors]
        return (*found, *rest)

    def spelled(self, spec: Spec) -> Spec:
        """Return `spec` with axes that are made of factors replaced by these, which are axes of the mesh."""
        if not spec.axis_names & set(self.made_of):
            return spec

        def cut(part: Cut) -> Cut:
            return attrs.evolve(part, axes=self.leaves(part.axes))

        flat, only = spec.flat_part, spec.only_part
        return Spec.of(
            tuple(cut(dim) if isinstance(dim, Cut) else dim for dim in spec.dims),
            tuple((name, cut(part)) for name, part in spec.named),
            None if flat is None else Flat(self.leaves(flat.axes), flat.unit, flat.sizes),
            only,
            tuple(Partial(self.leaves(part.axes), part.op) for part in spec.partial_parts),
        )

"""The mesh as a table of ranks, each of which the script gives the colour of what it holds."""

from __future__ import annotations

from shardtensor.cli.mesh_rows import MeshRows, mesh_text
from shardtensor.cli.page.markup import Markup, el
from shardtensor.plan.axes import Axes


def mesh_drawing(axes: Axes, rows: MeshRows) -> Markup:
    """The ranks of a mesh, long axes with their middle left out."""
    head = [el("th", _numbers(word), scope="col") for word in rows.columns]
    across = el("span", " × ".join(n for n in rows.across if n != "*"), class_="axis")
    lines = []
    index = 0
    for label, ranks in rows.rows:
        cells = []
        for rank in ranks:
            if rank is None:
                cells.append(el("td", "⋯" if any(r is not None for r in ranks) else "⋮", class_="gap"))
            else:
                cells.append(el("td", el("span", str(rank), class_="rank", data_c=index)))
            index += 1
        lines.append(el("tr", el("th", label.replace("*", ""), scope="row"), *cells))
    factors = [
        el("p", el("b", name), " = ", " × ".join(f"{part} {axes.size(part)}" for part in parts), class_="note")
        for name, parts in axes.made_of.items()
    ]
    data = el("p", f"samples differ along {', '.join(axes.data)}", class_="note") if axes.data else ""
    top = el("tr", el("td"), *head) if not axes.mesh.is_unnamed else ""
    return el(
        "section",
        el("h3", "Ranks", el("span", "" if axes.mesh.is_unnamed else mesh_text(axes), class_="count")),
        el("div", el("table", el("caption", across), el("tbody", top, *lines)), class_="scroll"),
        *factors,
        data,
        class_="mesh",
    )


def _numbers(label: str) -> str:
    """The coordinates of a column without the names of the axes, which stand above all."""
    return ",".join(word.rpartition(" ")[2] for word in label.split(", "))

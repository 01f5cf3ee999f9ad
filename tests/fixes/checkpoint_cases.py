"""Errors of `save` and `load`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn, optim

import shardtensor as st
from fixes.case import Case, linear, partials
from shardtensor.checkpoint import saving
from shardtensor.checkpoint.storage import Folder
from shardtensor.comm.process_group import as_group

_WORK = tempfile.TemporaryDirectory(prefix="shardtensor-fixes-")
atexit.register(_WORK.cleanup)
VALUES = torch.arange(4.0)
MADE: dict[str, Any] = {}


def at(name: str) -> str:
    return f"{_WORK.name}/{name}"


def on_first(act: Callable[[], Any]) -> None:
    """On rank 0 alone; the others wait."""
    if as_group().rank == 0:
        act()
    as_group().exchange_objects(None)


def fresh(name: str) -> str:
    """A path at which nothing is."""
    on_first(lambda: shutil.rmtree(at(name), ignore_errors=True))
    return at(name)


def saved(name: str, **arguments: Any) -> str:
    """A checkpoint; beside it an earlier one of the same."""
    path = fresh(name)
    arguments = arguments or {"model": linear()}
    st.save(f"{at(name)}-earlier", **arguments)
    st.save(path, **arguments)
    return path


def loads(path: str, **arguments: Any) -> None:
    st.load(path, **(arguments or {"model": linear("[-, tp]")}))


def of_another_kind(name: str, make: Callable[[Path], Any]) -> str:
    path = fresh(name)
    on_first(lambda: [os.mkdir(path), make(Path(path))])
    return path


def stepped(model: nn.Module, optimizer: Any) -> Any:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer


def adamw(model: nn.Module) -> Any:
    return stepped(model, st.ShardedOptimizer(model, optim.AdamW))


def another_class(cls: Any, **options: Any) -> None:
    model = linear()
    path = saved("class", model=model, optimizer=adamw(model))
    st.load(path, model=model, optimizer=st.ShardedOptimizer(model, cls), **options)


def optimizer_of(own: bool) -> None:
    model = linear()
    path = saved("optimizer of", model=model, optimizer=adamw(model))
    here = linear()
    st.load(path, model=here, optimizer=st.ShardedOptimizer(here if own else linear(), optim.AdamW))


def state_of_shape(width: int) -> None:
    """An optimizer alone: it has names of its own."""
    model = nn.Linear(4, 4)
    path = saved("state of shape", optimizer=adamw(model))
    st.load(path, optimizer=st.ShardedOptimizer(nn.Linear(width, 4), optim.AdamW))


class Loader:
    def __init__(self, place: int = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def loaders(of: str, given: bool) -> None:
    """From a folder without any, from one of another name, and from two ranks on each rank by itself."""
    group = as_group()
    if of == "files":
        path = of_another_kind("loaders", lambda x: save_file(linear(None).state_dict(), x / "model.safetensors"))
        st.load(path, model=linear(), dataloader=Loader() if given else None)
        return
    path = saved("loaders", model=linear(), dataloader=Loader(group.rank))
    if of == "name":
        st.load(path, model=linear(), dataloader={"other": Loader()} if given else None)
        return
    alone = group.subgroup([group.rank])
    st.load(path, model=nn.Sequential(nn.Linear(6, 4)), dataloader=Loader() if given else None, process_group=alone)


def disk_full(is_full: bool) -> None:
    before = saving.write_files

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    MADE.setdefault("write_files", before)
    saving.write_files = full if is_full else before
    try:
        st.save(fresh("disk"), model=linear())
    finally:
        saving.write_files = MADE["write_files"]


def disk_of_its_own(shared: bool) -> None:
    """Rank 1 does not see what rank 0 writes."""
    has = MADE.setdefault("has", Folder.has)

    def seen(self: Folder, name: str = "") -> bool:
        return has(self, name) and (as_group().rank == 0 or name != "probe")

    path = fresh("own disk")
    Folder.has = has if shared else seen  # type: ignore[method-assign]
    try:
        st.save(path, model=linear())
    finally:
        Folder.has = has  # type: ignore[method-assign]


def below_a_file(is_below: bool) -> None:
    path = fresh("below")
    on_first(lambda: [os.mkdir(path), Path(path, "file").write_text("mine")])
    st.save(f"{path}/file/c" if is_below else f"{path}/c", model=linear())


def over_something(how: str) -> None:
    path = of_another_kind("something", lambda folder: (folder / "notes.txt").write_text("mine"))
    if how == "remove":
        fresh("something")
    st.save(f"{path}-else" if how == "rename" else path, model=linear())


def of_dtype(name: str, **options: Any) -> None:
    path = saved("dtype")
    model = linear()
    if options.pop("convert", False):
        loads(path, model=model)
        return
    loads(path, model=nn.Sequential(nn.Linear(6, 4)).to(torch.float64), **options)


class Table(nn.Module):
    """A buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.table = torch.arange(4.0)


def left_on_meta(materialized: bool) -> None:
    path = saved("on meta", model=Table())
    with torch.device("meta"):
        model = Table()
    if materialized:
        st.materialize(model)
    st.load(path, model=model)


class Custom:
    def __init__(self, parts: list[int]) -> None:
        self.parts = parts


def save_any(name: str = "any", **arguments: Any) -> None:
    st.save(fresh(name), **arguments)


def held(x: Any) -> None:
    save_any(model={"x": x})


def four_bits() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def load_partial(reduced: bool) -> None:
    path = saved("partial", model={"x": torch.zeros(4, 6)})
    st.load(path, model={"x": st.reshard(partials(), "[tp, -]") if reduced else partials()})


def sum_of(reduced: bool) -> None:
    held(st.reshard(partials(), "[tp, -]") if reduced else partials())


def without_optimizer(given: bool) -> None:
    model = linear()
    path = saved("no optimizer", model=model)
    st.load(path, model=model, optimizer=adamw(model) if given else None)


def names_of(model: bool) -> None:
    own = linear(None)
    save_any(optimizer=stepped(own, optim.AdamW(own.parameters())), **({"model": own} if model else {}))


def of_no_model(model: bool) -> None:
    path = saved("extra alone", **({"model": linear()} if model else {"extra": 1}))
    loads(path)


def of_other_shape(width: int, **options: Any) -> None:
    path = saved("shape")
    loads(path, model=nn.Sequential(nn.Linear(width, 4)), **options)


def of_another_scheduler(make: Callable[[optim.Optimizer], Any]) -> None:
    optimizer = optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    path = saved("scheduler", scheduler=optim.lr_scheduler.StepLR(optimizer, 2))
    loads(path, scheduler=make(optimizer))


def into_expanded(cloned: bool) -> None:
    path = saved("expanded", model={"x": torch.ones(3)})
    target = torch.zeros(1).expand(3)
    loads(path, model={"x": target.clone() if cloned else target})


CASES: dict[str, Case] = {
    "an object of another class": Case(
        lambda: of_another_scheduler(lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        {
            "load it into an object of the class that was saved": lambda: of_another_scheduler(
                lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2)
            )
        },
    ),
    "elements that share memory": Case(
        lambda: into_expanded(False), {"load into a clone() of it": lambda: into_expanded(True)}
    ),
    "a key that is no name of a file": Case(
        lambda: save_any(model={"a/b": linear()}),
        {'use letters a to z and digits, and not "state"': lambda: save_any(model={"ab": linear()})},
    ),
    "a partial sum": Case(
        lambda: sum_of(False),
        {"reduce it first: st.reshard(tensor, spec) with a spec that is not partial": lambda: sum_of(True)},
    ),
    "a sparse tensor": Case(
        lambda: held(torch.eye(3).to_sparse()),
        {"save its dense parts": lambda: held(torch.eye(3).to_sparse().values())},
    ),
    "a dtype that files do not hold": Case(
        lambda: held(four_bits()), {"save it as another dtype": lambda: held(four_bits().view(torch.uint8))}
    ),
    "an optimizer without its model": Case(
        lambda: names_of(False), {"pass model= as well as optimizer=": lambda: names_of(True)}
    ),
    "an object": Case(
        lambda: save_any(extra={"x": Custom([1])}),
        {
            "save what it is made of, and make it again after the load": lambda: [
                save_any(extra={"x": Custom([1]).parts}),
                Custom(st.load(at("any"))["x"]),
            ]
        },
    ),
    "a layout of files": Case(
        lambda: save_any(model=linear(), layout="sharded"),
        {
            'layout="whole" or layout="as is"': lambda: [
                save_any(model=linear(), layout=layout) for layout in ("whole", "as is")
            ]
        },
    ),
    "keep none": Case(
        lambda: save_any(extra=1, keep_last=0), {"keep one at least": lambda: save_any(extra=1, keep_last=1)}
    ),
    "a step that is no number": Case(
        lambda: save_any(extra=1, step="7"), {"pass an int, 0 or larger": lambda: save_any(extra=1, step=0)}
    ),
    "a folder that cannot be made": Case(
        lambda: below_a_file(True), {"choose a folder that this process may write": lambda: below_a_file(False)}
    ),
    "a disk of its own": Case(
        lambda: disk_of_its_own(False),
        {
            "name a folder that all machines share, or a URL such as s3://bucket/run/step-100": lambda: [
                disk_of_its_own(True),
                st.save("memory://fixes/step-100", model=linear()),
            ]
        },
    ),
    "a folder that is no checkpoint": Case(
        lambda: over_something("keep"),
        {"choose another name, or remove it": lambda: [over_something("rename"), over_something("remove")]},
    ),
    "a disk that is full": Case(
        lambda: disk_full(True),
        {
            "free space or choose a folder on another disk, and save again": lambda: disk_full(False),
        },
    ),
    "no optimizer in it": Case(
        lambda: without_optimizer(True), {"load without optimizer=": lambda: without_optimizer(False)}
    ),
    "no model in it": Case(lambda: of_no_model(False), {"save it with model=": lambda: of_no_model(True)}),
    "a model of other shapes": Case(
        lambda: of_other_shape(5),
        {
            "load it into the model that was saved, or with strict=False, which leaves these tensors as they are": (
                lambda: [of_other_shape(6), of_other_shape(5, strict=False)]
            )
        },
    ),
    "a model of another dtype": Case(
        lambda: of_dtype("dtype"),
        {
            "load with cast=True": lambda: of_dtype("dtype", cast=True),
            "convert the model first: model.to(dtype)": lambda: of_dtype("dtype", convert=True),
        },
    ),
    "a target that is a partial sum": Case(
        lambda: load_partial(False), {"reduce it first: st.reshard": lambda: load_partial(True)}
    ),
    "tensors that stay on the meta device": Case(
        lambda: left_on_meta(False),
        {
            "call st.materialize(model) before the load": lambda: left_on_meta(True),
        },
    ),
    "an optimizer of another model": Case(
        lambda: optimizer_of(False),
        {"pass the model whose parameters() the optimizer was made with": lambda: optimizer_of(True)},
    ),
    "another class of optimizer": Case(
        lambda: another_class(optim.SGD),
        {
            "make the optimizer that was saved, or load with strict=False, which takes what both have": lambda: [
                another_class(optim.AdamW),
                another_class(optim.SGD, strict=False),
            ]
        },
    ),
    "state of another shape": Case(
        lambda: state_of_shape(5), {"load it into the model that was saved": lambda: state_of_shape(4)}
    ),
    "no dataloader in the files": Case(
        lambda: loaders("files", True), {"load without dataloader=": lambda: loaders("files", False)}
    ),
    "no dataloader of that name": Case(
        lambda: loaders("name", True), {"load without dataloader=": lambda: loaders("name", False)}
    ),
    "a dataloader of another number of ranks": Case(
        lambda: loaders("ranks", True),
        {"load without dataloader=, and start it anew": lambda: loaders("ranks", False)},
    ),
}
NOT_FOLLOWED = {
    "checkpoint/loading.py:_Loading.compare": "it reports an error of the library itself",
}

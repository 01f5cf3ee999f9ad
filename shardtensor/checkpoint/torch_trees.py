"""The nested dicts that programs give to ``torch.save`` and ``torch.distributed.checkpoint``: which part of one is a
model's state, which an optimizer's. The state of an optimizer is brought into the form of `optim_state_dict`, by name.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from shardtensor.errors import CheckpointError
from shardtensor.optim.fqn import plain_name

_MODELS = ("model", "model_state_dict", "state_dict", "module")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")

State = dict[str, Any]


@attrs.define
class ConvertedState:
    """What a checkpoint holds that is converted; a `StoredTensor` stands for each tensor.

    Attributes:
        models: the state of each model by section, ``model`` or ``model.<key>``. Tied tensors are one `StoredTensor`.
        optimizers: class, state and groups by section, as in a manifest.
        rest: all other values by name.
        left_out: what is not converted, in words.
        step: the number of the training step.
        fingerprint: that of models and optimizers by section, if it is known.
        config: the text of ``config.json``, or empty.
    """

    models: dict[str, State] = attrs.field(factory=dict)
    optimizers: dict[str, State] = attrs.field(factory=dict)
    rest: State = attrs.field(factory=dict)
    left_out: list[str] = attrs.field(factory=list)
    step: int | None = None
    fingerprint: dict[str, str] = attrs.field(factory=dict)
    config: str = ""


def sorted_out(tree: State, optimizer_class: str) -> ConvertedState:
    """Return the models, the optimizers and the other values of a nested dict.

    Raises:
        CheckpointError: the class of an optimizer is not known.
    """
    found = ConvertedState()
    inner = [value for value in tree.values() if isinstance(value, dict)]
    if len(inner) == 1 and not _is_named(tree, _MODELS) and _is_named(inner[0], _MODELS):
        tree = inner[0]  # the state of one object that has all others
    if not _is_named(tree, _MODELS + _OPTIMIZERS):
        found.models["model"] = _plain(tree)
        return found
    for key, value in tree.items():
        name, _, number = key.partition(".")
        suffix = f".{number}" if number else ""
        if name in _MODELS and isinstance(value, dict):
            found.models["model" + suffix] = _plain(value)
        elif name in _OPTIMIZERS and isinstance(value, dict):
            state = _by_name(value)
            if state is None:
                found.left_out.append(f"{key}: its state is by number, and nothing says which parameter has which")
            elif state["state"] or state["param_groups"]:
                known = optimizer_class or _class_of(state["param_groups"])
                found.optimizers["optimizer" + suffix] = {"class": known, **state}
        elif key == "step" and type(value) is int:
            found.step = value
        else:
            found.rest[key] = value
    return found


def to_tree(state: ConvertedState) -> State:
    """Return the nested dict that ``dcp.load`` reads with state dicts of ``get_state_dict``, flattened or not."""
    tree: State = dict(state.models)
    for section, saved in state.optimizers.items():
        groups = saved["param_groups"]
        nested = {"state": saved["state"], "param_groups": groups}
        numbered = {f"param_groups.{i}.{key}" for i, group in enumerate(groups) for key in group}
        flat = {
            key: value
            for group in groups
            for name in group["params"]
            for option, value in group.items()
            if option not in ("params", "param_names") and (key := f"param_groups.{name}.{option}") not in numbered
        }
        tree["optim" + section.removeprefix("optimizer")] = {**nested, **flat}
    step = {} if state.step is None else {"step": state.step}
    return {**state.rest, **step, **tree}


def _is_named(tree: State, names: tuple[str, ...]) -> bool:
    return any(key.partition(".")[0] in names and isinstance(value, dict) for key, value in tree.items())


def _plain(state: State) -> State:
    """Return a model's state under names without what wrappers add."""
    names = {key: plain_name(key) for key in state}
    if names and all(name.startswith("module.") for name in names.values()):  # of DistributedDataParallel
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    return {names[key]: value for key, value in state.items()}


def _by_name(saved: State) -> State | None:
    """Return ``state`` and ``param_groups`` by the names of parameters; None if they are by number alone."""
    if not {"state", "param_groups"} & set(saved):
        return _unflattened(saved)
    groups = [dict(group) for group in saved.get("param_groups", ())]
    state = dict(saved.get("state", {}))
    names: dict[str, str] = {}
    for group in groups:
        for key, name in zip(group["params"], group.pop("param_names", group["params"]), strict=True):
            names[str(key)] = name
    if not all(isinstance(name, str) for name in names.values()):
        return None
    for group in groups:
        group["params"] = [plain_name(names[str(key)]) for key in group["params"]]
    return {
        "state": {plain_name(names.get(str(key), str(key))): values for key, values in state.items()},
        "param_groups": groups,
    }


def _unflattened(saved: State) -> State:
    """Return the same of ``state.<name>.<key>`` and ``param_groups.<name>.<key>``, as torch flattens it."""
    state: dict[str, State] = {}
    options: dict[str, State] = {}
    for key, value in saved.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(plain_name(name), {})[last] = value
    groups: list[State] = []
    for name, own in options.items():
        group = next((each for each in groups if {**each, "params": 0} == {"params": 0, **own}), None)
        if group is None:
            groups.append(group := {"params": [], **own})
        group["params"].append(name)
    return {"state": state, "param_groups": groups}


def _class_of(groups: list[State]) -> str:
    """Return the name of the class of ``torch.optim`` that has exactly these options.

    Raises:
        CheckpointError: there is none.
    """
    options = dict(groups[0]) if groups else {}
    keys = set(options) - {"params", "param_names", "initial_lr"}
    for name in torch.optim.__all__:
        kind: Any = getattr(torch.optim, name)
        if not isinstance(kind, type) or kind is torch.optim.Optimizer:
            continue
        if set(kind([torch.zeros((1, 1), requires_grad=True)]).defaults) == keys:
            return "AdamW" if name == "Adam" and options["decoupled_weight_decay"] else name
    raise CheckpointError(
        "the class of the optimizer is not known from its options",
        {"options": ", ".join(sorted(keys)) or "none"},
        "name it: --optimizer AdamW",
    )

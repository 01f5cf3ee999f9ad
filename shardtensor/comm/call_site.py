"""The line of the user's code that called a collective, for messages and reports."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_CALLS = {("torch.nn.modules.module", "_call_impl"), ("shardtensor.fsdp.module", "__call__")}
OWN = ("shardtensor.", "torch.", "contextlib.", "threading.")


def call_site(frame: FrameType | None = None) -> str:
    """Return the innermost line outside of this library and torch, and the module whose forward it is part of, such
    as ``train.py:12 in step, at layers.3.down``. Outside of any module's forward: ``train.py:12 in step``."""
    frame = sys._getframe(1) if frame is None else frame
    modules = module_path(frame)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(OWN):
        frame = frame.f_back
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{where}, at {modules}" if modules else where


def user_call(frame: FrameType) -> str:
    """Return the name of the function of this library that the user's code called, such as ``full_tensor``, or of the
    dispatched torch function; empty if no frame of the user's is on the stack."""
    name = ""
    while f"{frame.f_globals.get('__name__')}.".startswith(OWN):
        if frame.f_code.co_name == "__torch_function__":
            name = getattr(frame.f_locals["func"], "__name__", name)
        elif frame.f_globals["__name__"].startswith(OWN[0]):
            name = frame.f_code.co_name
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return name if name.startswith("__") else name.strip("_")


def module_path(frame: FrameType | None) -> str:
    """Return the dotted name of the innermost `nn.Module` whose forward runs, within the outermost one; its class's
    name if it is the outermost; empty if there is none. Takes microseconds for each frame: not for hot paths."""

    calls = []
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _CALLS:
            calls.append(frame.f_locals["self"])
        frame = frame.f_back
    if not calls:
        return ""
    names = (name for name, module in calls[-1].named_modules() if module is calls[0])
    return next(names, "") or type(calls[0]).__name__

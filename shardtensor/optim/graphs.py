"""`graphed_step`: a whole training step captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardtensor.errors import CaptureError
from shardtensor.optim.cuda_graph import CudaRecorder, Recorder, release_before_groups
from shardtensor.optim.graphed_optimizers import GraphedOptimizers
from shardtensor.optim.static_inputs import StaticInputs, on_device


def graphed_step(
    step: Callable[..., Any],
    *,
    warmup: int = 3,
    clone_outputs: bool = True,
    device: torch.device | str | None = None,
) -> GraphedStep:
    """Return a callable that runs `step` by replaying one CUDA graph, with one launch on the host for each call.

    Each call is one step on its inputs. The first `warmup` calls run `step` itself, the next one captures it. Later
    calls copy their inputs into the graph's buffers and replay it. A replay reads the current learning rates, so
    schedulers work; on the device they are float32, as torch has them for a learning rate that is a tensor. Results
    are bit for bit those of `step` with the same optimizer and such a learning rate.

    After another hyperparameter was changed, a state dict was loaded, or parameters were moved, resharded or added, the
    next call runs `step` itself and the one after it captures again. Changes before each call prevent all replays.

    Without a CUDA device all calls run `step` itself.

    Args:
        step: runs forward, loss, backward, clipping, ``optimizer.step()`` and ``optimizer.zero_grad()``, in an order in
            which no gradient is used by a later call. It must not read tensors on the host, and its Python code runs
            only in the capture. All values that change between calls must be in its arguments: tensors, in nested
            lists, tuples and dicts, with the same shapes, dtypes and layouts each time. Step schedulers outside of it.
        warmup: calls before the capture, at least one: optimizers make their state, NCCL connects.
        clone_outputs: return new tensors from each call. False returns the graph's, which the next call overwrites.
        device: of the step; the current CUDA device if there is one.

    Returns:
        `GraphedStep`. Its calls return the results of `step`, detached. They copy CPU tensors to the device; do not
        write into pinned ones before that copy is done.

    Raises:
        CaptureError: (a RuntimeError) by a call: a graph cannot contain the optimizer (the message names the flag to
            set), the step waits for the device, or the inputs differ from those of the capture.

    All ranks make the calls together, as for `step`. Optimizers are found when they step; each must read its numbers
    on the device: ``fused=True`` (Adam, AdamW, SGD, Adagrad) or ``capturable=True``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        >>> def step(x, y):
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> with graphed_step(step, device="cpu") as train:
        ...     losses = [train(torch.ones(4, 2), torch.zeros(4, 1)).item() for _ in range(20)]
        >>> losses[-1] < losses[0]
        True

    References:
        "Whole-network capture" in the notes on CUDA semantics of PyTorch's documentation.
    """
    return GraphedStep(step, warmup, clone_outputs, device)


class GraphedStep:
    """A step that is replayed, made by `graphed_step`. As a context manager it closes itself.

    A graph with collectives must be released before its process groups are destroyed: destroying a group, and the end
    of the process, release it first. `close` releases it at once.
    """

    def __init__(
        self, step: Callable[..., Any], warmup: int, clone_outputs: bool, device: torch.device | str | None
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup is {warmup}: optimizers make their state in a first call that is not captured")
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._step, self._clones, self._device = step, clone_outputs, torch.device(device)
        self._recorder = _recorder_on(self._device)
        self._optimizers = GraphedOptimizers(self._device)
        self._left = warmup
        self._inputs: StaticInputs | None = None
        self._outputs: list[Any] = []
        self._structure: Any = None
        self._is_closed = False

    @property
    def is_captured(self) -> bool:
        """Whether the next call with the same inputs and hyperparameters is a replay."""
        return self._inputs is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_closed:
            raise CaptureError("this graphed step was closed", fix="make another graphed_step of the same step")
        recorder = self._recorder
        if recorder is None:
            return _detached(self._step(*args, **kwargs))
        if self._inputs is not None and self._optimizers.has_changed():
            self.release()
        if self._inputs is not None:
            self._inputs.fill(args, kwargs)
        elif self._left:
            return self._warm_up(recorder, args, kwargs)
        else:
            self._inputs = self._capture(recorder, args, kwargs)
        self._optimizers.refresh()
        recorder.replay()
        outputs = self._outputs
        if self._clones:
            outputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in outputs]
        return tree_unflatten(outputs, self._structure) if self._structure is not None else outputs[0]

    def _warm_up(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = on_device(args, kwargs, self._device)
        self._optimizers.refresh()
        with self._optimizers.with_device_rates():
            result = recorder.run(lambda: self._step(*args, **kwargs))
        self._left -= 1
        return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, _detached(result))

    def _capture(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StaticInputs:
        inputs = StaticInputs(args, kwargs, self._device)
        args, kwargs = inputs.arguments()
        self._optimizers.refresh()
        release_before_groups(self)
        try:
            with self._optimizers.captured():
                result = recorder.capture(lambda: self._step(*args, **kwargs))
        except CaptureError:
            recorder.reset()
            raise
        except RuntimeError as error:
            recorder.reset()
            raise CaptureError(
                "the step could not be captured in a CUDA graph; nothing of it ran",
                {"said": (str(error).strip().splitlines() or [type(error).__name__])[0]},
                [
                    "leave out what reads a tensor on the host: item(), tolist(), cpu(), print, `if tensor:`",
                    "leave out what copies from the host: torch.tensor(..., device=...); pass it as an argument",
                ],
            ) from error
        result = _detached(result)
        if isinstance(result, torch.Tensor):
            self._outputs, self._structure = [result], None
        else:
            self._outputs, self._structure = tree_flatten(result)
        return inputs

    def release(self) -> None:
        """Free the graph and its memory. The next call runs the step itself, the one after it captures again."""
        if self._inputs is None or self._recorder is None:
            return
        self._recorder.reset()
        self._inputs, self._outputs, self._structure, self._left = None, [], None, 1

    def close(self) -> None:
        """Free the graph and its memory, and refuse further calls. Parameters and optimizers can still be used."""
        self.release()
        self._optimizers.close()
        self._is_closed = True

    def __enter__(self) -> GraphedStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _recorder_on(device: torch.device) -> Recorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


def _detached(result: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)

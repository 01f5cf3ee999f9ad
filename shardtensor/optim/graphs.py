"""`graphed_step`: a whole training step captured in one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardtensor.comm.process_group import release_before_groups
from shardtensor.errors import CaptureError
from shardtensor.optim.graphed_optimizers import GraphedOptimizers
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


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
    schedulers work. On the device they are float32 tensors. Results are bit for bit those of `step` with the same
    optimizer and with such a tensor as its learning rate.

    After another hyperparameter was changed, a state dict was loaded, or parameters were moved, resharded or added, the
    next call runs `step` itself and the one after it captures again. Changes before each call prevent all replays.

    Without a CUDA device all calls run `step` itself.

    Args:
        step: runs forward, loss, backward, clipping, ``optimizer.step()`` and ``optimizer.zero_grad()``, in an order in
            which no gradient is used by a later call. It must not read tensors on the host, and its Python code runs
            only in the capture. All values that change between calls must be in its arguments: tensors, in nested
            lists, tuples and dicts, with the same shapes, dtypes and layouts each time. Step schedulers outside of it.
        warmup: calls before the capture, at least one: in these optimizers create their state and NCCL connects.
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
    """A step that is replayed, made by `graphed_step`. At the end of a ``with`` block it is closed.

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
        return tree_unflatten(outputs, self._structure)

    def _warm_up(self, recorder: CudaRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = StaticInputs(args, kwargs, self._device).arguments()
        self._optimizers.refresh()
        with self._optimizers.with_device_rates():
            result = recorder.run(lambda: self._step(*args, **kwargs))
        self._left -= 1
        return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, _detached(result))

    def _capture(self, recorder: CudaRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StaticInputs:
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
        self._outputs, self._structure = tree_flatten(_detached(result))
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

    def __exit__(self, *error: object) -> None:
        self.close()


def _recorder_on(device: torch.device) -> CudaRecorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


def _detached(result: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)


class StaticInputs:
    """Copies of the arguments of one call.

    Args:
        args, kwargs: tensors in nested lists, tuples and dicts, and other values.
        device: of the copies of CPU tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> None:
        leaves, self._structure = _flatten(args, kwargs)
        self._buffers, self._kinds = [_buffer(x, device) for x in leaves], [_kind(x) for x in leaves]
        self._memory = [local_of(x).detach() if isinstance(x, torch.Tensor) else None for x in self._buffers]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the buffers in the structure of the arguments."""
        return _unflatten(self._buffers, self._structure)

    def fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the arguments of another call into the buffers.

        Raises:
            CaptureError: the structure, a shape, a dtype, a layout or a value that is not a tensor has changed.
        """
        leaves, structure = _flatten(args, kwargs)
        if structure != self._structure:
            raise _unlike("arguments", self._structure, structure)
        for i, (kind, x) in enumerate(zip(self._kinds, leaves, strict=True)):
            if kind != _kind(x):
                raise _unlike(f"input {i}", _describe(self._buffers[i]), _describe(x))
        for memory, x in zip(self._memory, leaves, strict=True):
            if memory is not None:
                x = local_of(x)
                memory.copy_(x.detach() if x.requires_grad else x, non_blocking=True)


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
        return args, len(args)  # the usual call, at a tenth of the cost
    return tree_flatten((args, dict(kwargs)))


def _unflatten(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tuple(leaves), {}) if isinstance(structure, int) else tree_unflatten(leaves, structure)


def _buffer(x: Any, device: torch.device) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    is_elsewhere = x.is_cpu and device.type != "cpu" and not isinstance(x, ShardedTensor)
    copy = x.detach().to(device) if is_elsewhere else x.detach().clone()
    return copy.requires_grad_(x.requires_grad)


def _kind(x: Any) -> tuple[Any, ...]:
    """Return what must be equal in every call and the capture: all of a tensor but its values; other values."""
    if not isinstance(x, torch.Tensor):
        return type(x), x
    layout = (x._layout, x._group) if isinstance(x, ShardedTensor) else None
    return x.shape, x.dtype, x.requires_grad, layout


def _describe(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    layout = f" {x.sharding_spec()}" if isinstance(x, ShardedTensor) else ""
    grad = " requires_grad" if x.requires_grad else ""
    return f"{' x '.join(map(str, x.shape)) or 'number'} {x.dtype}{layout}{grad}"


def _unlike(what: str, captured: Any, found: Any) -> CaptureError:
    if not isinstance(captured, str):
        captured, found = (f"{x} tensors" if isinstance(x, int) else x for x in (captured, found))
    return CaptureError(
        f"{what} of a graphed step: not as in the capture; nothing has run",
        {"captured": captured, "found": found},
        [
            "call the step itself, without a graph, for a batch of another shape",
            "make another graphed_step of it; what changes from call to call has to be in tensors",
        ],
    )


class CudaRecorder:
    """Captures a function in a graph, on a stream of its own that is ordered with the caller's current stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph: Any = None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run it on the capture stream: autograd uses the stream on which a gradient was first made."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Any]) -> Any:
        """Capture `function`; return its result, whose tensors `replay` overwrites."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.clear_autocast_cache()  # else a replay would not repeat the casts of weights that are cached
        gc.collect()  # so that the collector frees no CUDA object during the capture, where that is an error
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            # "thread_local": the threads of NCCL and of data loaders may call CUDA meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # it raises because the capture is invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.clear_autocast_cache()
        self._graph = graph
        return result

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        """Free the captured graph."""
        graph, self._graph = self._graph, None
        if graph is not None:
            torch.cuda.synchronize(self._device)
            graph.reset()

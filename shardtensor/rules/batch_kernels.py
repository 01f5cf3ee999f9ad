"""Elementwise operations and the kernels that autograd calls, on a part of the batch."""

from __future__ import annotations

from shardtensor.rules.batch import (
    PARTIAL,
    REPLICATED,
    SHARDED,
    BatchCall,
    BatchValue,
    Exponents,
    ReduceFirst,
    Refused,
    SplitFirst,
)
from shardtensor.rules.batch_exponents import LINEAR, adds_number, exponents_of, is_linear_in_first

TABLE = """
# names | which dim may have the samples: any, the first, all but those that the call names, all before the last ones

_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data | named
cumsum cumprod logcumsumexp cummax cummin sort topk kthvalue mode       | named
flip roll glu glu_backward median argmax argmin prod var std var_mean   | named
logsumexp unfold diagonal                                               | named
_weight_norm_interface _weight_norm_interface_backward                  | named
unfold_backward diagonal_backward                                       | result
native_layer_norm native_layer_norm_backward                            | normalized
_fused_rms_norm _fused_rms_norm_backward                                | normalized
native_group_norm native_group_norm_backward                            | first
convolution convolution_backward                                        | first
max_pool2d_with_indices max_pool2d_with_indices_backward                | first
max_pool3d_with_indices max_pool3d_with_indices_backward                | first
avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d                    | first
avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward  | first
_adaptive_avg_pool3d _adaptive_avg_pool3d_backward                      | first
adaptive_max_pool2d adaptive_max_pool2d_backward                        | first
adaptive_max_pool3d adaptive_max_pool3d_backward                        | first
reflection_pad1d reflection_pad1d_backward reflection_pad2d             | first
reflection_pad2d_backward replication_pad2d replication_pad2d_backward  | first
upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d      | first
upsample_bilinear2d_backward upsample_bicubic2d                         | first
upsample_bicubic2d_backward _upsample_bicubic2d_aa                      | first
_upsample_bilinear2d_aa pixel_shuffle pixel_unshuffle im2col col2im     | first
_scaled_dot_product_flash_attention                                     | first
_scaled_dot_product_flash_attention_backward                            | first
_scaled_dot_product_flash_attention_for_cpu                             | first
_scaled_dot_product_flash_attention_for_cpu_backward                    | first
_scaled_dot_product_efficient_attention                                 | first
_scaled_dot_product_efficient_attention_backward                        | first
_scaled_dot_product_cudnn_attention                                     | first
_scaled_dot_product_cudnn_attention_backward                            | first
_scaled_dot_product_fused_attention_overrideable                        | first
_scaled_dot_product_fused_attention_overrideable_backward               | first
_scaled_dot_product_attention_math                                      | first
nll_loss_forward nll_loss_backward nll_loss2d_forward                   | first
nll_loss2d_backward                                                     | first
constant_pad_nd tril triu                                               | last
native_dropout native_dropout_backward elu_backward hardtanh_backward   | any
leaky_relu_backward softplus_backward mish_backward gelu_backward       | any
silu_backward hardswish_backward hardsigmoid_backward                   | any
log_sigmoid_forward log_sigmoid_backward softshrink_backward            | any
hardshrink_backward rrelu_with_noise_backward                           | any
mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward       | any
huber_loss huber_loss_backward binary_cross_entropy                     | any
binary_cross_entropy_backward                                           | any
"""


def _read(table: str) -> dict[str, str]:
    found = {}
    for line in table.strip().splitlines():
        names, _, where = line.partition("|")
        if not line.startswith("#"):
            found.update(dict.fromkeys(names.split(), where.strip()))
    return found


KERNELS = _read(TABLE)
"""Kernels that compute each sample alone, with the dims that may have the samples."""

FILLS = frozenset("full zeros ones empty scalar_tensor empty_strided new_full new_zeros new_ones new_empty".split())
LIKES = frozenset("zeros_like ones_like full_like empty_like new_empty_strided fill zero".split())
DRAWS = frozenset("bernoulli rand randn randint normal rand_like randn_like uniform randperm exponential".split())

_LAST_OF_SAMPLES = {"convolution": 0, "convolution_backward": 1}
"""The last operand that may have samples."""

_LOSSES = frozenset(name for name in KERNELS if "loss" in name or name.startswith("binary_cross_entropy"))


def pointwise(call: BatchCall) -> BatchValue:
    """Return what an elementwise operation returns."""
    partial = call.of_kind(PARTIAL)
    if partial:
        _keep_partial(call, partial)
        share, degree = exponents_of(call)
        return BatchValue(PARTIAL, share=share, degree=degree)
    share, degree = exponents_of(call)
    is_zero = call.name == "mul" and any(v.is_zero for v in call.values)
    if not call.of_kind(SHARDED):
        return BatchValue(share=share, degree=degree, is_zero=is_zero)
    dim, outer, is_uniform = call.aligned(len(call.results[0].shape))
    return BatchValue(SHARDED, dim, outer, share, degree, is_zero=is_zero, is_uniform=is_uniform)


def _keep_partial(call: BatchCall, partial: list[int]) -> None:
    """Raise unless the local values of the operands give a partial result."""
    name, values = call.name, call.values
    first = partial[0]
    if name in ("add", "sub", "rsub", "where"):
        addends = [i for i in range(len(values)) if i or name != "where"]
        condition_is_equal = name != "where" or values[0].kind == REPLICATED
        if condition_is_equal and not adds_number(call):
            return split_replicated(call, addends)
    elif name in LINEAR:
        is_linear = name != "div" or (first == 0 and not call.options.get("rounding_mode"))
        if is_linear and len(partial) == 1 and not call.of_kind(SHARDED):
            return None
    elif is_linear_in_first(call) and partial == [0] and not call.of_kind(SHARDED):
        return None
    raise ReduceFirst(call.numbers[first])


def split_replicated(call: BatchCall, addends: list[int]) -> None:
    """Let partial values be added to replicated ones, which are split into partial ones.

    Raises:
        ReduceFirst: one is sharded or has no fractions.
        SplitFirst: one is replicated, and not zero.
    """
    partial = [i for i in addends if call.values[i].kind == PARTIAL]
    for i in addends:
        value = call.values[i]
        if value.kind == SHARDED or not (call.results[0].is_float or value.kind == PARTIAL or value.is_zero):
            raise ReduceFirst(call.numbers[partial[0]])
    exponents_of(call)  # gradients are weighed before they are split
    for i in addends:
        if call.values[i].kind == REPLICATED and not call.values[i].is_zero:
            call.unscaled(i)
            raise SplitFirst(call.numbers[i], call.values[partial[0]].share)


def unsummed(call: BatchCall) -> Exponents:
    """Return the exponents of an operation in whose result partial operands have no place."""
    for i in range(len(call.values)):
        call.reduced(i)
    return exponents_of(call)


def kernel(call: BatchCall) -> list[BatchValue]:
    """Return the results of a kernel of the table: those that grow with the batch are sharded, others are sums."""
    name, where = call.name, KERNELS[call.name]
    partial = call.of_kind(PARTIAL)
    if partial:
        if partial != [0] or call.of_kind(SHARDED) or not is_linear_in_first(call):
            raise ReduceFirst(call.numbers[partial[0]])
        share, degree = exponents_of(call)
        return [BatchValue(PARTIAL, share=share, degree=degree) for _ in call.results]
    share, degree = exponents_of(call)
    sharded = call.of_kind(SHARDED)
    outer = _placed(call, where, sharded)
    averages = name in _LOSSES and call.options.get("reduction", 1) == 1
    found = []
    for i, result in enumerate(call.results):
        dim = call.batch_dim(i)
        if dim is not None:
            if where == "result" and dim in _named(call, len(result.shape)):
                raise Refused(f"dim {dim} has the samples, and the operation needs the whole dim")
            found.append(BatchValue(SHARDED, dim, outer, share, degree))
        elif where in ("named", "result"):
            raise Refused("it compares the samples with one another")
        elif averages and not name.endswith("_backward"):
            found.append(BatchValue(PARTIAL, share=share + 1, degree=degree))
        elif _is_counter(name, result.shape):
            found.append(BatchValue())
        else:
            found.append(BatchValue(PARTIAL, share=share, degree=None if degree is None else degree + 1))
    if averages and name.endswith("_backward"):  # each rank divides by its own number of samples
        found = [BatchValue(SHARDED, v.dim, v.outer, v.share + 1, 0) for v in found]
    return found


def _placed(call: BatchCall, where: str, sharded: list[int]) -> int:
    """Return the blocks of the samples, or raise Refused if they are in a dim that must be whole."""
    first = call.tensors[0].shape
    if where == "any":
        return call.aligned(max(len(x.shape) for x in call.tensors))[1]
    for i in sharded:
        dim, ndim = call.values[i].dim, len(call.tensors[i].shape)
        if where == "first":
            ok = dim == 0 and i <= _LAST_OF_SAMPLES.get(call.name, i)
        elif where == "named":
            ok = dim not in _named(call, len(first))
        elif where == "normalized":
            ok = dim < len(first) - len(call.options["normalized_shape"])
        else:
            ok = where != "last" or dim < ndim - (len(call.options["pad"]) // 2 if "pad" in call.options else 2)
        if not ok:
            raise Refused(f"dim {dim} has the samples, and the operation needs the whole dim")
    return call.place()[1]


def _named(call: BatchCall, ndim: int) -> set[int]:
    """Return the dims that the call names, of a tensor of so many dims."""
    keys = [key for key in ("dim", "dims", "dimension", "dim1", "dim2") if key in call.options]
    found: set[int] = set()
    for key in keys:
        given = call.options[key]
        if given is None or given == []:
            found |= set(range(ndim))
        else:
            found |= {d % max(ndim, 1) for d in ([given] if isinstance(given, int) else given)}
    return found if keys else set(range(ndim))


def _is_counter(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a result of an attention kernel is its random state, or is empty."""
    return "attention" in name and (len(shape) == 0 or (len(shape) == 1 and shape[0] <= 2))

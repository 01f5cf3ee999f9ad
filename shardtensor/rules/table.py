"""The sharding rule of each operation: one row for each.

The columns, separated by ``|``:

1. the names; each means all of torch's spellings (``torch.add``, ``Tensor.add``, ``+``);
2. the rule, as in `shardtensor.rules.pattern`; or ``@views.reshaped``, a function of this folder that returns the
   layout; or ``gathers``, if the operation needs the full tensor, with the reason in the next column;
3. how to reduce the ranks' results along a letter that is sharded: a reduction, or ``@name``, a function of
   `shardtensor.ops`;
4. the arguments of the call, if they are not only the operands.

To add a row: write it here; if it needs a function, register that with `shardtensor.ops.by_rule.combines`; and add a
call to `tests/rules/makers.py` to test it. `shardtensor ops` prints the table.
"""

from __future__ import annotations

import attrs

from shardtensor.layout.layout import Shape
from shardtensor.rules.call import Signature, parse_call
from shardtensor.rules.pattern import Pattern, parse_pattern
from shardtensor.rules.rule import Rule

TABLE = """
# elementwise: operands may be numbers; `name_`, `out=` and operators too

abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil conj
  conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expit expm1 fix floor frac i0 i0e i1 i1e invert
  isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 log_ndtr logical_not logit mvlgamma
  multigammaln nan_to_num ndtr ndtri neg negative polygamma pos positive psi rad2deg reciprocal resolve_conj
  resolve_neg round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc bessel_j0 bessel_j1 entr
  erfcx gammaln celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu
  silu softplus softshrink softsign tanhshrink threshold                               | ... -> ...
add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div divide eq
  float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot igamma igammac isclose lcm
  ldexp le less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne
  nextafter not_equal pow remainder rsub sub subtract true_divide xlog1py xlogy zeta truediv floordiv mod and or xor
  complex polar lshift rshift radd rdiv rtruediv rfloordiv rmod rmul rpow Tensor.__rand__ ror rxor rlshift rrshift
                                                                                       | ..., ... -> ...
addcdiv addcmul clamp clamp_max clamp_min clip lerp masked_fill where                  | ..., ..., ... -> ...

# along the dims that the call selects

softmax log_softmax softmin                | ... [d] -> ... [d]
                                           | d @exponentials | input, dim=, _stacklevel=3, dtype=
cumsum cumprod logcumsumexp cummax cummin  | ... [!d] -> ... [d]  |         | input, dim=
sort argsort                               | ... [!d] -> ... [d]  |         | input, dim=-1
topk                                       | ... [!d] -> ... [d'] |         | input, k=, dim=-1
kthvalue                                   | ... [!d] -> ...      |         | input, k=, dim=-1, keepdim=False
median nanmedian nanmean                   | ... [!d] -> ...      |         | input, dim=None, keepdim=False
mode                                       | ... [!d] -> ...      |         | input, dim=-1, keepdim=False
roll                                       | ... [!d] -> ... [d]  |         | input, shifts=, dims=None
flip                                       | ... [!d] -> ... [d]  |         | input, *dims
glu                                        | ... [!d] -> ... [d'] |         | input, dim=-1
msort                                      | !d ... -> d ...
tril triu                                  | ... !r !c -> ... r c |         | input, diagonal=0

# reductions over the dims that the call selects, or all

sum nansum                          | ... [d] -> ... | d @total        | input, dim=None, keepdim=False
mean                                | ... [d] -> ... | d @mean         | input, dim=None, keepdim=False
prod                                | ... [!d] -> ... |                 | input, dim=None, keepdim=False
any all                             | ... [d] -> ... | d @truth        | input, dim=None, keepdim=False
amax amin                           | ... [d] -> ... | d @extreme      | input, dim=None, keepdim=False
count_nonzero                       | ... [d] -> ... | d sum           | input, dim=None
var std var_mean std_mean           | ... [d] -> ... | d @two_passes   | input, dim=None, correction=, keepdim=False
max min argmax argmin               | ... [d] -> ... | d @first_of_all | input, dim=None, keepdim=False
logsumexp                           | ... [d] -> ... | d @exponents    | input, dim=, keepdim=False
linalg.vector_norm linalg.norm norm | ... [d] -> ... | d @norms        | input, ord=, dim=None, keepdim=False

# indexing by tensors, concatenation

gather                                     | i... [d], i... [at] -> i... [at]  | d @read | input, dim=, index
index_select                               | i... [d], at -> i... [at]         | d @read | input, dim=, index
scatter scatter_add scatter_reduce         | i... [d], i... [!at], i... [!at] -> i... [d]
                                           | d @write | input, dim=, index, src
index_add index_copy index_reduce          | i... [d], !at, i... [!at] -> i... [d]
                                           | d @write | input, dim=, index, source
index_fill                                 | i... [d], !at, () -> i... [d]     | d @write | input, dim=, index, value
index_put                                  | @indexing.writing
cat concat concatenate                     | *(i... [!d]) -> i... [d']         |       | tensors, dim=0
stack                                      | *(i...) -> i... [n']              |       | tensors, dim=0

# products

matmul linalg.matmul | ... m? k, ... k n? -> ... m? n?         | k sum
mm                   | m k, k n -> m n                         | k sum        | input, mat2
bmm                  | b m k, b k n -> b m n                   | k sum        | input, mat2
mv                   | m k, k -> m                             | k sum        | input, vec
dot                  | k, k -> ()                              | k sum        | input, tensor
outer ger            | m, n -> m n                             |              | input, vec2
linear               | ... k, n k, + n -> ... n                | k sum        | input, weight, bias
addmm                | + m?/1 n?/1, m k, k n -> m n            | k sum        | input, mat1, mat2, beta=1, alpha=1
baddbmm              | + b?/1 m?/1 n?/1, b m k, b k n -> b m n | k sum        | input, batch1, batch2, beta=1, alpha=1
addbmm               | + m?/1 n?/1, b m k, b k n -> m n        | b sum, k sum | input, batch1, batch2, beta=1, alpha=1
addmv                | + m?/1, m k, k -> m                     | k sum        | input, mat, vec, beta=1, alpha=1
addr                 | + m?/1 n?/1, m, n -> m n                |              | input, vec1, vec2, beta=1, alpha=1
bilinear             | ... i, ... j, o i j, + o -> ... o       | i sum, j sum | input1, input2, weight, bias
cdist                | ... n !k, ... m !k -> ... n m           |              | x1, x2
linalg.cross         | ... [!d], ... [!d] -> ... [d]           |              | input, other, dim=-1
cosine_similarity    | ... [!d], ... [!d] -> ...               |              | x1, x2, dim=1
bucketize            | ..., !b -> ...                          |              | input, boundaries
searchsorted         | !b, ... -> ...                          |              | sorted_sequence, input
isin                 | ..., !t -> ...                          |              | elements, test_elements
einsum               | @rule.einsum_rule

# norms: local over unsharded dims, two passes over sharded ones

layer_norm | ... [n], n..., n... -> ... [n] | n @moments     | input, normalized_shape=, weight, bias, eps=
rms_norm   | ... [n], n... -> ... [n]       | n @mean_square | input, normalized_shape=, weight, eps=
group_norm | n !c !s..., c, c -> n c s...   |                | input, num_groups=, weight, bias, eps=

# layers

F.batch_norm                 | n c s..., c, c, c, c -> n c s...
                             | n @statistics, s @statistics | input, running_mean, running_var, weight, bias
F.instance_norm              | n c !s..., c, c -> n c s...
                             | | input, running_mean=, running_var=, weight, bias
prelu                        | n c s..., c/1 -> n c s... |             | input, weight
F.one_hot                    | ... -> ... c'             |             | input, num_classes=
F.embedding                  | i..., v d -> i... d       | v @own_rows | input, weight, padding_idx=
scaled_dot_product_attention | ... !l !e, ... !s !e, ... !s !f, ... l/1 s/1 -> ... l f
                             | | query, key, value, attn_mask
grouped_query_attention      | ... !h !l !e, ... !g !s !e, ... !g !s !f, ... h/1 l/1 s/1 -> ... h l f
                             | | query, key, value, attn_mask

# convolutions, pooling and padding: batches and channels may be sharded, spatial dims not

conv1d                                     | n? i !h, o i !k, + o -> n? o h'               | i sum | input, weight, bias
conv2d                                     | n? i !h !w, o i !k !l, + o -> n? o h' w'      | i sum | input, weight, bias
conv3d                                     | n? i !h !w !d, o i !k !l !m, + o -> n? o h' w' d'
                                           | i sum | input, weight, bias
conv_transpose1d                           | n? i !h, i o !k, + o -> n? o h'               | i sum | input, weight, bias
conv_transpose2d                           | n? i !h !w, i o !k !l, + o -> n? o h' w'      | i sum | input, weight, bias
conv_transpose3d                           | n? i !h !w !d, i o !k !l !m, + o -> n? o h' w' d'
                                           | i sum | input, weight, bias
grouped_conv1d grouped_conv_transpose1d    | n? !i !h, !o !g !k, !b -> n? o' h'          |       | input, weight, bias
grouped_conv2d grouped_conv_transpose2d    | n? !i !h !w, !o !g !k !l, !b -> n? o' h' w' |       | input, weight, bias
grouped_conv3d grouped_conv_transpose3d    | n? !i !h !w !d, !o !g !k !l !m, !b -> n? o' h' w' d'
                                           | | input, weight, bias
max_pool1d max_pool1d_with_indices
  avg_pool1d lp_pool1d adaptive_avg_pool1d
  adaptive_max_pool1d
  adaptive_max_pool1d_with_indices         | n? c !h -> n? c h'                          |       | input, size=
max_pool2d max_pool2d_with_indices
  avg_pool2d lp_pool2d adaptive_avg_pool2d
  adaptive_max_pool2d
  adaptive_max_pool2d_with_indices         | n? c !h !w -> n? c h' w'                    |       | input, size=
max_pool3d max_pool3d_with_indices
  avg_pool3d lp_pool3d adaptive_avg_pool3d
  adaptive_max_pool3d
  adaptive_max_pool3d_with_indices         | n? c !h !w !d -> n? c h' w' d'              |       | input, size=
interpolate                                | n c !s... -> n c s'...                      |       | input, size=
pixel_shuffle pixel_unshuffle              | n... !c !h !w -> n... c' h' w'              |       | input, factor=
channel_shuffle local_response_norm        | n !c !s... -> n c s...                      |       | input, number=
grid_sample                                | n c !s..., n !t... !x -> n c t'...          |       | input, grid
F.unfold                                   | n? !c !h !w -> n? c' h'                     |       | input, kernel_size=
F.fold                                     | n? !c !h -> n? c' h' w'                     |       | input, output_size=
padded                                     | ... [!d] -> ... [d']                        |       | input, dim=

# losses: before `reduction`

cross_entropy nll_loss                     | n? c s..., n? s..., c -> n? s...
                                           | c @classes | input, target, weight
mse_loss l1_loss smooth_l1_loss huber_loss | ..., ..., ... -> ...          |  | input, target, weight
binary_cross_entropy F.kl_div
  soft_margin_loss                         | ..., ..., ... -> ...          |  | input, target, weight
F.binary_cross_entropy_with_logits         | ..., ..., ..., ... -> ...     |  | input, target, weight, pos_weight
F.poisson_nll_loss F.hinge_embedding_loss  | ..., ... -> ...               |  | input, target

# linear algebra: batches may be sharded, matrices not

linalg.inv inverse linalg.pinv pinverse
  linalg.cholesky linalg.matrix_exp
  matrix_exp linalg.matrix_power
  matrix_power linalg.qr                   | ... !m !k -> ... m' k'          |  | input, number=
linalg.det det logdet slogdet
  linalg.slogdet                           | ... !m !k -> ...                |  | input
linalg.svdvals linalg.eigvalsh             | ... !m !k -> ... k'             |  | input
linalg.solve                               | ... !m !k, ... !k !n -> ... m n |  | input, other

# views: without communication, or the view is a copy

view reshape flatten unflatten ravel
  squeeze unsqueeze view_as reshape_as     | @views.reshaped
transpose swapaxes swapdims movedim
  moveaxis permute t adjoint T mT H mH     | @views.permuted
expand broadcast_to expand_as              | @views.expanded
repeat                                     | @views.repeated
tensor_split hsplit vsplit dsplit          | @indexing.indexing
Tensor.__getitem__ narrow select split
  split_with_sizes chunk unbind            | @indexing.indexing

# copies, `*_like` and random numbers: in the operand's layout

clone detach Tensor.contiguous real imag   | ... -> ...
zeros_like ones_like empty_like full_like
  rand_like randn_like randint_like        | ... -> ...
Tensor.fill_ Tensor.zero_ Tensor.uniform_
  Tensor.normal_ Tensor.exponential_
  Tensor.bernoulli_ dropout                | ... -> ...
Tensor.copy_                               | ..., ... -> ...
equal allclose                             | ..., ... -> ()  | ... min

# operations that need the full tensor

view_as_real view_as_complex           | gathers | a view over shard boundaries
linalg.svd svd linalg.eigh             | gathers | a factorization needs the full matrix
"""


@attrs.frozen(eq=False)
class Row:
    """One line of the table.

    Attributes:
        names: as written; ``F.embedding`` means this one only, ``add`` all of torch's spellings.
        section: the heading above it.
        pattern: None if a function returns the layout, or the operation gathers.
        function: the name of that function, ``views.reshaped``, or empty.
        reason: why the operation gathers, or empty.
    """

    names: tuple[str, ...]
    section: str
    pattern: Pattern | None
    call: Signature
    function: str = ""
    reason: str = ""

    def rule(self, shapes: tuple[Shape | None, ...], dims: tuple[int, ...] = (), keepdim: bool = False) -> Rule | None:
        """Return the rule for operands of these shapes; None if they do not fit. Cached; see `Pattern.bind`."""
        return None if self.pattern is None else self.pattern.bind(shapes, dims, keepdim)

    @property
    def takes_empty(self) -> bool:
        """Whether torch runs the operation on empty operands as on others."""
        is_elementwise = self.pattern is not None and self.pattern.is_elementwise
        return is_elementwise or self.section.startswith("linear algebra")


def row_of(names: str, rule: str, combine: str = "", call: str = "", section: str = "") -> Row:
    """Parse one row.

    Raises:
        SpecError: with a caret: the rule, the combine or the call is wrong.
    """
    split = tuple(names.split())
    if rule.startswith("@"):
        return Row(split, section, None, parse_call("input"), function=rule[1:])
    if rule == "gathers":
        return Row(split, section, None, parse_call("input"), reason=combine)
    pattern = parse_pattern(rule, combine)
    return Row(split, section, pattern, parse_call(call or _usual_call(pattern)))


def _usual_call(pattern: Pattern) -> str:
    operands = ["input", "other", *(f"operand{i}" for i in range(2, len(pattern.sides)))][: len(pattern.sides)]
    return ", ".join([*operands, *(["dim=None", "keepdim=False"] if pattern.names_dims else [])])


def read_table(text: str) -> dict[str, Row]:
    """Parse rows, one a line; a line that begins with a space continues the row above. Keys are names without dots."""
    rows: dict[str, Row] = {}
    section = ""
    for line in text.replace("\n ", " ").splitlines():
        if line.startswith("#"):
            section = line[1:].strip()
        elif line.strip():
            names, rule, combine, call = ([cell.strip() for cell in line.split("|")] + ["", ""])[:4]
            row = row_of(names, rule, combine, call, section)
            rows.update((name.rpartition(".")[2], row) for name in row.names)
    return rows


_TABLE = read_table(TABLE)
ROWS = dict(_TABLE)
"""The row of each name. `shardtensor.register_op` adds rows."""


def rows() -> tuple[Row, ...]:
    """Return the rows of the table in order, without registered ones."""
    return tuple(dict.fromkeys(_TABLE.values()))

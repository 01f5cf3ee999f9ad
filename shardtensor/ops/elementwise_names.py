"""The names of torch's elementwise functions."""

from __future__ import annotations

UNARY = """
abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
conj conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expit expm1 fix floor frac i0 i0e i1 i1e
invert isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 log_ndtr logical_not logit mvlgamma
multigammaln nan_to_num ndtr ndtri neg negative polygamma pos positive psi rad2deg reciprocal resolve_conj resolve_neg
round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc bessel_j0 bessel_j1 entr erfcx gammaln
celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus
softshrink softsign tanhshrink threshold
"""

BINARY = """
add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div divide eq
float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot igamma igammac isclose lcm ldexp
le less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne nextafter
not_equal pow remainder rsub sub subtract true_divide xlog1py xlogy zeta truediv floordiv mod and or xor lshift rshift
radd rdiv rtruediv rfloordiv rmod rmul rpow rand ror rxor rlshift rrshift
"""

TERNARY = "addcdiv addcmul clamp clamp_max clamp_min clip lerp masked_fill where"

ELEMENTWISE = [*UNARY.split(), *BINARY.split(), *TERNARY.split()]

IN_PLACE_DUNDERS = "iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()

"""Ops that work element by element."""

from __future__ import annotations

from finecast.ops.table.base import FlopRule, OpInfo, OpKind, Tier, family, row

POINTWISE: tuple[OpInfo, ...] = (
    # They select, negate, or give whole numbers no wider than their input: nothing to round.
    *family(
        OpKind.ELEMENTWISE,
        Tier.FOLLOW,
        row("abs", "Abs", "abs", openvino="Abs", tensorflow="Abs"),
        row("neg", "Neg", "neg", openvino="Negative", tensorflow="Neg"),
        row("sign", "Sign", "sign sgn", openvino="Sign", tensorflow="Sign"),
        row("relu", "Relu", "relu", openvino="Relu", tensorflow="Relu"),
        row("thresholded_relu", "ThresholdedRelu", "threshold"),
        row(
            "clip",
            "Clip",
            "clamp clamp_min clamp_max hardtanh relu6",
            openvino="Clamp",
            tensorflow="ClipByValue Relu6",
        ),
        row("max", "Max", "maximum", openvino="Maximum", tensorflow="Maximum"),
        row("min", "Min", "minimum", openvino="Minimum", tensorflow="Minimum"),
        row(
            "where",
            "Where",
            "where masked_fill index_fill",
            openvino="Select",
            tensorflow="Select SelectV2",
        ),
        row("nan_to_num", "", "nan_to_num"),
        row("ceil", "Ceil", "ceil", openvino="Ceiling", tensorflow="Ceil"),
        row("floor", "Floor", "floor", openvino="Floor", tensorflow="Floor"),
        row("round", "Round", "round", openvino="Round", tensorflow="Round Rint"),
        row("trunc", "", "trunc fix"),
        exact=True,
        flops=FlopRule.PER_OUTPUT,
    ),
    *family(
        OpKind.ELEMENTWISE,
        Tier.FOLLOW,
        row("add", "Add", "add", openvino="Add", tensorflow="Add AddV2"),
        row("sub", "Sub", "sub rsub", openvino="Subtract", tensorflow="Sub"),
        row("mul", "Mul", "mul", openvino="Multiply", tensorflow="Mul"),
        row("sum", "Sum", tensorflow="AddN"),
        row("mean", "Mean"),
        row("square", "", "square", tensorflow="Square SquaredDifference"),
        row("squared_difference", openvino="SquaredDifference"),
        row("leaky_relu", "LeakyRelu", "leaky_relu", tensorflow="LeakyRelu"),
        row("prelu", "PRelu", "prelu _prelu_kernel", openvino="PRelu"),
        row("parametric_softplus", "ParametricSoftplus"),
        row("hard_sigmoid", "HardSigmoid", "hardsigmoid", openvino="HardSigmoid HSigmoid"),
        row("hard_swish", "HardSwish", "hardswish", openvino="HSwish"),
        row("shrink", "Shrink", "hardshrink softshrink"),
        row("affine", "Affine Scale"),
        row("addcmul", "", "addcmul lerp"),
        # In inference it is the identity; in training it scales by 1 / (1 - ratio).
        row("dropout", "Dropout ms::BitmaskDropout", "dropout native_dropout"),
        row("bias_add", "ms::BiasAdd", tensorflow="BiasAdd BiasAddV1"),
        row("bias_dropout", "ms::BiasDropout ms::BitmaskBiasDropout"),
        row("gated_add", "ms::GatedAdd ms::HyperConnectionPostMix"),
        row("complex_mul", "ms::ComplexMul ms::ComplexMulConj"),
        row(
            "rotary_embedding",
            "RotaryEmbedding ms::RotaryEmbedding "
            "ms::GemmaRotaryEmbedding ms::MRotaryEmbedding",
        ),
        flops=FlopRule.PER_OUTPUT,
    ),
    # A small divisor turns its own absolute error into a large relative one.
    *family(
        OpKind.ELEMENTWISE,
        Tier.SENSITIVE,
        row(
            "div",
            "Div",
            "div true_divide",
            openvino="Divide",
            tensorflow="RealDiv Div DivNoNan Xdivy",
        ),
        row("reciprocal", "Reciprocal", "reciprocal", tensorflow="Reciprocal Inv"),
        row(
            "mod", "Mod", "fmod remainder", openvino="Mod FloorMod", tensorflow="Mod FloorMod"
        ),
        row("floor_divide", "", "floor_divide", tensorflow="FloorDiv"),
        row("addcdiv", "", "addcdiv"),
        flops=FlopRule.PER_OUTPUT,
    ),
    # Bounded in value and slope: an input's relative error is not amplified.
    *family(
        OpKind.TRANSCENDENTAL,
        Tier.FOLLOW,
        row("sigmoid", "Sigmoid", "sigmoid", openvino="Sigmoid", tensorflow="Sigmoid"),
        row("tanh", "Tanh ScaledTanh", "tanh", openvino="Tanh", tensorflow="Tanh"),
        row("gelu", "Gelu ms::Gelu ms::FastGelu ms::BiasGelu", "gelu", openvino="Gelu"),
        row("quick_gelu", "ms::QuickGelu"),
        row("bias_split_gelu", "ms::BiasSplitGelu"),
        row("swish", "Swish ms::ScaledSiLU", "silu", openvino="Swish"),
        row("swiglu", "SwiGLU", "glu"),
        row("mish", "Mish", "mish", openvino="Mish"),
        row("elu", "Elu", "elu", openvino="Elu", tensorflow="Elu"),
        row("selu", "Selu", "selu", openvino="Selu", tensorflow="Selu"),
        row("celu", "Celu", "celu"),
        row("softsign", "Softsign", "softsign", openvino="SoftSign", tensorflow="Softsign"),
        flops=FlopRule.TRANSCENDENTAL,
    ),
    # Absolute input error becomes relative output error (exp), slopes without bound
    # (log, rsqrt, atanh), or arguments far beyond one period (sin of a position).
    *family(
        OpKind.TRANSCENDENTAL,
        Tier.SENSITIVE,
        row("exp", "Exp", "exp exp2 expm1", openvino="Exp", tensorflow="Exp Expm1"),
        row(
            "log", "Log", "log log2 log10 log1p", openvino="Log", tensorflow="Log Log1p Xlogy"
        ),
        row("pow", "Pow", "pow", openvino="Power", tensorflow="Pow"),
        row("sqrt", "Sqrt", "sqrt", openvino="Sqrt", tensorflow="Sqrt"),
        row("rsqrt", "", "rsqrt", tensorflow="Rsqrt"),
        row("erf", "Erf", "erf erfc erfinv", openvino="Erf", tensorflow="Erf Erfc Erfinv"),
        row("softplus", "Softplus", "softplus", openvino="SoftPlus", tensorflow="Softplus"),
        row("log_sigmoid", "", "log_sigmoid"),
        row("sin", "Sin", "sin", openvino="Sin", tensorflow="Sin"),
        row("cos", "Cos", "cos", openvino="Cos", tensorflow="Cos"),
        row("tan", "Tan", "tan", openvino="Tan", tensorflow="Tan"),
        row("asin", "Asin", "asin", openvino="Asin", tensorflow="Asin"),
        row("acos", "Acos", "acos", openvino="Acos", tensorflow="Acos"),
        row("atan", "Atan", "atan atan2", openvino="Atan", tensorflow="Atan Atan2"),
        row("sinh", "Sinh", "sinh", openvino="Sinh", tensorflow="Sinh"),
        row("cosh", "Cosh", "cosh", openvino="Cosh", tensorflow="Cosh"),
        row("asinh", "Asinh", "asinh", openvino="Asinh", tensorflow="Asinh"),
        row("acosh", "Acosh", "acosh", openvino="Acosh", tensorflow="Acosh"),
        row("atanh", "Atanh", "atanh", openvino="Atanh", tensorflow="Atanh"),
        row("linear_attention_gate", "ms::LinearAttentionGate"),
        row("engram_gate", "ms::EngramGate"),
        flops=FlopRule.TRANSCENDENTAL,
    ),
    *family(
        OpKind.COMPARISON,
        Tier.FOLLOW,
        row("equal", "Equal", "eq", openvino="Equal", tensorflow="Equal ApproximateEqual"),
        row("not_equal", "", "ne", openvino="NotEqual", tensorflow="NotEqual"),
        row("greater", "Greater", "gt", openvino="Greater", tensorflow="Greater"),
        row(
            "greater_or_equal",
            "GreaterOrEqual",
            "ge",
            openvino="GreaterEqual",
            tensorflow="GreaterEqual",
        ),
        row("less", "Less", "lt", openvino="Less", tensorflow="Less"),
        row(
            "less_or_equal", "LessOrEqual", "le", openvino="LessEqual", tensorflow="LessEqual"
        ),
        row("is_nan", "IsNaN", "isnan", openvino="IsNaN", tensorflow="IsNan"),
        row(
            "is_inf",
            "IsInf",
            "isinf isfinite",
            openvino="IsInf IsFinite",
            tensorflow="IsInf IsFinite",
        ),
        row("is_all_finite", "ms::IsAllFinite"),
        exact=True,
        flops=FlopRule.PER_OUTPUT,
    ),
)

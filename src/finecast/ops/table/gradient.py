"""Ops that only PyTorch's graphs have: gradients, fused attention, training forms of norms."""

from __future__ import annotations

from finecast.ops.table.base import FlopRule, OpInfo, OpKind, Tier, family, row

_ATTENTION = " ".join(
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "attention_math_for_mps",
    )
)
_ATTENTION_BACKWARD = " ".join(
    f"_scaled_dot_product_{kind}_backward"
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
)

GRADIENT: tuple[OpInfo, ...] = (
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row("torch_attention", "", _ATTENTION),
        accumulates=True,
        flops=FlopRule.ATTENTION,
    ),
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row("attention_backward", "", _ATTENTION_BACKWARD),
        accumulates=True,
    ),
    *family(
        OpKind.CONV,
        Tier.LOW,
        row("conv_backward", "", "convolution_backward"),
        accumulates=True,
    ),
    # Gradients of exact or bounded ops: one multiply by a slope of at most about one.
    *family(
        OpKind.ELEMENTWISE,
        Tier.FOLLOW,
        row("relu_backward", "", "threshold_backward hardtanh_backward leaky_relu_backward"),
        row("gelu_backward", "", "gelu_backward silu_backward mish_backward elu_backward"),
        row("sigmoid_backward", "", "sigmoid_backward tanh_backward hardsigmoid_backward"),
        row("hard_swish_backward", "", "hardswish_backward glu_backward"),
        row("dropout_backward", "", "native_dropout_backward"),
        flops=FlopRule.PER_OUTPUT,
    ),
    *family(
        OpKind.MOVEMENT,
        Tier.FOLLOW,
        row("slice_backward", "", "slice_backward select_backward"),
        exact=True,
        flops=FlopRule.ZERO,
    ),
    *family(
        OpKind.POOL,
        Tier.FOLLOW,
        row("max_pool_backward", "", "max_pool2d_with_indices_backward"),
        row(
            "average_pool_backward",
            "",
            "avg_pool2d_backward _adaptive_avg_pool2d_backward",
        ),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
    # Sums over a batch, or a difference of nearly equal terms.
    *family(
        OpKind.NORM,
        Tier.SENSITIVE,
        row(
            "batch_norm_training",
            "",
            "_native_batch_norm_legit_functional _native_batch_norm_legit "
            "_batch_norm_with_update _batch_norm_with_update_functional",
        ),
        row("batch_norm_backward", "", "native_batch_norm_backward batch_norm_backward"),
        row("layer_norm_backward", "", "native_layer_norm_backward"),
        row("group_norm_backward", "", "native_group_norm_backward"),
        accumulates=True,
        flops=FlopRule.NORM,
    ),
    *family(
        OpKind.SOFTMAX,
        Tier.SENSITIVE,
        row("softmax_backward", "", "_softmax_backward_data _log_softmax_backward_data"),
        accumulates=True,
        flops=FlopRule.SOFTMAX,
    ),
    *family(
        OpKind.LOSS,
        Tier.SENSITIVE,
        row("nll_loss_backward", "", "nll_loss_backward nll_loss2d_backward"),
        row("mse_loss_backward", "", "mse_loss_backward smooth_l1_loss_backward"),
        row(
            "bce_loss_backward",
            "",
            "binary_cross_entropy_backward binary_cross_entropy_with_logits_backward",
        ),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
    # A row sums a gradient for each time its index occurs; large sums lose small terms.
    *family(
        OpKind.REDUCTION,
        Tier.SENSITIVE,
        row("embedding_backward", "", "embedding_dense_backward embedding_backward"),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
)

"""Ops that gather many elements into one: norms, softmax, reductions, pools, losses."""

from __future__ import annotations

from finecast.ops.table.base import FlopRule, OpInfo, OpKind, Tier, family, row

AGGREGATE: tuple[OpInfo, ...] = (
    # With the stored statistics of inference it is one multiply and one add.
    *family(
        OpKind.NORM,
        Tier.FOLLOW,
        row(
            "batch_norm",
            "BatchNormalization",
            "batch_norm native_batch_norm cudnn_batch_norm "
            "_native_batch_norm_legit_no_training",
            openvino="BatchNormInference",
        ),
        flops=FlopRule.PER_OUTPUT,
    ),
    *family(
        OpKind.NORM,
        Tier.SENSITIVE,
        row("layer_norm", "LayerNormalization", "layer_norm native_layer_norm"),
        row(
            "rms_norm",
            "RMSNormalization SimplifiedLayerNormalization",
            "rms_norm",
            openvino="RMSNorm",
        ),
        row("skip_layer_norm", "ms::SkipLayerNormalization"),
        row("skip_rms_norm", "ms::SkipSimplifiedLayerNormalization"),
        row("embed_layer_norm", "ms::EmbedLayerNormalization"),
        row("gated_rms_norm", "ms::GatedRMSNorm ms::BranchwiseRMSNorm"),
        row("hyper_connection_mix", "ms::HyperConnectionPreMix"),
        row(
            "group_norm",
            "GroupNormalization ms::GroupNorm",
            "group_norm native_group_norm",
            openvino="GroupNormalization",
        ),
        row("skip_group_norm", "ms::SkipGroupNorm"),
        row("instance_norm", "InstanceNormalization", "instance_norm"),
        row("mean_variance_norm", "MeanVarianceNormalization", openvino="MVN"),
        row(
            "lp_norm", "LpNormalization", "norm linalg_vector_norm", openvino="NormalizeL2 GRN"
        ),
        row("lrn", "LRN", "local_response_norm", openvino="LRN"),
        accumulates=True,
        flops=FlopRule.NORM,
    ),
    *family(
        OpKind.SOFTMAX,
        Tier.SENSITIVE,
        row(
            "softmax",
            "Softmax ms::BiasSoftmax",
            "softmax _softmax _safe_softmax",
            openvino="Softmax",
        ),
        row("log_softmax", "LogSoftmax", "log_softmax _log_softmax", openvino="LogSoftmax"),
        accumulates=True,
        flops=FlopRule.SOFTMAX,
    ),
    *family(
        OpKind.REDUCTION,
        Tier.SENSITIVE,
        row("reduce_sum", "ReduceSum", "sum", openvino="ReduceSum"),
        row("reduce_mean", "ReduceMean", "mean", openvino="ReduceMean"),
        row("reduce_prod", "ReduceProd", "prod", openvino="ReduceProd"),
        row("reduce_l1", "ReduceL1", openvino="ReduceL1"),
        row("reduce_l2", "ReduceL2", openvino="ReduceL2"),
        row("reduce_log_sum", "ReduceLogSum"),
        row("reduce_log_sum_exp", "ReduceLogSumExp", "logsumexp"),
        row("reduce_sum_square", "ReduceSumSquare"),
        row("variance", "", "var std var_mean"),
        row("cum_sum", "CumSum", "cumsum", openvino="CumSum"),
        row("cum_prod", "CumProd", "cumprod"),
        row("det", "Det", "linalg_det det"),
        row("inverse", "ms::Inverse", "linalg_inv inverse", openvino="Inverse"),
        row("cdist", "ms::CDist", "_cdist_forward"),
        row("dynamic_time_warping", "ms::DynamicTimeWarping"),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
    *family(
        OpKind.REDUCTION,
        Tier.FOLLOW,
        row("reduce_max", "ReduceMax", "amax max", openvino="ReduceMax"),
        row("reduce_min", "ReduceMin", "amin min", openvino="ReduceMin"),
        exact=True,
        flops=FlopRule.PER_INPUT,
    ),
    *family(
        OpKind.POOL,
        Tier.FOLLOW,
        row(
            "max_pool",
            "MaxPool ms::MaxpoolWithMask",
            "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices",
            openvino="MaxPool",
        ),
        exact=True,
        flops=FlopRule.POOL,
    ),
    *family(
        OpKind.POOL,
        Tier.FOLLOW,
        row(
            "average_pool",
            "AveragePool",
            "avg_pool1d avg_pool2d avg_pool3d",
            openvino="AvgPool",
        ),
        accumulates=True,
        flops=FlopRule.POOL,
    ),
    *family(
        OpKind.POOL,
        Tier.FOLLOW,
        row(
            "global_max_pool",
            "GlobalMaxPool",
            "adaptive_max_pool2d",
            openvino="AdaptiveMaxPool",
        ),
        exact=True,
        flops=FlopRule.PER_INPUT,
    ),
    *family(
        OpKind.POOL,
        Tier.FOLLOW,
        row(
            "global_average_pool",
            "GlobalAveragePool",
            "adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d",
            openvino="AdaptiveAvgPool",
        ),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
    # They add up the rows of a table that a bag or a segment names.
    *family(
        OpKind.REDUCTION,
        Tier.SENSITIVE,
        row(
            "embedding_bag",
            openvino="EmbeddingBagOffsets EmbeddingBagOffsetsSum EmbeddingBagPacked "
            "EmbeddingBagPackedSum EmbeddingSegmentsSum",
        ),
        row("segment_max", openvino="SegmentMax"),
        row("ctc_loss", openvino="CTCLoss"),
        accumulates=True,
    ),
    *family(
        OpKind.POOL,
        Tier.SENSITIVE,
        row("lp_pool", "LpPool"),
        accumulates=True,
        flops=FlopRule.POOL,
    ),
    *family(
        OpKind.POOL,
        Tier.SENSITIVE,
        row("global_lp_pool", "GlobalLpPool"),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
    *family(
        OpKind.LOSS,
        Tier.SENSITIVE,
        row(
            "nll_loss",
            "NegativeLogLikelihoodLoss",
            "nll_loss nll_loss_forward nll_loss2d_forward",
        ),
        row("cross_entropy_loss", "SoftmaxCrossEntropyLoss", "cross_entropy_loss"),
        row("mse_loss", "", "mse_loss l1_loss smooth_l1_loss huber_loss"),
        row("bce_loss", "", "binary_cross_entropy binary_cross_entropy_with_logits"),
        row("kl_div", "", "kl_div"),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
    *family(
        OpKind.SIGNAL,
        Tier.SENSITIVE,
        row(
            "dft",
            "DFT ms::Rfft ms::Irfft",
            "_fft_r2c _fft_c2c _fft_c2r",
            openvino="DFT IDFT RDFT IRDFT",
        ),
        row("stft", "STFT", "stft", openvino="STFT"),
        accumulates=True,
        flops=FlopRule.PER_INPUT,
    ),
)

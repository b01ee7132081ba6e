"""Ops of the matmul engine: compute-bound, safe in low formats with fp32 accumulation."""

from __future__ import annotations

from finecast.ops.table.base import FlopRule, OpInfo, OpKind, Tier, family, row

ENGINE: tuple[OpInfo, ...] = (
    *family(
        OpKind.MATMUL,
        Tier.LOW,
        row(
            "matmul",
            "MatMul",
            "mm bmm matmul mv dot",
            openvino="MatMul",
            tensorflow="MatMul BatchMatMul BatchMatMulV2",
        ),
        row("fused_matmul", "ms::FusedMatMul ms::TransposeMatMul ms::FusedMatMulActivation"),
        row("matmul_gelu", "ms::GemmFastGelu"),
        row("linear", "", "linear"),
        accumulates=True,
        flops=FlopRule.MATMUL,
    ),
    *family(
        OpKind.MATMUL,
        Tier.LOW,
        row("gemm", "Gemm"),
        row("fused_gemm", "ms::FusedGemm"),
        accumulates=True,
        flops=FlopRule.GEMM,
    ),
    *family(
        OpKind.MATMUL,
        Tier.LOW,
        row("addmm", "", "addmm addmv baddbmm"),
        accumulates=True,
        flops=FlopRule.ADDMM,
    ),
    *family(
        OpKind.MATMUL,
        Tier.LOW,
        row("einsum", "Einsum", "einsum", openvino="Einsum", tensorflow="Einsum"),
        accumulates=True,
        flops=FlopRule.EINSUM,
    ),
    # Weights are stored in 4 or 8 bits; a plan decides the activations' format.
    *family(
        OpKind.MATMUL,
        Tier.LOW,
        row("matmul_nbits", "ms::MatMulNBits ms::MatMulBnb4 ms::MatMulFpQ4"),
        accumulates=True,
        flops=FlopRule.MATMUL,
    ),
    *family(
        OpKind.MATMUL,
        Tier.LOW,
        row("moe", "ms::MoE"),
        row("bilinear", "", "bilinear"),
        accumulates=True,
    ),
    *family(
        OpKind.CONV,
        Tier.LOW,
        row(
            "conv",
            "Conv",
            "convolution conv1d conv2d conv3d _convolution",
            openvino="Convolution",
            tensorflow="Conv2D Conv3D DepthwiseConv2dNative",
        ),
        row("fused_conv", "ms::FusedConv"),
        row("nhwc_conv", "ms::NhwcConv ms::NhwcFusedConv"),
        row("deform_conv", "DeformConv", openvino="DeformableConvolution"),
        accumulates=True,
        flops=FlopRule.CONV,
    ),
    *family(
        OpKind.CONV,
        Tier.LOW,
        row(
            "conv_transpose",
            "ConvTranspose ms::ConvTransposeWithDynamicPads",
            "conv_transpose1d conv_transpose2d conv_transpose3d",
            openvino="ConvolutionBackpropData",
        ),
        accumulates=True,
        flops=FlopRule.CONV_TRANSPOSE,
    ),
    # The weights have an axis for the groups.
    *family(
        OpKind.CONV,
        Tier.LOW,
        row("group_conv", openvino="GroupConvolution"),
        accumulates=True,
        flops=FlopRule.GROUP_CONV,
    ),
    *family(
        OpKind.CONV,
        Tier.LOW,
        row("group_conv_transpose", openvino="GroupConvolutionBackpropData"),
        accumulates=True,
        flops=FlopRule.GROUP_CONV_TRANSPOSE,
    ),
    *family(
        OpKind.CONV,
        Tier.LOW,
        # A transposed convolution whose first operand is the size of its result.
        row("conv_input_gradient", tensorflow="Conv2DBackpropInput Conv3DBackpropInputV2"),
        row(
            "causal_conv",
            "CausalConvWithState ms::CausalConvWithState ms::VarlenCausalConvWithState",
        ),
        row("word_conv_embedding", "ms::WordConvEmbedding"),
        accumulates=True,
    ),
    *family(
        OpKind.RECURRENT,
        Tier.LOW,
        row("lstm", "LSTM ms::AttnLSTM", "lstm"),
        row("gru", "GRU", "gru"),
        row("rnn", "RNN", "rnn_tanh rnn_relu"),
        accumulates=True,
        flops=FlopRule.RECURRENT,
    ),
    *family(
        OpKind.RECURRENT,
        Tier.LOW,
        row("lstm_sequence", openvino="LSTMSequence LSTMCell"),
        row("gru_sequence", openvino="GRUSequence GRUCell AUGRUSequence AUGRUCell"),
        row("rnn_sequence", openvino="RNNSequence RNNCell"),
        accumulates=True,
        flops=FlopRule.RECURRENT_SEQUENCE,
    ),
    # GRUUnit, an early experimental op of ONNX, gets the matrix products as inputs.
    *family(OpKind.RECURRENT, Tier.LOW, row("gru_unit", "GRUUnit"), accumulates=True),
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row(
            "attention",
            "Attention",
            "scaled_dot_product_attention",
            openvino="ScaledDotProductAttention",
        ),
        row("flex_attention", "ai.onnx.preview::FlexAttention"),
        accumulates=True,
        flops=FlopRule.ATTENTION,
    ),
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row("multi_head_attention", "ms::MultiHeadAttention"),
        accumulates=True,
        flops=FlopRule.MULTI_HEAD_ATTENTION,
    ),
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row("fused_attention", "ms::Attention"),
        accumulates=True,
        flops=FlopRule.FUSED_ATTENTION,
    ),
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row("group_query_attention", "ms::GroupQueryAttention"),
        accumulates=True,
        flops=FlopRule.GROUP_QUERY_ATTENTION,
    ),
    *family(
        OpKind.ATTENTION,
        Tier.LOW,
        row("packed_attention", "ms::PackedAttention ms::PackedMultiHeadAttention"),
        row("paged_attention", "ms::PagedAttention ms::SparsePagedAttention"),
        row("sparse_attention", "ms::SparseAttention ms::DynamicSparseAttention"),
        row("longformer_attention", "ms::LongformerAttention"),
        row(
            "decoder_attention",
            "ms::DecoderAttention ms::DecoderMaskedMultiHeadAttention "
            "ms::DecoderMaskedSelfAttention",
        ),
        accumulates=True,
    ),
    # Their recurrent state is a sum over the whole sequence, not a mean as of a softmax.
    *family(
        OpKind.ATTENTION,
        Tier.SENSITIVE,
        row("linear_attention", "LinearAttention ms::LinearAttention ms::GatedDeltaNet"),
        accumulates=True,
    ),
    *family(
        OpKind.ATTENTION,
        Tier.SENSITIVE,
        row(
            "attention_indexer", "ms::SparseAttentionIndexer ms::PackedSparseAttentionIndexer"
        ),
        exact=True,
        accumulates=True,  # gives indices, no float
    ),
)

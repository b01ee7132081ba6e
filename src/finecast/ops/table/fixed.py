"""Ops that keep their type in every plan."""

from __future__ import annotations

from finecast.ops.table.base import FlopRule, OpInfo, OpKind, Tier, family, row

FIXED: tuple[OpInfo, ...] = (
    # Another format draws other numbers from the same seed.
    *family(
        OpKind.RANDOM,
        Tier.NEVER,
        row(
            "random_normal",
            "RandomNormal RandomNormalLike",
            "randn randn_like normal",
            tensorflow="RandomStandardNormal StatelessRandomNormalV2 TruncatedNormal",
        ),
        row(
            "random_uniform",
            "RandomUniform RandomUniformLike",
            "rand rand_like uniform",
            openvino="RandomUniform",
            tensorflow="RandomUniform RandomUniformInt StatelessRandomUniformV2",
        ),
        row("bernoulli", "Bernoulli", "bernoulli"),
        row(
            "multinomial",
            "Multinomial",
            "multinomial",
            openvino="Multinomial",
            tensorflow="Multinomial",
        ),
    ),
    # They count: whole numbers beyond 2 ** mantissa bits would collide.
    *family(
        OpKind.CONSTANT,
        Tier.NEVER,
        row(
            "range",
            "Range ms::Range",
            "arange linspace",
            openvino="Range",
            tensorflow="Range LinSpace",
        ),
        row("given_tensor_fill", "GivenTensorFill"),
        flops=FlopRule.ZERO,
    ),
    *family(
        OpKind.SIGNAL,
        Tier.NEVER,
        row("window", "HannWindow HammingWindow BlackmanWindow", "hann_window hamming_window"),
        row("mel_weight_matrix", "MelWeightMatrix"),
    ),
    *family(
        OpKind.CAST,
        Tier.NEVER,
        row("bit_cast", "BitCast", tensorflow="Bitcast"),
        exact=True,
        flops=FlopRule.ZERO,
    ),
    *family(
        OpKind.QUANTIZE,
        Tier.NEVER,
        row(
            "quantize",
            "QuantizeLinear ms::QuantizeLinear ms::QuantizeBFP ms::QuantizeWithOrder",
            "quantize_per_tensor quantized_decomposed::quantize_per_tensor"
            " quantized_decomposed::quantize_per_channel",
            tensorflow="QuantizeV2",
        ),
        # Quantizes and dequantizes at once: the result is float, rounded to encoded numbers.
        row(
            "fake_quantize",
            "",
            "fake_quantize_per_tensor_affine",
            openvino="FakeQuantize FakeConvert",
            tensorflow="FakeQuantWithMinMaxVars FakeQuantWithMinMaxArgs"
            " FakeQuantWithMinMaxVarsPerChannel QuantizeAndDequantizeV4",
        ),
        row(
            "dequantize",
            "DequantizeLinear ms::DequantizeLinear ms::DequantizeBFP ms::DequantizeWithOrder",
            "dequantize quantized_decomposed::dequantize_per_tensor"
            " quantized_decomposed::dequantize_per_channel",
            tensorflow="Dequantize",
        ),
        row("dynamic_quantize", "DynamicQuantizeLinear"),
        row("dynamic_quantize_matmul", "ms::DynamicQuantizeMatMul ms::MatMulIntegerToFloat"),
        row("dynamic_quantize_lstm", "ms::DynamicQuantizeLSTM"),
        row("matmul_integer", "MatMulInteger ms::MatMulInteger16"),
        row("conv_integer", "ConvInteger"),
        row("integer_arithmetic", "ms::MulInteger ms::ReduceSumInteger"),
        row("qlinear_matmul", "QLinearMatMul ms::QGemm ms::GemmFloat8"),
        row("qlinear_conv", "QLinearConv ms::QLinearConv"),
        row(
            "qlinear",
            "ms::QLinearAdd ms::QLinearMul ms::QLinearConcat ms::QLinearWhere "
            "ms::QLinearLeakyRelu ms::QLinearSigmoid ms::QLinearSoftmax ms::QLinearReduceMean "
            "ms::QLinearAveragePool ms::QLinearGlobalAveragePool ms::NhwcMaxPool",
        ),
        row(
            "qordered",
            "ms::QOrderedAttention ms::QOrderedGelu ms::QOrderedMatMul "
            "ms::QOrderedLayerNormalization ms::QOrderedLongformerAttention",
        ),
        row("qattention", "ms::QAttention"),
        row("qembed_layer_norm", "ms::QEmbedLayerNormalization"),
        row("qmoe", "ms::QMoE"),
        row("gather_block_quantized", "ms::GatherBlockQuantized"),
        row(
            "matmul_block_quantized",
            "ms::MatMulBlockQuantizedFp4Weight "
            "ms::MatMulBlockQuantizedFp8Weight ms::MatMulNBitsMlp ms::MatMulNBitsQkv",
        ),
    ),
    *family(
        OpKind.CONTROL,
        Tier.NEVER,
        row(
            "if",
            "If",
            "higher_order::cond",
            openvino="If",
            tensorflow="If StatelessIf Case StatelessCase",
        ),
        row(
            "loop",
            "Loop",
            "higher_order::while_loop",
            openvino="Loop TensorIterator",
            tensorflow="While StatelessWhile",
        ),
        row("scan", "Scan", "higher_order::scan"),
        row("call", tensorflow="PartitionedCall StatefulPartitionedCall"),
        row(
            "generation", "ms::BeamSearch ms::WhisperBeamSearch ms::GreedySearch ms::Sampling"
        ),
        row("optional", "Optional OptionalGetElement OptionalHasElement"),
        row("compiled", "ms::EPContext ms::Snpe"),
    ),
    *family(
        OpKind.SEQUENCE,
        Tier.NEVER,
        row(
            "sequence_construct",
            "SequenceConstruct SequenceEmpty SplitToSequence",
            tensorflow="TensorListReserve TensorListFromTensor EmptyTensorList",
        ),
        row(
            "sequence_edit",
            "SequenceErase SequenceInsert",
            tensorflow="TensorListSetItem TensorListPushBack",
        ),
        row(
            "sequence_read",
            "SequenceAt SequenceLength ConcatFromSequence",
            tensorflow="TensorListGetItem TensorListStack TensorListLength TensorListGather",
        ),
        exact=True,
        flops=FlopRule.ZERO,
    ),
    *family(OpKind.SEQUENCE, Tier.NEVER, row("sequence_map", "SequenceMap")),
    # The model's variables, which last from call to call and have a type of their own.
    *family(
        OpKind.CONTROL, Tier.NEVER, row("variable", openvino="ReadValue Assign"), exact=True
    ),
    # A write into a tensor that lasts from call to call and keeps its type.
    *family(
        OpKind.MOVEMENT,
        Tier.NEVER,
        row("assign", "", "copy_ _foreach_copy_"),
        exact=True,
    ),
    # Boxes and anchors are coordinates, and the ops have fp32 kernels only.
    *family(
        OpKind.IMAGE,
        Tier.NEVER,
        row(
            "detection",
            openvino="DetectionOutput PriorBox PriorBoxClustered Proposal GenerateProposals "
            "RegionYolo ExperimentalDetectronDetectionOutput "
            "ExperimentalDetectronGenerateProposalsSingleImage "
            "ExperimentalDetectronPriorGridGenerator ExperimentalDetectronROIFeatureExtractor "
            "ExperimentalDetectronTopKROIs",
        ),
        row("color_space", openvino="NV12toRGB NV12toBGR I420toRGB I420toBGR"),
    ),
    *family(
        OpKind.INDEX,
        Tier.NEVER,
        row("bucketize", openvino="Bucketize SearchSorted"),
        row("ctc_decoder", openvino="CTCGreedyDecoder CTCGreedyDecoderSeqLen"),
        exact=True,
        flops=FlopRule.ZERO,
    ),
    *family(OpKind.CONV, Tier.NEVER, row("binary_conv", openvino="BinaryConvolution")),
    # Ops without floats, listed so that they are not reported as unknown.
    *family(
        OpKind.COMPARISON,
        Tier.NEVER,
        row(
            "logical",
            "And Or Xor Not",
            "logical_and logical_or logical_xor logical_not",
            openvino="LogicalAnd LogicalOr LogicalXor LogicalNot "
            "ReduceLogicalAnd ReduceLogicalOr",
            tensorflow="LogicalAnd LogicalOr LogicalNot",
        ),
        exact=True,
        flops=FlopRule.ZERO,
    ),
    *family(
        OpKind.ELEMENTWISE,
        Tier.NEVER,
        row(
            "bitwise",
            "BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor",
            "bitwise_and bitwise_or bitwise_xor bitwise_not "
            "__and__ __or__ __xor__ __lshift__ __rshift__",
            openvino="BitwiseAnd BitwiseOr BitwiseXor BitwiseNot "
            "BitwiseLeftShift BitwiseRightShift",
            tensorflow="BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift",
        ),
        exact=True,
        flops=FlopRule.ZERO,
    ),
    *family(
        OpKind.TEXT,
        Tier.NEVER,
        row(
            "string",
            "RegexFullMatch StringConcat StringNormalizer StringSplit "
            "ms::Tokenizer ms::MurmurHash3 ms::NGramHashMapping ms::VarlenNGramHashMapping "
            "ms::BifurcationDetector",
            openvino="StringTensorPack StringTensorUnpack",
            tensorflow="StringJoin StringSplitV2 RegexReplace StaticRegexReplace AsString",
        ),
        row("tf_idf", "TfIdfVectorizer"),
    ),
    *family(
        OpKind.IMAGE,
        Tier.NEVER,
        row("image_decoder", "ImageDecoder"),
        row("image_scaler", "ImageScaler"),
    ),
    # Relative positions are integers, and the table that they index is tiny.
    *family(
        OpKind.ATTENTION,
        Tier.NEVER,
        row(
            "relative_position_bias", "ms::RelativePositionBias ms::GatedRelativePositionBias"
        ),
    ),
    *family(OpKind.MATMUL, Tier.NEVER, row("sparse_matmul", "ms::SparseToDenseMatMul")),
    *family(
        OpKind.ML,
        Tier.NEVER,
        row(
            "classical_ml",
            " ".join(
                f"ai.onnx.ml::{name}"
                for name in (
                    "ArrayFeatureExtractor",
                    "Binarizer",
                    "CastMap",
                    "CategoryMapper",
                    "DictVectorizer",
                    "FeatureVectorizer",
                    "Imputer",
                    "LabelEncoder",
                    "LinearClassifier",
                    "LinearRegressor",
                    "Normalizer",
                    "OneHotEncoder",
                    "SVMClassifier",
                    "SVMRegressor",
                    "Scaler",
                    "TreeEnsemble",
                    "TreeEnsembleClassifier",
                    "TreeEnsembleRegressor",
                    "ZipMap",
                )
            ),
        ),
        row(
            "optimizer",
            " ".join(
                f"ai.onnx.preview.training::{name}"
                for name in ("Adagrad", "Adam", "Gradient", "Momentum")
            ),
        ),
    ),
)

"""``fit``: INC's entry point for post-training quantization, done by finecast's own verbs.

Ops that run on integers get int8, and others bf16 where that gains. If the accuracy is not
kept, ops fall back to bf16 or fp32, whichever costs least time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from finecast import Format, Policy, Scope
from finecast.calls import checks
from finecast.errors import UsageError
from finecast.graph import Node
from finecast.naming import kind_of
from finecast.ops import by_name
from finecast_neural_compressor.config import PostTrainingQuantConfig
from finecast_neural_compressor.frameworks import framework_of, given
from finecast_neural_compressor.given_model import (
    EvalFunc,
    GivenModel,
    ModelEvaluation,
    Rules,
    kept,
    no_product,
    samples_of,
    warn_unused,
)
from finecast_neural_compressor.op_dicts import OpRule, permitted


@checks
def fit(
    model: Any,
    conf: object,
    calib_dataloader: Iterable[Any] | None = None,
    calib_func: Callable[[Any], object] | None = None,
    eval_func: EvalFunc | None = None,
    eval_dataloader: Iterable[Any] | None = None,
    eval_metric: Any = None,
) -> Any:
    """Quantize ``model``; where an evaluation is given, keep its accuracy.

    Returns:
        An object with ``.model`` and ``.save(path)``; for an ``nn.Module`` it is a module
        itself, whose products run on integers where it is compiled with frozen weights. A
        model of TensorFlow's is quantized for OpenVINO: ``.model`` is a function of arrays,
        and what is saved is IR. With an evaluation it is the fastest model that keeps the
        accuracy and is faster than fp32; None if there is none, and a warning says why.
        Without an evaluation every op that may have a low format has it.

    Args:
        model: An ``nn.Module``, a ModelProto, a Keras model, or the path of an ONNX file, a
            SavedModel, a ``.keras`` file or a frozen ``.pb``.
        conf: The settings, a ``PostTrainingQuantConfig``.
        calib_dataloader: Batches ``(inputs, labels)``, or inputs by name. Values are quantized
            over their ranges on these; by default on ``eval_dataloader``.
        calib_func: Not supported: the model is observed on data.
        eval_func: Returns the accuracy of a model: an ``nn.Module``, a ModelProto (over 2 GB,
            a path), or a function of arrays.
        eval_dataloader: Batches ``(inputs, labels)``; with ``eval_metric``.
        eval_metric: ``update(predictions, labels)``, ``result()`` and ``reset()``.

    Raises:
        UsageError: If the settings cannot be followed here; says why.
        EngineError: If the device is slower in each low format than in fp32.
        ModelError: If no product could be converted.
    """
    if not isinstance(conf, PostTrainingQuantConfig):
        raise UsageError(f"conf is {kind_of(conf)}", fix="give a PostTrainingQuantConfig")
    framework_of(model)  # what it is comes first: other settings would not help
    conf.check()
    if calib_func is not None:
        raise UsageError(
            "calib_func runs the model by itself, and its values are observed on data",
            fix="give calib_dataloader",
        )
    evaluation = ModelEvaluation.of(eval_func, eval_dataloader, eval_metric)
    batches = kept(calib_dataloader) if calib_dataloader is not None else evaluation.batches
    calibration = samples_of(required(batches, "calib_dataloader"), conf.samples)
    taken = given(model, conf, [(calibration[0], None)])
    warn_unused(conf, taken, evaluation)
    policy = Policy(scope=Scope.AUTO, formats=taken.gaining(conf.formats, conf.device))
    rules = _rules(taken, conf, policy)
    if evaluation.given:  # where accuracy is missed, tune tries all adjustments by itself
        return taken.tuned(conf.goal, policy, rules, calibration, evaluation)
    lowest = replace(policy, scope=Scope.ALL, adjust=conf.adjusts)
    quantized = taken.quantized(lowest, rules, calibration)
    if not quantized.products:
        raise no_product(policy.formats, quantized.model)
    return quantized


def required(batches: Iterable[Any] | None, argument: str) -> Iterable[Any]:
    """The data; raises UsageError without any, for ``argument``, which should give it."""
    if batches is None:
        raise UsageError(
            "int8 needs the ranges of the model's values, and there is no data",
            fix=f"give {argument}: batches (inputs, labels)",
        )
    return batches


def _rules(taken: GivenModel, conf: PostTrainingQuantConfig, policy: Policy) -> Rules:
    """The rules that the settings state of ops; none if they restrict no op.

    Raises:
        UsageError: If an entry of the op dicts matches no op of the model.
    """
    formats_by_op = permitted(taken.known, conf.op_name_dict, conf.op_type_dict)
    floats = frozenset({Format.FP32, *policy.formats}) - {Format.INT8}
    outside = kept_from_int8(taken.graph(policy).nodes, conf)
    rules = {
        "op dicts": OpRule(formats_by_op, modules=taken.by_modules),
        "recipes": OpRule(dict.fromkeys(outside, floats)),
    }
    return {name: rule for name, rule in rules.items() if rule.permitted}


def kept_from_int8(nodes: Sequence[Node], conf: PostTrainingQuantConfig) -> list[str]:
    """Names of the ops that recipes leave out of int8."""
    products = [n.id for n in nodes if by_name(n.op).matmul_engine]
    if not products:
        return []
    first, last = products[0], products[-1]
    kept = {first} if conf.leaves_out("first_") else set[int]()
    kept |= {last} if conf.leaves_out("last_") else set()
    if conf.leaves_out("pre_post"):
        kept |= {n.id for n in nodes if not first <= n.id <= last}
    return [n.name for n in nodes if n.id in kept]

"""Results in pickles: what they hold, and what an error says where they cannot be made."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import pytest
import torch

import finecast
from finecast.errors import UsageError
from finecast.tuning.result import Result
from tests.frontends.tools import parse, tensor


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = parse("""mlp (float[N,64] x) => (float[N,64] y) {
      a = MatMul(x, w)
      b = Relu(a)
      y = MatMul(b, w)
    }""")
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    model.graph.initializer.append(tensor("w", w))
    path = tmp_path_factory.mktemp("pickled") / "mlp.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def tuned(mlp: Path) -> Result:
    x = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    return finecast.tune(mlp, data={"x": x}, metric="cosine", target="trn1", batch=16)


def test_what_a_tuned_result_says_is_the_same_after_a_pickle(tuned: Result) -> None:
    read = pickle.loads(pickle.dumps(tuned))
    assert str(read) == str(tuned)
    assert read.to_dict() == tuned.to_dict()
    assert read.plan == tuned.plan
    assert read.findings.journal == tuned.findings.journal
    assert str(pickle.loads(pickle.dumps(read))) == str(tuned)


def test_the_model_is_in_the_pickle_and_save_names_what_writes_it(
    mlp: Path, tmp_path: Path
) -> None:
    result = finecast.convert(mlp, policy="all:bf16", verify=False)
    read = pickle.loads(pickle.dumps(result))
    assert read.model == result.model
    with pytest.raises(UsageError, match=r"finecast\.apply\(result\.plan, MODEL, FILE\)"):
        read.save(tmp_path / "low.onnx")
    again = finecast.apply(read.plan, mlp, verify=False)
    assert again.model == result.model


def test_a_copy_still_writes_its_model(mlp: Path, tmp_path: Path) -> None:
    result = finecast.convert(mlp, policy="all:bf16", verify=False)
    assert copy.copy(result).model is result.model
    copy.deepcopy(result).save(tmp_path / "low.onnx")
    assert (tmp_path / "low.onnx").exists()


def test_a_torch_module_is_in_the_pickle() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    result = finecast.convert(net, policy="all:bf16", example_inputs=(x,), verify=False)
    assert torch.equal(pickle.loads(pickle.dumps(result)).model(x), result.model(x))


def test_a_model_without_a_pickle_is_named_with_what_to_keep(
    mlp: Path, tmp_path: Path
) -> None:
    model = ov.convert_model(mlp)
    result = finecast.convert(model, policy="all:bf16", verify=False)
    with pytest.raises(UsageError, match=r"Model cannot be pickled.*keep result\.plan"):
        pickle.dumps(result)
    written = finecast.convert(model, tmp_path / "low.xml", policy="all:bf16", verify=False)
    read = pickle.loads(pickle.dumps(written))
    assert read.output == tmp_path / "low.xml"

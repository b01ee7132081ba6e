"""Emulated against real low-precision kernels on a CUDA GPU: products, and whole models.

    python scripts/fidelity_cuda.py [--models FOLDER] [--limit 512]

Products in tf32, fp16, bf16 and fp8 of several depths; with FOLDER (it holds ``cases.py``)
ResNet-20 and MiniLM in fp16 and bf16 too. Prints one JSON object; without a GPU it says so
and exits with 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to

SIZES = ((512, 256, 512), (512, 4096, 512), (2048, 2048, 2048))
SEED = 0


def relative(got: np.ndarray, exact: np.ndarray) -> float:
    """||got - exact|| / ||exact||."""
    difference = got.astype(np.float64) - exact.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(exact.astype(np.float64)))


def tf32_product(torch: Any, a: Any, b: Any) -> Any:
    """TF32 on the tensor cores; the library's flag is put back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def half_product(dtype: str) -> Callable[[Any, Any, Any], Any]:
    """fp16 or bf16 operands; the result is stored in the same type."""

    def call(torch: Any, a: Any, b: Any) -> Any:
        low = getattr(torch, dtype)
        return (a.to(low) @ b.to(low)).float()

    return call


def fp8_product(dtype: str) -> Callable[[Any, Any, Any], Any]:
    """fp8 operands without scales, fp32 result."""

    def call(torch: Any, a: Any, b: Any) -> Any:
        one = torch.ones((), device=a.device)
        right = b.T.contiguous().to(torch.float8_e4m3fn).T
        left = a.to(getattr(torch, dtype))
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32)

    return call


# Format of the left operand, of the right one, of the stored result, and the real product.
PRODUCTS: dict[str, tuple[Format, Format, Format, Callable[[Any, Any, Any], Any]]] = {
    "tf32": (Format.TF32, Format.TF32, Format.FP32, tf32_product),
    "fp16": (Format.FP16, Format.FP16, Format.FP16, half_product("float16")),
    "bf16": (Format.BF16, Format.BF16, Format.BF16, half_product("bfloat16")),
    "fp8_e4m3": (
        Format.FP8_E4M3,
        Format.FP8_E4M3,
        Format.FP32,
        fp8_product("float8_e4m3fn"),
    ),
    "fp8_e5m2": (
        Format.FP8_E5M2,
        Format.FP8_E4M3,
        Format.FP32,
        fp8_product("float8_e5m2"),
    ),
}


def products(torch: Any) -> list[dict[str, Any]]:
    """Errors against fp64, real and emulated, for every format and size."""
    rng = np.random.default_rng(SEED)
    rows: list[dict[str, Any]] = []
    for m, k, n in SIZES:
        a = rng.standard_normal((m, k)).astype(np.float32)
        b = rng.standard_normal((k, n)).astype(np.float32)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        for name, (left, right, stored, call) in PRODUCTS.items():
            row: dict[str, Any] = {"format": name, "size": [m, k, n]}
            sums = round_to(a, left).astype(np.float64) @ round_to(b, right).astype(np.float64)
            emulated = round_to(sums.astype(np.float32), stored)
            try:
                found = call(torch, torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda())
            except (RuntimeError, AttributeError, ValueError) as error:
                rows.append(row | {"skipped": str(error).splitlines()[0][:120]})
                continue
            real = found.cpu().numpy()
            rows.append(
                row
                | {
                    "real": relative(real, exact),
                    "emulated": relative(emulated, exact),
                    "distance": relative(emulated, real),
                }
            )
    return rows


def whole_models(torch: Any, folder: Path, limit: int) -> list[dict[str, Any]]:
    """Both models on the GPU in fp16 and bf16, against the emulator."""
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]
    cases = importlib.import_module("cases").CASES
    from onnx_in_torch import TorchModel

    rows: list[dict[str, Any]] = []
    for name, width in (("cifar10_resnet20", 10), ("sst2_minilm_l6", 384)):
        case = cases[name]
        if not Path(case.model()).exists():
            rows.append({"model": name, "skipped": "there is no such file"})
            continue
        feeds = recorded(case, width, limit)
        exact = outputs(TorchModel(case.model(), torch.float32, "cuda"), feeds)
        for fmt, dtype in ((Format.FP16, torch.float16), (Format.BF16, torch.bfloat16)):
            real = outputs(TorchModel(case.model(), dtype, "cuda"), feeds)
            low = emulated_outputs(case.model(), fmt, feeds)
            agree = real.argmax(1) == low.argmax(1)
            rows.append(
                {
                    "model": name,
                    "format": fmt.label,
                    "samples": len(real),
                    "real": relative(real, exact),
                    "emulated": relative(low, exact),
                    "distance": relative(low, real),
                    "agreement": float(np.mean(agree)),
                }
            )
    return rows


def recorded(case: Any, width: int, limit: int) -> list[Mapping[str, np.ndarray]]:
    """The feeds that the case's metric gives to a model."""
    seen: list[Mapping[str, np.ndarray]] = []

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        seen.append(feeds)
        return [np.zeros((len(next(iter(feeds.values()))), width), np.float32)]

    case.metric(run, limit=limit)
    return seen


def outputs(model: Any, feeds: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """First outputs of all batches."""
    return np.concatenate([model.run(f)[0] for f in feeds])


def emulated_outputs(
    path: str, fmt: Format, feeds: Sequence[Mapping[str, np.ndarray]]
) -> np.ndarray:
    """Outputs of the emulator with all ops in ``fmt``, each a kernel of its own."""
    from finecast.devices.emulation import Emulation
    from finecast.devices.targets import load_target
    from finecast.engines.emulator import EmulatorEngine, prepare, setting_of
    from finecast.frontends import onnx as frontend
    from finecast.rules.policy import Scope

    emulation = Emulation(target=load_target("sm90"), scope=Scope.ALL, format=fmt)
    prepared = prepare(frontend.load(Path(path)), emulation)
    setting = setting_of(prepared.graph, emulation)
    session = EmulatorEngine(emulation=emulation).session(prepared, kernels=[], fixed=setting)
    return np.concatenate([np.asarray(next(iter(session.run(f).values()))) for f in feeds])


def main() -> None:
    """Measure what this machine's GPU can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--limit", type=int, default=512)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.stdout.write("skipped: PyTorch is not installed\n")
        return
    if not torch.cuda.is_available():
        sys.stdout.write("skipped: there is no CUDA GPU here\n")
        return
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "products": products(torch),
    }
    if options.models is not None:
        report["models"] = whole_models(torch, options.models, options.limit)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

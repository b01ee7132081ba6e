"""The same small nets as PyTorch programs and as the ONNX models that PyTorch exports.

The ONNX files are samples: exporting needs onnxscript, which tests do not. Write them anew
with ``python -m tests.engines.emulator.exported_pairs``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

SAMPLES: Final = Path(__file__).parents[2] / "samples" / "exported"
ROWS: Final = 4


class Mlp(nn.Module):
    """Products, GELU, norm, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(self.last(self.norm(functional.gelu(self.first(x)))), -1)


class ConvNet(nn.Module):
    """Convolutions with norms to fold, a residual, pools."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.a_norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.b_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.a_norm(self.a(x)))
        y = functional.max_pool2d(functional.relu(y + self.b_norm(self.b(y))), 2)
        return self.head(y.mean((2, 3)))


class Attention(nn.Module):
    """A transformer's block: norms, attention, residuals, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.second = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, steps, width = x.shape
        heads = self.qkv(self.norm(x)).reshape(rows, steps, 3, 4, 8).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(rows, steps, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


NETS: Final[dict[str, tuple[type[nn.Module], tuple[int, ...]]]] = {
    "mlp": (Mlp, (16,)),
    "conv": (ConvNet, (3, 8, 8)),
    "attention": (Attention, (6, 32)),
}


def net(name: str) -> nn.Module:
    """The net, with weights that are the same on every machine."""
    made = NETS[name][0]()
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                scale = 1.0 if tensor.dim() < 2 else tensor[0].numel() ** -0.5
                drawn = rng.standard_normal(tuple(tensor.shape)) * scale
                # Of vectors the norms' scales and variances have to stay near one.
                drawn = drawn if tensor.dim() > 1 else 1 + 0.1 * drawn
                tensor.copy_(torch.from_numpy(drawn.astype(np.float32)))
    return made.eval()


def inputs(name: str, rows: int = ROWS) -> NDArray[np.float32]:
    """Rows of the net's input."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((rows, *NETS[name][1])).astype(np.float32)


def program(name: str) -> torch.export.ExportedProgram:
    """The net as ``torch.export`` captures it."""
    example = (torch.from_numpy(inputs(name)),)
    batch: Any = {0: torch.export.Dim("batch", min=2, max=64)}
    return torch.export.export(net(name), example, dynamic_shapes=(batch,))


def onnx_file(name: str) -> Path:
    """The net as ``torch.onnx.export`` wrote it."""
    return SAMPLES / f"{name}.onnx"


def write(folder: Path = SAMPLES) -> None:
    """Export all nets to ONNX."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NETS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Of this opset on GELU is one op, as it is in PyTorch's own graphs.
            found = torch.onnx.export(
                program(name), dynamo=True, opset_version=20, output_names=["y"]
            )
        assert found is not None
        found.save(folder / f"{name}.onnx")


if __name__ == "__main__":
    write()

"""Programs that give a class of another package, as transformers' do.

A saved program names the class; it is imported for those who vouch for the file alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree

import finecast
import finecast.torch as ft
from finecast.errors import ModelError

PACKAGE = "outputs_of_a_package"
SOURCE = f'''
import dataclasses
import torch

@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor

torch.export.register_dataclass(Output, serialized_type_name="{PACKAGE}.Output")
'''


class Net(torch.nn.Module):
    """One linear layer with what it gives in a class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> object:
        hidden = self.inner(x)
        return importlib.import_module(PACKAGE).Output(hidden.relu(), hidden)


def forget() -> None:
    """Make the process one that has not imported the package."""
    module = sys.modules.pop(PACKAGE, None)
    if module is not None:
        _pytree._deregister_pytree_node(module.Output)
        _pytree.treespec_loads.cache_clear()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{PACKAGE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(PACKAGE)
    path = tmp_path / "model.pt2"
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Net().eval(), (torch.randn(4, 64),)), path)
    forget()
    yield path
    forget()


def test_nothing_is_imported_unless_the_file_is_trusted(saved: Path) -> None:
    with pytest.raises(ModelError, match=rf"type {PACKAGE}\.Output") as caught:
        ft.load(saved)
    assert "--trust" in caught.value.fix
    assert PACKAGE not in sys.modules


def test_what_is_trusted_is_converted_and_keeps_its_class(saved: Path) -> None:
    low = saved.with_name("low.pt2")
    done = finecast.convert(finecast.load(saved, trust=True), low, policy="all:bf16")
    assert done.counts["bf16"]
    forget()
    x = torch.randn(4, 64)
    got = ft.load(low, trust=True).module()(x)
    assert type(got).__name__ == "Output"
    want = ft.load(saved, trust=True).module()(x)
    torch.testing.assert_close(got.hidden, want.hidden, rtol=0.05, atol=0.05)


def test_a_class_that_is_not_here_is_named(saved: Path) -> None:
    (saved.parent / f"{PACKAGE}.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModelError, match=rf"{PACKAGE}\.Output, which is not known") as caught:
        ft.load(saved, trust=True)
    assert f"install {PACKAGE}" in caught.value.fix

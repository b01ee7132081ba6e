"""The calls of a module in a user's evaluation: recorded, and given again without a run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from finecast.data.evaluation import OtherCallError, Recording, Replacement

Forward = Callable[..., Any]


class RecordedCalls:
    """The outputs that a module gave in an evaluation.

    The module's own ``forward`` is put in another's place for as long as an evaluation takes,
    so that ``module(x)``, hooks and ``module.forward(x)`` all work as they did.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.runs = 0
        self._recording = Recording[Any]()
        self._own: Forward = module.forward

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Record the outputs of calls inside."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = _key((args, kwargs))  # before the call, which may write to its inputs
            found = self._own(*args, **kwargs)
            self.runs += 1
            tensors = [*_tensors(found)]
            if tensors:
                size_bytes = sum(t.numel() * t.element_size() for t in tensors)
                self._recording.keep(key, _copied(found), size_bytes)
            else:
                self._recording.lose()
            return found

        with self._instead(forward):
            yield

    @contextmanager
    def replayed(self) -> Generator[None]:
        """Give the outputs again for calls inside; for other inputs the module runs."""
        recording = self._recording.again()

        def forward(*args: Any, **kwargs: Any) -> Any:
            known = recording.next(_key((args, kwargs)))
            return self._own(*args, **kwargs) if known is None else _copied(known)

        with self._instead(forward):
            yield

    @property
    def is_whole(self) -> bool:
        """Whether the outputs of all calls are known."""
        return self.runs > 0 and self._recording.is_whole

    @contextmanager
    def replaced(self, replacement: Replacement) -> Generator[None]:
        """Give replaced outputs for calls inside; other calls fail, and nothing is run."""
        recording = self._recording.again()

        def changed(leaf: Any) -> Any:
            return _replaced(leaf, replacement) if isinstance(leaf, torch.Tensor) else leaf

        def forward(*args: Any, **kwargs: Any) -> Any:
            known = recording.next(_key((args, kwargs)))
            if known is None:
                raise OtherCallError
            return tree_map(changed, known)

        with self._instead(forward):
            yield

    @contextmanager
    def _instead(self, forward: Forward) -> Generator[None]:
        """``forward`` in place of the module's own."""
        attributes = self.module.__dict__
        before = {k: attributes[k] for k in ("forward",) if k in attributes}
        attributes["forward"] = torch.compiler.disable(functools.wraps(self._own)(forward))
        try:
            yield
        finally:
            del attributes["forward"]
            attributes.update(before)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def _replaced(tensor: torch.Tensor, replacement: Replacement) -> torch.Tensor:
    """A tensor of replaced numbers; numpy has no arrays of bf16."""
    plain = tensor.detach().cpu()
    plain = plain.float() if plain.is_floating_point() else plain
    changed = torch.from_numpy(replacement(plain.numpy()).copy())
    return changed.to(device=tensor.device, dtype=tensor.dtype)


def _key(inputs: Any) -> bytes:
    """Tells inputs apart by what their tensors hold."""
    found = hashlib.sha256()
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            plain = leaf.detach().cpu().contiguous()
            found.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.digest()

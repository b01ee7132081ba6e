"""Attribution of an engine's kernels to the model's nodes.

Laws: a kernel's ops are nodes of the model; a node that no kernel names is attributed to the
kernel that all its readers are in, because engines that fuse a chain keep only the name of
its end; a node whose readers are in several kernels is attributed to none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from finecast.engines.source import ModelStep
from finecast.graph.worklist import Worklist

# Characters before the suffixes that engines add to the name of a node.
_SEPARATORS = "/_.:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel by the engine's name.

    ``named`` are the nodes that the engine's names tell; ``feeds`` the kernels that read its
    results; ``added`` marks reorders and conversions of the engine's own, which have no ops.
    """

    name: str
    named: tuple[str, ...]
    feeds: tuple[str, ...] = ()
    added: bool = False


@dataclass(slots=True)
class _Piece:
    """A piece of known names between two commas: what may follow, and whether a name ends."""

    after: dict[str, _Piece] = field(default_factory=dict[str, "_Piece"])
    ends: bool = False


class NameLists:
    """Splits lists of names that an engine joined by commas; names may have commas, too.

    The known names with commas are kept as a tree of their pieces, so that a list is read in
    time linear in its length: kernels that fuse a chain list thousands of names.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self._root = _Piece()
        for name in known:
            if "," in name:
                at = self._root
                for piece in name.split(","):
                    at = at.after.setdefault(piece, _Piece())
                at.ends = True

    def split(self, text: str) -> tuple[str, ...]:
        """Split at commas, but keep the longest pieces with commas that are a known name."""
        pieces = text.split(",")
        names: list[str] = []
        start = 0
        while start < len(pieces):
            end = self._end(pieces, start)
            names.append(",".join(pieces[start:end]))
            start = end
        return tuple(name for name in names if name)

    def _end(self, pieces: Sequence[str], start: int) -> int:
        at, end, longest_end = self._root, start, start + 1
        while end < len(pieces) and (follows := at.after.get(pieces[end])) is not None:
            at, end = follows, end + 1
            if at.ends:
                longest_end = end
        return longest_end


def node_of(name: str, nodes: Collection[str]) -> str | None:
    """The node called ``name``, or ``name`` without a suffix (``conv1/WithoutBiases``)."""
    end = len(name)
    while end > 0:
        if name[:end] in nodes:
            return name[:end]
        end = max(name.rfind(joint, 0, end) for joint in _SEPARATORS)
    return None


def attribute(
    steps: Sequence[ModelStep], kernels: Sequence[Kernel]
) -> dict[str, tuple[str, ...]]:
    """The nodes that run in each kernel, in model order."""
    steps = [step for step in steps if step.op != "Constant"]
    members: dict[str, set[str]] = {k.name: set(k.named) for k in kernels}
    mentioned = {node for nodes in members.values() for node in nodes}
    _claim(steps, kernels, members, mentioned)
    _absorb(steps, members, mentioned)
    order = {step.name: index for index, step in enumerate(steps)}
    return {
        name: tuple(sorted((n for n in nodes if n in order), key=order.__getitem__))
        for name, nodes in members.items()
    }


def _claim(
    steps: Sequence[ModelStep],
    kernels: Sequence[Kernel],
    members: dict[str, set[str]],
    mentioned: set[str],
) -> None:
    """Attribute unnamed nodes to kernels with new names, made by the engine's transformations.

    Such a kernel runs the unnamed nodes right before the nodes of the kernels that read it.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    by_node = {step.name: step for step in steps}
    producer = {value: step.name for step in steps for value in step.outputs}
    for kernel in kernels:
        if kernel.named or kernel.added:
            continue
        readers = _named_readers(kernel, by_name)
        nodes = Worklist(readers)
        for step in (by_node[name] for name in nodes if name in by_node):
            makers = {producer.get(value) for value in step.inputs}
            nodes.add(makers - mentioned)
        members[kernel.name] = nodes.seen - readers
    for name in [k.name for k in kernels if not k.named]:
        mentioned.update(members[name])


def _named_readers(kernel: Kernel, by_name: Mapping[str, Kernel]) -> set[str]:
    """Nodes of the first kernels after ``kernel``, on each path, that have named nodes."""
    kernels, nodes = Worklist(kernel.feeds), set[str]()
    for reader in (by_name[name] for name in kernels if name in by_name):
        nodes.update(reader.named)
        if not reader.named:
            kernels.add(reader.feeds)
    return nodes


def _absorb(
    steps: Sequence[ModelStep], members: Mapping[str, set[str]], mentioned: Collection[str]
) -> None:
    """Attribute nodes that are not mentioned to the kernel that all their readers are in."""
    homes: dict[str, set[str]] = defaultdict(set)
    for kernel, nodes in members.items():
        for node in nodes:
            homes[node].add(kernel)
    readers: dict[str, list[str]] = defaultdict(list)
    for step in steps:
        for value in step.inputs:
            readers[value].append(step.name)
    for step in reversed(steps):
        if step.name in mentioned:
            continue
        used_in = {k for v in step.outputs for r in readers[v] for k in homes[r]}
        if len(used_in) == 1:
            homes[step.name] = used_in
            members[next(iter(used_in))].add(step.name)

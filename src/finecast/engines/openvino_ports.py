"""The ports of a compiled model under the names that the model declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from finecast.engines.base import TensorSpec
from finecast.frontends.openvino.types import label_of

if TYPE_CHECKING:
    import openvino

_SINK: Final = "/sink_port_"


def specs_of(
    ports: Sequence[openvino.ConstOutput], declared: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Specs of a compiled model's ports, with the declared names and symbolic sizes."""
    names = {spec.name: spec for spec in declared}
    specs: list[TensorSpec] = []
    for port, name in zip(ports, _port_names(ports, declared), strict=True):
        spec = TensorSpec(name=name, dtype=label_of(port.get_element_type()), shape=None)
        partial = port.get_partial_shape()
        if name in names and names[name].shape is not None:
            spec = replace(spec, shape=names[name].shape)  # keeps the symbols' names
        elif partial.rank.is_static:
            dims = (d.get_length() if d.is_static else None for d in partial)
            spec = replace(spec, shape=tuple(dims))
        specs.append(spec)
    return tuple(specs)


def _port_names(
    ports: Sequence[openvino.ConstOutput], declared: Sequence[TensorSpec]
) -> list[str]:
    """The declared name of each port: a tensor can have several names, or have lost its own.

    An input that an op only passes on (Dropout) has the name of that op's output. Such a port
    gets a declared name that no other port has.
    """
    free = [spec.name for spec in declared]
    found: list[str | None] = []
    friendly = [p.get_node().get_friendly_name().rsplit(_SINK, 1)[0] for p in ports]
    for port, own in zip(ports, friendly, strict=True):
        name = next((c for c in (own, *sorted(port.get_names())) if c in free), None)
        found.append(name)
        if name is not None:
            free.remove(name)
    rest = iter(free if len(ports) == len(declared) else ())
    return [
        name if name is not None else next(rest, own)
        for name, own in zip(found, friendly, strict=True)
    ]

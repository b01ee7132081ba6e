"""What a kind of machine leaves of one run of ``tune``, for a plan of a whole fleet.

Law: the file has all by which a plan is priced as on that machine, and no data: no samples,
no weights. It is read without running code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from finecast.errors import UsageError
from finecast.files import read_json, write_text
from finecast.measure.environment import environment, limit_to
from finecast.native.lock import Machine, Runner
from finecast.numbers.formats import Format
from finecast.planning.fleet import Prices
from finecast.planning.plan import Plan
from finecast.terminal import finite

KIND: Final = "finecast.prices"
SUFFIX: Final = ".prices.json"
_VERSION: Final = 1
_MOST_BYTES: Final = 256 << 20
"""Prices of a million ops."""
_FIX: Final = "give a NAME.prices.json that finecast tune --prices wrote, unchanged"
_OTHERWISE: Final = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What Python raises where values of another type are read."""
_LIMITED: Final = "openvino"
"""The engine whose kernels all follow oneDNN's limit of instructions."""

T = TypeVar("T")
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """A kind of machine, as one of them was measured.

    Attributes:
        name: What it is called: the file's name.
        runner: What ran the model there.
        machine: The machine.
        inputs: The shapes of the call that was timed, by input.
        prices: What ops take there.
        best: The low formats of its best plan by op; none where fp32 is best.
        call_s: Measured seconds of a call of fp32, and of that plan.
        path: The file that it was read from.
    """

    name: str
    runner: Runner
    machine: Machine
    inputs: Shapes
    prices: Prices
    best: Mapping[str, Format]
    call_s: tuple[float, float] = (math.nan, math.nan)
    path: Path = Path()

    @staticmethod
    def called(path: Path) -> str:
        """What the kind of a file is called."""
        return path.name.removesuffix(SUFFIX).removesuffix(".json")

    @property
    def environment(self) -> dict[str, str] | None:
        """Variables by which a process here runs as that machine; None if none does."""
        sets = self.machine.instruction_sets
        found = limit_to(sets)
        if found and self.runner.name.partition(":")[0] != _LIMITED:
            return None
        return found

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            UsageError: If it cannot be written.
        """
        prices = self.prices
        text: dict[str, Any] = {
            "kind": KIND,
            "version": _VERSION,
            "finecast": environment().finecast,
            "graph": prices.graph,
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "engine": {"name": self.runner.name, "version": self.runner.version},
            "machine": {
                "cpu": self.machine.cpu,
                "cores": self.machine.cores,
                "instruction_sets": list(self.machine.instruction_sets),
            },
            "best": {name: fmt.label for name, fmt in self.best.items()},
            "call_ms": [1e3 * s for s in self.call_s],
            "formats": [fmt.label for fmt in prices.formats],
            "units": [
                {"ops": list(ops), "us": _us(times)}
                for ops, times in zip(prices.units, prices.times_s, strict=True)
            ],
            "permitted": {
                name: sorted(fmt.label for fmt in lows)
                for name, lows in prices.permitted.items()
            },
            "casts": {
                "formats": [fmt.label for fmt in prices.cast_formats],
                "us": {str(value): _us(table) for value, table in prices.casts_s.items()},
            },
            "rest_us": 1e6 * prices.rest_s,
        }
        write_text(path, json.dumps(finite(text), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> MachineKind:
        """Read the file.

        Raises:
            UsageError: If there is none, or it is not one that this release reads.
        """
        found = read_json(
            path,
            what="file of prices",
            kind=KIND,
            version=_VERSION,
            most_bytes=_MOST_BYTES,
            fix=_FIX,
        )

        def part(name: str, made: Callable[[Any], T]) -> T:
            what = "not a file of prices"
            if name not in found:
                raise UsageError(f"{what}: it has no {name!r}", where=str(path), fix=_FIX)
            try:
                return made(found[name])
            except UsageError as error:
                what += f": in {name!r}, {error.what}"
                raise UsageError(what, where=str(path), fix=_FIX) from error
            except _OTHERWISE as error:
                what += f": {name!r} has another form than tune --prices writes"
                raise UsageError(what, where=str(path), fix=_FIX) from error

        formats = part("formats", _formats)
        units = part("units", lambda given: _units(given, len(formats)))
        between, casts = part("casts", _casts)
        permitted = part(
            "permitted",
            lambda given: {
                str(name): frozenset(map(Format.parse, lows)) for name, lows in given.items()
            },
        )
        prices = Prices(
            graph=part("graph", str),
            formats=formats,
            units=tuple(ops for ops, _ in units),
            times_s=tuple(times for _, times in units),
            permitted=permitted,
            cast_formats=between,
            casts_s=casts,
            rest_s=part("rest_us", _second),
        )
        return cls(
            name=cls.called(path),
            runner=part(
                "engine",
                lambda given: Runner(name=str(given["name"]), version=str(given["version"])),
            ),
            machine=part(
                "machine",
                lambda given: Machine(
                    cpu=str(given["cpu"]),
                    cores=int(given["cores"]),
                    instruction_sets=tuple(map(str, given["instruction_sets"])),
                ),
            ),
            inputs=part(
                "inputs",
                lambda given: {
                    str(name): tuple(map(int, shape)) for name, shape in given.items()
                },
            ),
            prices=prices,
            best=part(
                "best",
                lambda given: {str(name): Format.parse(fmt) for name, fmt in given.items()},
            ),
            call_s=part("call_ms", _pair),
            path=path,
        )

    def check(self, graph: str, ops: Sequence[str], inputs: Shapes) -> None:
        """Refuse prices of another model, or of calls of other sizes.

        Args:
            graph: The digest of the graph that is planned.
            ops: The names of its nodes.
            inputs: The shapes of the call that is timed here.

        Raises:
            UsageError: If they are others.
        """
        where, prices = str(self.path), self.prices
        unknown = {op for unit in prices.units for op in unit} - set(ops)
        if prices.graph != graph or unknown:
            raise UsageError(
                f"the prices in {self.path} are of another model: of the graph"
                f" {prices.graph}, and this is {graph}",
                fix="run tune --prices there on the same file, with the same options",
            )
        for name, shape in inputs.items():
            if tuple(self.inputs.get(name, ())) != tuple(shape):
                priced = "x".join(map(str, self.inputs.get(name, ())))
                raise UsageError(
                    f"input {name!r} was {priced or 'absent'} when its calls were timed, and"
                    f" is {'x'.join(map(str, shape))} here",
                    where=where,
                    fix="give tune the same --batch on every machine",
                )


def low_formats(plan: Plan) -> dict[str, Format]:
    """The ops of a plan that are not in fp32, with their formats."""
    return {name: fmt for name, fmt in plan.formats.items() if fmt is not Format.FP32}


def _formats(labels: Sequence[Any]) -> tuple[Format, ...]:
    found = tuple(Format.parse(str(label)) for label in labels)
    if found[:1] != (Format.FP32,) or len({*found}) != len(found):
        raise UsageError("formats do not begin with fp32, or one is named twice")
    return found


def _units(
    given: Sequence[Any], formats: int
) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
    """The ops of each unit, and its times."""
    found = [(tuple(map(str, one["ops"])), _seconds(one["us"], formats)) for one in given]
    ops = [op for names, _ in found for op in names]
    if len({*ops}) != len(ops):
        raise UsageError("an op is in two units")
    return found


def _casts(given: Any) -> tuple[tuple[Format, ...], dict[int, tuple[float, ...]]]:
    """The formats that casts are between, and the times of each value's."""
    between = _formats(given["formats"])
    times = {int(v): _seconds(table, len(between) ** 2) for v, table in given["us"].items()}
    return between, times


def _pair(given: Any) -> tuple[float, float]:
    fp32_ms, best_ms = given
    return _second(fp32_ms, 1e3), _second(best_ms, 1e3)


def _us(times_s: Sequence[float]) -> list[float]:
    """Microseconds, of as many digits as any machine's times have."""
    return [float(f"{1e6 * s:.6g}") for s in times_s]


def _second(given: Any, unit: float = 1e6) -> float:
    """Seconds; what is no number took forever."""
    found = math.inf if given is None else float(given) / unit
    if not found >= 0:
        raise UsageError(f"{given} is no time")
    return found


def _seconds(given: Sequence[Any], count: int) -> tuple[float, ...]:
    if len(given) != count:
        raise UsageError(f"{len(given)} times in place of {count}")
    return tuple(map(_second, given))

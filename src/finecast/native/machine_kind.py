"""What a kind of machine leaves of one run of ``tune``, for a plan of a whole fleet.

Law: the file has all by which a plan is priced as on that machine, and no data: no samples,
no weights. It is read without running code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
_LIMITED: Final = "openvino"
"""The engine whose kernels all follow oneDNN's limit of instructions."""

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
        try:
            return cls._of(path, found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"not a file of prices: {type(error).__name__}: {error}"
            raise UsageError(what, where=str(path), fix=_FIX) from error

    @classmethod
    def _of(cls, path: Path, found: Mapping[str, Any]) -> MachineKind:
        machine, engine, casts = found["machine"], found["engine"], found["casts"]
        formats = _formats(found["formats"])
        between = _formats(casts["formats"])
        units = [tuple(map(str, one["ops"])) for one in found["units"]]
        times = [_seconds(one["us"], len(formats)) for one in found["units"]]
        if len({op for unit in units for op in unit}) != sum(map(len, units)):
            raise ValueError("an op is in two units")
        fp32_ms, best_ms = found["call_ms"]
        prices = Prices(
            graph=str(found["graph"]),
            formats=formats,
            units=tuple(units),
            times_s=tuple(times),
            permitted={
                str(name): frozenset(map(Format.parse, lows))
                for name, lows in found["permitted"].items()
            },
            cast_formats=between,
            casts_s={
                int(value): _seconds(table, len(between) ** 2)
                for value, table in casts["us"].items()
            },
            rest_s=_second(found["rest_us"]),
        )
        return cls(
            name=cls.called(path),
            runner=Runner(name=str(engine["name"]), version=str(engine["version"])),
            machine=Machine(
                cpu=str(machine["cpu"]),
                cores=int(machine["cores"]),
                instruction_sets=tuple(map(str, machine["instruction_sets"])),
            ),
            inputs={
                str(name): tuple(map(int, shape)) for name, shape in found["inputs"].items()
            },
            prices=prices,
            best={str(name): Format.parse(fmt) for name, fmt in found["best"].items()},
            call_s=(_second(fp32_ms, 1e3), _second(best_ms, 1e3)),
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
                f"the prices are of another model: {prices.graph} in place of {graph}",
                where=where,
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
        raise ValueError("formats do not begin with fp32, or one is named twice")
    return found


def _us(times_s: Sequence[float]) -> list[float]:
    """Microseconds, of as many digits as any machine's times have."""
    return [float(f"{1e6 * s:.6g}") for s in times_s]


def _second(given: Any, unit: float = 1e6) -> float:
    """Seconds; what is no number took forever."""
    found = math.inf if given is None else float(given) / unit
    if not found >= 0:
        raise ValueError(f"{given} is no time")
    return found


def _seconds(given: Sequence[Any], count: int) -> tuple[float, ...]:
    if len(given) != count:
        raise ValueError(f"{len(given)} times in place of {count}")
    return tuple(map(_second, given))

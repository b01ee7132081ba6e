"""coremltools: a selector of the ops that become fp16.

Core ML names ops by itself: the plan's ops are found by their kind and their place among the
ops of that kind, and the selector refuses a program that has another number of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from finecast import Format, Plan
from finecast_export.exporting import Exported, Sorted, check_library, heading

TOOL: Final = "coremltools"


def export(plan: Plan) -> Exported:
    """A module with ``convert(program)``, which gives an MLModel of a torch.export program."""
    check_library(plan, TOOL, "aten")
    ops = Sorted.of(plan, TOOL, (Format.FP16,))
    low = {d.node for d in ops.low}
    seen: Counter[str] = Counter()
    places: list[tuple[str, int]] = []
    for decision in plan.counted:
        if decision.node in low:
            places.append((decision.op, seen[decision.op]))
        seen[decision.op] += 1
    text = heading(plan, TOOL, "Converts a program of torch.export to Core ML, op by op.")
    text += "from collections import Counter\n\nimport coremltools as ct\n\n"
    text += f"# Kinds of ops, and their places among all of that kind.\nFP16 = {places!r}\n"
    text += f"COUNTS = {dict(seen)!r}\n"
    text += '''

class Selector:
    """Whether an op becomes fp16: what Core ML adds to the model's ops stays in FP32."""

    def __init__(self):
        self.places = {}
        self.seen = Counter()

    def __call__(self, op):
        if op.name not in self.places:
            self.places[op.name] = op.op_type, self.seen[op.op_type]
            self.seen[op.op_type] += 1
        return self.places[op.name] in FP16

    def check(self):
        other = {k: self.seen[k] for k, n in COUNTS.items() if self.seen[k] != n}
        if other:
            raise ValueError(f"Core ML has other numbers of ops than the plan: {other}")


def convert(program, **options):
    """An MLModel with the listed ops in fp16."""
    selector = Selector()
    precision = ct.transform.FP16ComputePrecision(op_selector=selector)
    model = ct.convert(program, compute_precision=precision, **options)
    selector.check()
    return model
'''
    return Exported(tool=TOOL, text=text, stated=ops.counts, left_out=ops.left_out)

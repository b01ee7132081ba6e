"""One message, read on the command line and in Python."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from onnx import helper

import finecast
from finecast.cli import VERBS, _app
from finecast.cli.output import warn
from finecast.data.criterion import Criterion
from finecast.diagnosis.blaming import Blame
from finecast.diagnosis.emulating import EmulationReport
from finecast.diagnosis.explanation import Explanation
from finecast.errors import KEYWORDS, FinecastError, UsageError, in_shell, malformed
from finecast.naming import options_of
from finecast.native.profiling import ProfileReport
from finecast.plugin import registered
from finecast.reports.base import Report, TextTable
from finecast.terminal import Verbatim
from finecast.tuning.goal import Execution
from finecast.tuning.result import Result


def test_python_reads_keywords_and_the_command_line_options() -> None:
    error = UsageError("too high", where="--tolerance", fix="give --no-verify or --op A=fp32")
    assert error.line == "too high (--tolerance): give --no-verify or --op A=fp32"
    assert str(error) == "too high (tolerance): give verify=False or Policy.op_formats A=fp32"


def test_commands_stay_as_they_are() -> None:
    told = str(FinecastError("give what `convert --plan-out` wrote, or --plan"))
    assert told == "give what `convert --plan-out` wrote, or plan"


@pytest.mark.parametrize("text", ["--saved-model x", "a--data", "--data-type", "x --dat"])
def test_what_is_no_option_stays(text: str) -> None:
    assert str(FinecastError(text)) == text


OF_PLUGINS = {"--model", "--blame", "--diff", "--per-op", "--study", "--to"}
"""Options that only verbs of plugins have."""


def test_every_name_is_an_option() -> None:
    options: set[str] = set()
    for verb in VERBS:
        group: Any = typer.main.get_command(_app([verb]))
        for given in group.commands[verb].params:
            options.update((*given.opts, *given.secondary_opts))
    # Python has further ones: other spellings of the limit, and the number of processes.
    for group in (Criterion, Execution):
        options.update(f for one in options_of(group).values() for f in one.flags)
        options.update(f"--{name}" for name in options_of(group))
    named = {o for name in KEYWORDS for o in name.split("/")}
    assert named - options <= (OF_PLUGINS if registered().absent else set())


def test_every_option_with_a_keyword_has_its_name() -> None:
    """``--slices`` and others were named where the caller had written ``slices=``."""
    named = {o: name for option, name in KEYWORDS.items() for o in option.split("/")}
    missing: set[str] = set()
    for verb in VERBS:
        function = getattr(finecast, verb, None)
        keywords = inspect.signature(function).parameters if callable(function) else {}
        group: Any = typer.main.get_command(_app([verb]))
        for given in group.commands[verb].params:
            names = [o for o in given.opts if o.startswith("--")]
            missing |= {o for o in names if given.name in keywords and o not in named}
    assert not missing


def test_reports_name_keywords_in_python_alone() -> None:
    class Told(Report):
        @property
        def lines(self) -> list[str]:
            return ["use --metric cosine", "warning: --no-lock", Verbatim("f --plan p")]

        @property
        def tables(self) -> list[TextTable]:
            return [TextTable(left=("op",), rows=[("Add",)], notes=("see --slices",))]

        def _content(self) -> dict[str, Any]:
            return {"why": "--metric"}

    told = Told()
    assert str(told) == "use metric cosine\n  warning: lock=False\nf --plan p"
    assert "<p>see slices</p>" in told._repr_html_()
    assert told.lines[0] == "use --metric cosine"
    assert told.to_dict() == {"why": "--metric"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Warned(Report):
    warnings: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        return ["done", *in_shell(self.warnings)]

    def _content(self) -> dict[str, Any]:
        return {"warnings": in_shell(self.warnings)}


def test_python_reads_warnings_by_keywords_and_the_command_line_by_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = pickle.loads(pickle.dumps(Warned(warnings=("use --eval", "see `f --of y`"))))
    told = replace(told, warnings=(*told.warnings, "or --of"))  # as verbs add theirs
    assert told.warnings == ("use evaluate", "see `f --of y`", "or of")
    assert str(told) == "done\n  use evaluate\n  see `f --of y`\n  or of"
    assert told.to_dict() == {"warnings": ["use --eval", "see `f --of y`", "or --of"]}
    warn(*told.warnings)
    assert capsys.readouterr().err.splitlines() == [
        "warning: use --eval",
        "warning: see `f --of y`",
        "warning: or --of",
    ]


@pytest.mark.parametrize(
    "report", [Result, Blame, EmulationReport, Explanation, ProfileReport]
)
def test_every_report_with_warnings_gives_them_in_pythons_words(report: type[Report]) -> None:
    """``__new__`` leaves out what a report is of; the warnings are all that is read here."""
    told: Any = report.__new__(report)
    object.__setattr__(told, "warnings", ("use --of",))
    told.__post_init__()
    assert told.warnings == ("use of",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slices": 9}, "(slices)"),
        ({"tolerance": 2.0}, "(tolerance)"),
        ({"metric": "nope"}, "(metric)"),
        ({"objective": "sizes"}, "(objective)"),
        ({"max_trials": 0}, "(max_trials)"),
        ({"timeout_s": -1.0}, "(timeout_s)"),
        ({"min_speedup": 0.0}, "(min_speedup)"),
        ({"policy": "auto:int8+sideways"}, "(Policy.adjust)"),
        ({"policy": None}, "None is no policy"),
        ({"data": None}, "give data FILE.npz or evaluate"),
    ],
)
def test_tune_names_its_keywords(options: dict[str, object], said: str) -> None:
    ports = [helper.make_tensor_value_info(n, 1, ["n", 4]) for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"], "r")], "g", ports[:1], ports[1:]
    )
    opset = [helper.make_opsetid("", 17)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opset, ir_version=8)
    given: dict[str, object] = {"data": {"x": np.eye(4, dtype=np.float32)}, **options}
    with pytest.raises(UsageError) as caught:
        finecast.tune(model, **given)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "--" not in str(caught.value)


def test_an_output_that_the_fp32_model_lacks_is_named() -> None:
    from finecast.data.metrics import get_metric

    ones = np.ones((4, 2), np.float32)
    for metric in ("agreement", "cosine"):
        with pytest.raises(UsageError, match="no output 'z', but y"):
            get_metric(metric).start().update({"z": ones}, None, {"y": ones})


@pytest.mark.parametrize(
    "line",
    [
        "convert m.pt2 -o low.pt2 --from-type fp16",
        "convert m.pt2 -o low.pt2 --one-file",
    ],
)
def test_refusals_by_a_models_name_load_no_library(line: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    for name in ("m.pt2", "d.npz"):
        (tmp_path / name).write_bytes(b"")
    code = (
        "import sys; from finecast.cli import main;"
        f"code = main({line.split()!r}); sys.exit(code + 100 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "does not apply to .pt2 files" in done.stderr
    assert done.returncode == 2


def test_what_is_too_long_to_read_is_cut_in_the_middle() -> None:
    name = f"a{'x' * 5000}z"
    error = UsageError(f"unknown op {name!r}", where=f"/{'d' * 250}/{'m' * 250}.onnx")
    assert error.what.startswith("unknown op 'axxx")
    assert "more characters) ..." in error.what
    assert error.what.endswith("xz'")
    assert len(error.what) < 140
    with_blanks = UsageError(f"unknown op {'x y ' * 5000!r}, not OpenVINO's 'add'").what
    assert len(with_blanks) < 170
    assert with_blanks.endswith("x y ', not OpenVINO's 'add'")
    assert error.where == f"/{'d' * 250}/{'m' * 250}.onnx"  # as long as a path may be
    assert len(UsageError("x y " * 5000).line) < 2100


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("opset"), "it has no 'opset'"),
        (ValueError("axis -1"), "its content is of another form (axis -1)"),
        (ValueError("invalid literal for int() with base 10: 'a'"), None),
        (TypeError("'NoneType' object is not iterable"), None),
        (RecursionError("maximum recursion depth exceeded"), None),
    ],
)
def test_malformed_content_is_told_without_pythons_words(
    error: Exception, text: str | None
) -> None:
    assert malformed(error) == (text or "its content is of another form")

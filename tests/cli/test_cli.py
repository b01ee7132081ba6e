from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import finecast
from finecast.cli import VERBS, main
from finecast.cli.output import write_json
from finecast.errors import EngineError, ExitCode
from finecast.progress import shown


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Replaces the verb ``doctor`` by a function."""

    def replace(function: Callable[[], object]) -> None:
        module = ModuleType("finecast.cli.doctor")

        def run() -> object:
            return function()

        vars(module)["run"] = run
        monkeypatch.setitem(sys.modules, "finecast.cli.doctor", module)

    return replace


def test_help_lists_every_verb_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom finecast.cli import main\nassert main(['--help']) == 0\n"
        "heavy = {'numpy', 'scipy', 'onnx', 'openvino', 'onnxruntime', 'rich', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    for name, verb in VERBS.items():
        assert f"{name} " in done.stdout
        assert verb.summary in done.stdout


def test_help_of_a_verb_loads_no_library_of_solvers() -> None:
    code = (
        "import sys\nfrom finecast.cli import main\nassert main(['convert', '--help']) == 0\n"
        "print('scipy.sparse' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("finecast tu", ["tune"]),
        ("finecast tune --met", ["--metric"]),
        ("finecast convert m.onnx --auto-cast-", ["--auto-cast-type"]),
    ],
)
def test_the_shell_completes_verbs_and_their_options(words: str, wanted: list[str]) -> None:
    line = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "finecast"],
        env={**os.environ, **line, "_FINECAST_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == wanted


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.DONE
    assert "Usage: finecast" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"finecast {finecast.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_nothing_twice(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``apply`` had its plan among the options, too."""
    assert main([verb, "--help-all" if verb == "tune" else "--help"]) == ExitCode.DONE
    text = capsys.readouterr().out
    rows = re.findall(r"^  (\S+) +<", text, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert "{" not in text.partition("\n")[0]


def test_the_version_is_that_of_the_package() -> None:
    stated = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    assert finecast.__version__ == stated
    assert not hasattr(finecast, "__author__")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["docter"], "docter"),
        (["doctor", "--bad"], "--bad"),
        (["profile"], "MODEL"),
        (["profile", "m.onnx", "--batch", "none"], "--batch"),
    ],
)
def test_errors_of_usage_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_failures_are_one_line_with_their_code(
    verb: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise EngineError("it\nbroke", where="m.onnx", fix="mend it")

    verb(fail)
    assert main(["doctor"]) == ExitCode.FAILED
    assert capsys.readouterr().err == "error: it broke (m.onnx): mend it\n"
    with pytest.raises(EngineError):
        main(["doctor", "--debug"])


def test_the_verbs_return_value_is_the_exit_code(
    verb: Callable[[Callable[[], object]], None],
) -> None:
    verb(lambda: ExitCode.NOT_IMPROVED)
    assert main(["doctor"]) == ExitCode.NOT_IMPROVED
    verb(lambda: None)
    assert main(["doctor"]) == ExitCode.DONE


@pytest.mark.parametrize("name", VERBS)
def test_help_fits_80_columns_and_has_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert any(line.strip().startswith(f"finecast {name}") for line in lines)
    # Types are named as users know them: it said ``<int range>`` and ``<list[Path]>``.
    assert [line for line in lines if re.search(r"<\w+[^>]*>", line)] == []


def test_interrupts_exit_with_130(verb: Callable[[Callable[[], object]], None]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    verb(interrupt)
    assert main(["doctor"]) == 130


def test_bugs_are_not_hidden(verb: Callable[[Callable[[], object]], None]) -> None:
    def bug() -> None:
        raise ZeroDivisionError

    verb(bug)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_every_verb_has_its_module() -> None:
    assert all(find_spec(verb.module) is not None for verb in VERBS.values())


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": [float("inf"), 1.5, (float("nan"),)], "b": None})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None]], "b": None}


def test_progress_is_silent_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown("working") as report:
        report("half", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_model_that_calls_exit_does_not_end_the_program(
    verb: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(lambda: sys.exit(0))
    assert main(["doctor"]) == ExitCode.USER_CODE
    assert "something called sys.exit(0)" in capsys.readouterr().err


def test_output_that_nobody_reads_ends_quietly() -> None:
    command = [sys.executable, "-m", "finecast", "formats"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as run:  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 141

"""What users' functions do never ends in a traceback, a wrong exit code, or a stale answer."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from finecast import cli
from finecast.cli import entry, main
from finecast.data.functions import load_function, source_digest
from finecast.errors import ExitCode, OutOfMemoryError, UserCodeError
from finecast.measure.study import Study, Trial, TrialKey
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]

SCORE = (
    "import itertools, numpy as np\nX = np.ones((8, 16), np.float32)\n"
    "COUNT = itertools.count(1)\nnp.seterr(divide='ignore')\n"
)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("import sys; sys.exit(0)", ExitCode.USER_CODE, "it calls sys.exit(0)"),
        ("raise SystemExit", ExitCode.USER_CODE, "it calls sys.exit(None)"),
        ("return f(run)", ExitCode.USER_CODE, "RecursionError"),
        ("raise MemoryError", ExitCode.MEMORY, "out of memory"),
        ("raise MemoryError('8 GB')", ExitCode.MEMORY, "out of memory: 8 GB"),
        ("raise KeyboardInterrupt", ExitCode.INTERRUPTED, "interrupted"),
        ("raise ValueError('a\\n\\x1b[31mb')", ExitCode.USER_CODE, r"ValueError: a \x1b[31mb"),
        ("return 'high'", ExitCode.USER_CODE, "'high' of type str, not a number"),
        ("return '0.9'", ExitCode.USER_CODE, "'0.9' of type str, not a number"),
        ("return None", ExitCode.USER_CODE, "None of type NoneType, not a number"),
        ("return 0.9", ExitCode.USER_CODE, "never ran the model"),
        ("return run({'x': X}) and 1 / np.float64(0)", ExitCode.USER_CODE, "inf for the fp32"),
        ("return run({'x': X}) and next(COUNT)", ExitCode.USER_CODE, "the same outputs"),
        ("return run({'x': X}) and 0.9", ExitCode.USER_CODE, "whatever the outputs are"),
    ],
)
@pytest.mark.parametrize("place", ["--eval", "--calib", "--rules", "import"])
def test_each_has_its_exit_code_and_one_line(
    finecast: Finecast,
    net: Path,
    data: Path,
    tmp_path: Path,
    body: str,
    code: int,
    words: str,
    place: str,
) -> None:
    mine = tmp_path / "mine.py"
    returns = body.startswith("return ")
    if returns and place != "--eval" and "f(run)" not in body:
        pytest.skip("a number is asked of --eval alone")
    function = f"def f(run=None): {body}\ndef rule(node): return f(node)\n"
    mine.write_text(SCORE + function + ("f()\n" if place == "import" else ""))
    options = {
        "--eval": ["--eval", f"{mine}:f"],
        "--calib": ["--data", data, "--calib", f"{mine}:f"],
        "--rules": ["--data", data, "--rules", mine],
        "import": ["--eval", f"{mine}:f"],
    }[place]
    answer = finecast("tune", net, "-o", tmp_path / "low.onnx", *options)
    assert answer.code == code, answer.err
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "low.onnx").exists()


def test_a_trial_is_found_again_only_for_the_same_code(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    mine, beside = folder / "mine_too.py", folder / "beside_mine_too.py"

    def digest(text: str) -> str:
        mine.write_text(text)
        return source_digest(load_function(f"{mine}:f"))

    beside.write_text("VALUE = 1\n")
    first = digest("import beside_mine_too\ndef f(run): return 1.0\n")
    assert digest("import beside_mine_too\ndef f(run): return 1.0\n") == first
    assert digest("import beside_mine_too\ndef f(run): return 2.0\n") != first
    assert digest("import beside_mine_too\ndef f(run): return 1.0\n") == first
    beside.write_text("VALUE = 2\n")
    assert digest("import beside_mine_too\ndef f(run): return 1.0\n") != first


def test_typed_in_functions_are_never_the_same() -> None:
    space: dict[str, Callable[[object], float]] = {}
    exec("def f(run): return 1.0", {"__name__": "typed_in"}, space)
    assert source_digest(space["f"]) != source_digest(space["f"])


def test_a_file_that_is_named_thrice_is_imported_once_in_a_process(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        SCORE + f"with open({str(tmp_path / 'imports')!r}, 'a') as file: file.write('x')\n"
        "def score(run): return float(next(iter(run({'x': X}).values())).sum())\n"
        "def feeds(): yield {'x': X}\n"
        "def rule(node): return 'fp32'\n"
    )
    options = ["--eval", f"{mine}:score", "--calib", f"{mine}:feeds", "--rules", mine]
    answer = finecast("tune", net, "-o", tmp_path / "low.onnx", *options)
    assert answer.code == ExitCode.NOT_IMPROVED, answer.err
    # Rules are asked in this process, functions in the one that evaluates.
    assert (tmp_path / "imports").read_text() == "xx"


def test_two_files_of_one_name_are_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f(): return {name!r}\n")
    first, second = (load_function(f"{tmp_path}/{n}/mine.py:f") for n in ("a", "b"))
    assert (first(), second()) == ("a", "b")
    assert sys.modules[first.__module__] is not sys.modules[second.__module__]


def test_rules_of_two_files_of_one_name_both_count(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    for name, answer in (("a", "'fp32'"), ("b", "None")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def rule(node): return {answer}\n")
    rules = [w for name in ("a", "b") for w in ("--rules", tmp_path / name / "mine.py")]
    answer = finecast("explain", net, "product", "--auto-cast", "all", "--json", *rules)
    assert answer.json["format"] == "fp32"
    assert f"{tmp_path / 'a' / 'mine.py'}:rule" in answer.out


def test_resume_says_when_there_is_nothing(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    line = ["tune", net, "-o", tmp_path / "low.onnx", "--data", data, "--auto-cast", "none"]
    answer = finecast(*line, "--resume", "--json")
    assert answer.err.count("--resume") == 1
    assert "there is no study" in answer.err
    assert answer.json["reused_trials"] == 0
    key = TrialKey(model="another", plan="p", engine="openvino", data="d")
    trial = Trial(key=key, name="plan 1", metric=1.0, passed=True, latency_s=1e-3)
    Study(tmp_path / "low.study.db").add(trial)
    answer = finecast(*line, "--resume")
    assert "no trial in" in answer.err
    assert "it has none of this model, data, code, objective and baseline" in answer.err


@pytest.mark.parametrize(
    "verb", ["tune", "convert", "inspect", "profile", "docter", "emulate"]
)
def test_errors_as_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([verb, "no\x1bmodel.onnx", "-o", "low.onnx", "--json"])
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error.keys() == {"what", "where", "fix", "exit_code"}
    assert error["exit_code"] == code == ExitCode.USAGE
    assert captured.err.startswith("error: ")
    assert error["what"].split()[0] in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_errors_of_users_code_as_json(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import sys\ndef f(run): sys.exit(0)\n")
    line = ["tune", net, "-o", tmp_path / "low.onnx", "--eval", f"{mine}:f", "--json"]
    assert finecast(*line).json["error"] == {
        "what": "the evaluation function failed: it calls sys.exit(0)",
        "where": f"{mine}:f",
        "fix": "it gets run(feeds) and returns a number: try it on the fp32 model alone",
        "exit_code": 4,
    }


def test_codes_of_python_errors() -> None:
    assert UserCodeError("x").exit_code == 4
    assert OutOfMemoryError("x").exit_code == 5


def test_a_bug_has_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug() -> int:
        raise ZeroDivisionError("\x1b[2J")

    monkeypatch.setattr("finecast.cli.main", bug)
    assert entry() == ExitCode.BUG
    assert r"ZeroDivisionError: \x1b[2J" in capsys.readouterr().err


def end_while_it_evaluates(
    net: Path, body: str, number: signal.Signals, times: int = 1
) -> None:
    """Run ``tune`` with a function of this body, and end it once that says "evaluating".

    The signal is sent so many ``times``, until the process has ended.
    """
    mine = net.with_name("mine.py")
    mine.write_text(
        f"{SCORE}import sys, time\n"
        "def f(run):\n"
        f"{body}"
        "    print('evaluating', flush=True)\n"
        "    time.sleep(60)\n"
    )
    options = ["--eval", f"{mine}:f", "--engine", "onnxruntime"]  # one loads in less time
    command = [sys.executable, "-m", "finecast", "tune", str(net), *options]
    with subprocess.Popen(
        [*command, "-o", str(net.with_name("low.onnx"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    ) as run:
        assert run.stderr is not None
        while run.stderr.readline() != "evaluating\n":  # standard output has results alone
            assert run.poll() is None
        for _ in range(times):
            run.send_signal(number)  # to a process that has ended it does nothing
            time.sleep(0.05)
        _, err = run.communicate(timeout=60)
    assert run.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in err
    last = err.splitlines()[-1]  # on a slow machine progress is told before it
    assert last == "error: interrupted: no trial was finished, nothing was written"


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(net: Path, tmp_path: Path) -> None:
    study = tmp_path / "low.study.db"
    Study(study)
    end_while_it_evaluates(net, "    run({'x': X})\n", signal.SIGINT)
    assert Study(study).count() == 0
    left = {p.name for p in tmp_path.iterdir()} - {f"{study.name}-{s}" for s in ("wal", "shm")}
    assert left == {"low.study.db", "mine.py", "net.onnx"}


@pytest.mark.parametrize("times", [3, 40])
def test_ctrl_c_pressed_again_changes_nothing(net: Path, times: int) -> None:
    end_while_it_evaluates(net, "", signal.SIGINT, times)


def test_ctrl_c_after_one_that_was_caught_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    interrupts = cli.Interrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupts.handle(signal.SIGINT, None)
    interrupts.handle(signal.SIGINT, None)
    assert codes == []
    interrupts.handled_s = -math.inf
    interrupts.handle(signal.SIGINT, None)
    assert codes == [ExitCode.INTERRUPTED]
    assert capsys.readouterr().err == "error: interrupted: nothing half-written is left\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_but_the_user_s_files(
    net: Path, tmp_path: Path, number: signal.Signals
) -> None:
    end_while_it_evaluates(net, "", number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "net.onnx"]


def test_a_signal_that_the_parent_ignores_stays_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nohup does with SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen: list[object] = []

    def command() -> int:
        seen.append(signal.getsignal(signal.SIGHUP))
        return 0

    monkeypatch.setattr("finecast.cli.main", command)
    try:
        assert entry() == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_resuming_a_study_without_trials_is_told(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    study = tmp_path / "low.study.db"
    Study(study)
    options = ["--data", data, "--metric", "agreement", "--resume"]
    err = finecast("tune", net, "-o", tmp_path / "low.onnx", *options).err
    assert f"--resume: {study} has no trial: starting anew" in err
    assert "was of use" not in err


def test_ctrl_c_while_a_module_loads_is_one_line(net: Path, tmp_path: Path) -> None:
    """Extension modules make an ImportError of it."""
    (tmp_path / "extension.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('numpy failed to import') from None\n",
        encoding="utf-8",
    )
    rules = tmp_path / "rules.py"
    rules.write_text("import extension\ndef rule(node): return None\n", encoding="utf-8")
    line = ["convert", str(net), "-o", str(tmp_path / "low.onnx"), "--rules", str(rules)]
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "finecast", *line],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stderr == "error: interrupted: nothing half-written is left\n"

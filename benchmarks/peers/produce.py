"""One tool on one model: a process of its own, held to a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.environments import NotInstalledError, environment
from benchmarks.peers.task import Task
from benchmarks.peers.tools import TOOLS, TRANSFORMERS

_ROOT: Final = Path(__file__).resolve().parents[2]


def produced(
    tool: str, task: Task, *, envs: Path, files: Path, limit_s: float
) -> dict[str, Any]:
    """What a tool makes of a model, or why it makes nothing.

    Args:
        tool: A key of ``TOOLS``.
        task: The model and its data.
        envs: Where environments are.
        files: A folder for the file that is made.
        limit_s: Seconds after which the tool is ended.

    Returns:
        What its driver prints: ``file``, ``failed`` or ``not_applicable`` with the reason;
        seconds, processor seconds, evaluations.
    """
    one, name = TOOLS[tool], task.folder.name
    try:
        python = environment(one.env, envs).python if one.env else Path(sys.executable)
    except NotInstalledError as why:
        return {"failed": f"does not install: {why}"}
    files.mkdir(parents=True, exist_ok=True)
    for old in files.glob(f"{tool}.*"):  # a study speeds up the next run
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    options = dict(one.options)
    if one.transformer:
        options["transformer"] = name in TRANSFORMERS
    job = files / f"{tool}.json"
    stated = {"task": str(task.folder), "output": str(files / tool), "options": options}
    job.write_text(json.dumps(stated), encoding="utf-8")
    driver = f"benchmarks.peers.drivers.{one.driver}"
    return _driven([str(python), "-m", driver, str(job)], limit_s, files / f"{tool}.log")


def _driven(command: list[str], limit_s: float, log: Path) -> dict[str, Any]:
    """The last line of a driver; its stderr goes to a file, as tools print a lot."""
    # No tool may look for models or data elsewhere, and none reports what it is used for.
    environ = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "OLIVE_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "PYTHONNOUSERSITE": "1",
    }  # fmt: skip
    with log.open("wb") as said:
        running = subprocess.Popen(
            command, cwd=log.parent, env=environ | {"PYTHONPATH": _path(environ)},
            stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit_s:g} s", "seconds": limit_s}
        finally:  # tools start processes of their own; they end with the tool
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if running.returncode or not lines:
        return {"failed": _last_words(log) or f"exit code {running.returncode}"}
    return json.loads(lines[-1])


def _path(environ: dict[str, str]) -> str:
    """This checkout before what is there: drivers are modules of it."""
    given = environ.get("PYTHONPATH")
    return os.pathsep.join([str(_ROOT), *([given] if given else [])])


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " ".join(lines[-1].split())[:240] if lines else ""

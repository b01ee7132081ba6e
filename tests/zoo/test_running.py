"""Limits of the zoo's processes, and whose failure is reported."""

import json
import sys
from pathlib import Path

from zoo.outcome import Outcome, Status
from zoo.running import Limits, run

STAGES = ["one", "two", "three"]
PRELUDE = """
import json, os, sys, time
stages = [a for a in sys.argv[3:] if a in ("one", "two", "three")]
def say(**content):
    print(json.dumps(content), flush=True)
def done(stage, status="ok"):
    say(outcome={"network": "net", "stage": stage, "status": status, "seconds": 0.0,
                 "cause": "", "figures": {}, "notes": [], "trace": ""})
"""


def outcomes(tmp_path: Path, body: str) -> list[Outcome]:
    script = tmp_path / "process.py"
    script.write_text(PRELUDE + body)
    limits = Limits(seconds=dict.fromkeys(STAGES, 1.0), command=(sys.executable, str(script)))
    return list(run("net", list(STAGES), limits))


def test_a_stage_that_hangs_is_stopped_and_the_rest_still_runs(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path,
        """
for stage in stages:
    say(stage=stage)
    if stage == "two":
        say(step="waiting for nothing", status="engine")
        time.sleep(60)
    done(stage)
""",
    )
    assert [(o.stage, o.status) for o in found] == [
        ("one", Status.OK),
        ("two", Status.ENGINE),
        ("three", Status.OK),
    ]
    assert found[1].cause == "waiting for nothing: stopped after 1 s"


def test_a_process_that_dies_is_the_failure_of_its_step(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path,
        """
for stage in stages:
    say(stage=stage)
    if stage == "one":
        say(step="converting", status="finecast")
        sys.exit("out of memory")
    done(stage)
""",
    )
    assert [o.status for o in found] == [Status.FINECAST, Status.OK, Status.OK]
    assert found[0].cause == "converting: died (1) out of memory"


def test_a_process_hears_which_stages_failed_before_it(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path,
        """
if "one" in stages:
    done("one", "export")
    say(stage="two")
    sys.exit(1)
told = {"--failed=one", "--failed=two"} <= set(sys.argv)
done("three", "skipped" if told else "ok")
""",
    )
    assert [o.status for o in found] == [Status.EXPORT, Status.NETWORK, Status.SKIPPED]


def test_a_network_that_cannot_be_built_ends_its_run(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "sys.exit('no such library')")
    assert [(o.stage, o.status) for o in found] == [("build", Status.NETWORK)]


def test_outcomes_come_back_from_json() -> None:
    outcome = Outcome(
        network="net", stage="one", status=Status.EXPORT, figures={"a": 0.5}, notes=("b",)
    )
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome

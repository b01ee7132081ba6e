"""What a user's function does to the process: its folder, its forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finecast.errors import UserCodeError
from finecast.usercode import guarded

FORKS = """
import os, sys, time
from finecast.usercode import guarded
sys.stdout.flush()
with guarded("it failed", where="f", fix="mend it"):
    child = os.fork()
    if not child:
        {body}
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("went on", flush=True)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_current_folder_is_put_back(fails: bool, tmp_path: Path) -> None:
    before = os.getcwd()

    def moves() -> None:
        with guarded("it failed", where="f", fix="mend it"):
            os.chdir(tmp_path)
            if fails:
                raise ValueError

    if fails:
        with pytest.raises(UserCodeError):
            moves()
    else:
        moves()
    assert os.getcwd() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('why')", 1),
        ("raise ValueError('why')", 1),
    ],
)
def test_a_forked_process_ends_with_the_code(body: str, code: int) -> None:
    """There is one process behind the guarded code, and it does not wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS.format(body=body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [f"child ended with {code}", "went on"]
    assert ("why" in done.stderr) == ("why" in body)

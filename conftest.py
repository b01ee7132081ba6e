"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from finecast.measure import timing
from finecast.measure.racing import Effort
from finecast.native import lock, profiles
from finecast.tuning import measuring
from tests import times

if TYPE_CHECKING:
    from finecast.engines.torch.rates import Rate
    from finecast.numbers.formats import Format

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests that run at the same time do not each take all cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells have their background jobs ignore the first, and nohup the second: finecast, run by
# tests, would as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Speed is benchmarked, never tested: no deadline anywhere.
settings.register_profile("dev", deadline=None)
# The same examples at every run, and a line that reproduces a failure elsewhere.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

GOLDENS = Path(__file__).parent / "tests" / "goldens"
_CACHES = count()


@pytest.fixture(autouse=True)
def brief_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are raced for the fewest rounds and profiled in few: no time decides a test."""
    for name in ("RANKING", "FINAL", "DUEL", "BASELINE"):
        monkeypatch.setattr(measuring, name, Effort(min_time_s=0.0, order=False))
    monkeypatch.setattr(lock, "TIMED", Effort(min_time_s=0.0, rounds=2, warmup=1))
    monkeypatch.setattr(profiles, "_MOST_REPEATS", 15)


@pytest.fixture(autouse=True)
def stated_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time of this machine decides a test, but those that have the mark ``real_clock``."""
    if request.node.get_closest_marker("real_clock") is None:
        times.state(monkeypatch)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process counts as busy: what a test finds does not depend on its neighbours.

    How long this process waited for a processor is not known, as no thread is.
    """
    monkeypatch.setattr(timing, "_THREADS", Path("no-threads"))


@pytest.fixture(autouse=True)
def own_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is kept between runs on this machine changes no test, and no test changes it.

    Folders have numbers of their own: ``mktemp`` lists those of all earlier tests for one.
    """
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(_CACHES))
    folder.mkdir(parents=True)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write the golden files anew"
    )


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`check_golden(name, text)`: the text equals the file `tests/goldens/<name>`."""
    update = bool(request.config.getoption("--update-goldens"))

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-goldens"
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture
def fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch on a device where bf16 pays and fp16 does not, whatever this one is."""
    pytest.importorskip("torch")
    from finecast.engines.torch import rates
    from finecast.numbers.formats import Format

    def rate(device: str, fmt: Format, threads: int) -> Rate:
        del device, threads
        speed = {Format.BF16: 4.0, Format.FP16: 0.1}.get(fmt, 1.0)
        return rates.Rate(
            product_tflops=0.001 * speed, speed=speed, bandwidth_gb_s=50.0, overhead_s=1e-7
        )

    monkeypatch.setattr(rates, "rate", rate)

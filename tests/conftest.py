"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Speed is benchmarked, never tested: no deadline anywhere.
settings.register_profile("dev", deadline=None)
# The same examples at every run, and a line that reproduces a failure elsewhere.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

GOLDENS = Path(__file__).parent / "goldens"


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

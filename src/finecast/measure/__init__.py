"""Measuring time and memory, and keeping what was measured, with its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.measure.environment import Environment
    from finecast.measure.environment import version_of as version_of
    from finecast.measure.racing import ANCHOR as ANCHOR
    from finecast.measure.racing import Effort as Effort
    from finecast.measure.racing import Race as Race
else:
    __getattr__ = imported_on_use(__name__)


def machine_environment() -> Environment:
    """This machine and this installation, as they are recorded beside a measurement."""
    from finecast.measure.environment import environment

    return environment()

"""Devices that are not here: their specifications, numerics and compilers' options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.devices.choice import CastChoice as CastChoice
    from finecast.devices.choice import CastOptions as CastOptions
    from finecast.devices.choice import CastRequest as CastRequest
    from finecast.devices.choice import choose as choose
    from finecast.devices.choice import emulated_codes as emulated_codes
    from finecast.devices.choice import format_notes as format_notes
    from finecast.devices.choice import planned as planned
    from finecast.devices.choice import stated_formats as stated_formats
    from finecast.devices.emulation import Emulation as Emulation
    from finecast.devices.emulation import check as check
    from finecast.devices.emulation import check_formats as check_formats
    from finecast.devices.emulation import explicit_casts as explicit_casts
    from finecast.devices.emulation import setting_of as setting_of
    from finecast.devices.targets import Relayout as Relayout
    from finecast.devices.targets import load_target as load_target
    from finecast.devices.targets import target_named as target_named
else:
    __getattr__ = imported_on_use(__name__)

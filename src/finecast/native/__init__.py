"""Opened models of all libraries, joined with what runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.native.artefact import Verified as Verified
    from finecast.native.conversion_notes import commonest_verdict as commonest_verdict
    from finecast.native.conversion_notes import plan_notes as plan_notes
    from finecast.native.device import DeviceModel as DeviceModel
    from finecast.native.engine_model import EngineModel as EngineModel
    from finecast.native.engine_subject import EngineSubject as EngineSubject
    from finecast.native.model import OpenedModel as OpenedModel
    from finecast.native.opening import check_written as check_written
    from finecast.native.planning import Judging as Judging
    from finecast.native.planning import check_stated as check_stated
    from finecast.native.roundings import Times as Times
    from finecast.native.source import EngineBuilt as EngineBuilt
    from finecast.native.source import VerifyOn as VerifyOn
    from finecast.native.source import check_trust as check_trust
    from finecast.native.subject import Built as Built
    from finecast.native.subject import Subject as Subject
    from finecast.native.verifying import verify as verify
else:
    __getattr__ = imported_on_use(__name__)

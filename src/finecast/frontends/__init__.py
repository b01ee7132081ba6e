"""Reading a framework's model as the neutral graph, and making a plan's edits in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.frontends.dry_run import DryRun as DryRun
    from finecast.frontends.dry_run import warm_up as warm_up
    from finecast.frontends.keras_models import KERAS_SUFFIX as KERAS_SUFFIX
    from finecast.frontends.keras_models import check_names as check_names
    from finecast.frontends.keras_models import load_keras as load_keras
    from finecast.frontends.keras_models import reason as reason
    from finecast.frontends.keras_models import with_flat_outputs as with_flat_outputs
    from finecast.frontends.native_model import RUNS as RUNS
    from finecast.frontends.native_model import SCALE as SCALE
    from finecast.frontends.native_model import NativeModel as NativeModel
    from finecast.frontends.native_model import adjust as adjust
    from finecast.frontends.native_model import replay as replay
    from finecast.frontends.prepared import AppliedModel as AppliedModel
    from finecast.frontends.prepared import ModelLibrary as ModelLibrary
    from finecast.frontends.prepared import PreparedModel as PreparedModel
    from finecast.frontends.replaying import check_made_for as check_made_for
    from finecast.frontends.replaying import edits_of as edits_of
    from finecast.frontends.replaying import resolve_io as resolve_io
    from finecast.frontends.saved_models import CHOOSE as CHOOSE
    from finecast.frontends.saved_models import MAKE_ONE as MAKE_ONE
    from finecast.frontends.saved_models import NONE as NONE
    from finecast.frontends.saved_models import NOTES_FILE as NOTES_FILE
    from finecast.frontends.saved_models import SERVING as SERVING
    from finecast.frontends.saved_models import check_state as check_state
    from finecast.frontends.saved_models import notes_in as notes_in
else:
    __getattr__ = imported_on_use(__name__)

"""PyTorch modules and exported programs, opened, and run compiled or as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.native.torch.model import TorchModel as TorchModel
    from finecast.native.torch.model import of_module as of_module
    from finecast.native.torch.model import slow_formats as slow_formats
    from finecast.native.torch.planning import autocast_formats as autocast_formats
    from finecast.native.torch.planning import device_of as device_of
    from finecast.native.torch.planning import planner_of as planner_of
else:
    __getattr__ = imported_on_use(__name__)

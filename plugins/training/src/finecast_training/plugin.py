"""What the plugin for training in PyTorch adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin

PLUGIN: Final = Plugin(
    name="training",
    summary="mixed-precision training steps of PyTorch: torch.compile's backend",
    names={
        "finecast.torch.Backend": "finecast_training.backend:Backend",
        "finecast.torch.TrainingStep": "finecast_training.step:TrainingStep",
        "finecast.torch.compile": "finecast_training.backend:compile",
        "finecast.torch.load_step": "finecast_training.tuned_step:load_step",
        "finecast.torch.tune_step": "finecast_training.step_tuning:tune_step",
    },
)

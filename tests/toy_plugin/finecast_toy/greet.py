"""``finecast greet``: how many ops a model has."""

from pathlib import Path
from typing import Annotated

import typer

import finecast
from finecast.plugin import say


def greeting(model: Path) -> str:
    """A line with the number of the model's ops."""
    return f"hello, {model.name} of {finecast.inspect(model).to_dict()['nodes']} ops"


def run(model: Annotated[Path, typer.Argument(help="The model.")]) -> None:
    """Say how many ops a model has."""
    say(greeting(model))

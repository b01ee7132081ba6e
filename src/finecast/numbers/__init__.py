"""Number formats and encodings, and how numbers are rounded to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.numbers.encodings import Dynamic as Dynamic
    from finecast.numbers.encodings import Encodings as Encodings
    from finecast.numbers.encodings import Scaled as Scaled
    from finecast.numbers.formats import WHOLE_ROW as WHOLE_ROW
    from finecast.numbers.rounding import convert_constant as convert_constant
    from finecast.numbers.roundmodes import SEEDS as SEEDS
    from finecast.numbers.roundmodes import Rounder as Rounder
    from finecast.numbers.roundmodes import Rounding as Rounding
else:
    __getattr__ = imported_on_use(__name__)

"""The zoo runs what plugins add, too."""

import pytest

pytest.importorskip("finecast_training")

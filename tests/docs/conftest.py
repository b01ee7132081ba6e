"""Pages tell of plugins, too, so that they are run where all of them are."""

from __future__ import annotations

from finecast.plugin import registered

collect_ignore_glob = ["test_*.py"] if registered().absent else []

"""``python -m finecast``."""

import sys

from finecast.cli import entry

sys.exit(entry())

"""``python -m finecast``."""

import sys

from finecast.cli import main

sys.exit(main())

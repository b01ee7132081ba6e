"""The command ``finecast``, and ``python -m finecast``."""

import signal
import sys


def entry() -> int:
    """Run the command line; Ctrl-C while its modules are imported prints one line, too."""
    try:
        from finecast.cli import entry as run

        return run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process is ending
        sys.stderr.write("error: interrupted: nothing half-written is left\n")
        return 130


if __name__ == "__main__":
    sys.exit(entry())

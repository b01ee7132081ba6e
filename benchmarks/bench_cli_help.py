"""``finecast --help`` in 0.3 s: nothing heavy is imported for it.

python -m benchmarks.bench_cli_help
"""

from __future__ import annotations

from benchmarks.common import median_s, report, run_cli


def main() -> None:
    """Time the help in fresh processes."""
    run_cli("--help")  # the first run writes .pyc files
    report(
        "cli_help",
        "finecast --help",
        round(median_s(lambda: run_cli("--help"), 15), 3),
        "s",
        bar=0.3,
    )


if __name__ == "__main__":
    main()

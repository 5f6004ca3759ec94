"""The program `quietmax`, also as ``python -m quietmax``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C is one line and exit code 130, also while the command line is still imported."""
    try:
        from quietmax.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write("quietmax: Interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

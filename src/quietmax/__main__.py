"""The program `quietmax`, also as ``python -m quietmax``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line.

    Ctrl-C, SIGTERM and SIGHUP end it in the same way, also while the command line is still imported: what it has
    written is removed, and one line is printed. The exit code is 128 plus the number of the signal.
    """
    received = [signal.SIGINT.value]

    def _stop(number: int, _: object) -> None:
        received[0] = number
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, _stop)
    try:
        from quietmax.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write("quietmax: Interrupted.\n")
        sys.exit(128 + received[0])
    except SystemExit as ended:
        sys.exit(128 + received[0] if ended.code == 130 else ended.code)


if __name__ == "__main__":
    main()

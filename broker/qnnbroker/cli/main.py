# SPDX-License-Identifier: Apache-2.0
"""Where the process `qnnbroker` begins and ends.

Nothing is imported here that takes its time: a Ctrl-C before `main` is a traceback.
"""

import sys


def main() -> None:
    """Runs the command line of this process and ends it: never returns."""
    try:
        from qnnbroker.broker.interrupts import end_at_once

        end_at_once()
        from .process import guarded

        code = guarded(sys.argv[1:])
        # A Ctrl-C from here on must not print a traceback out of the interpreter's own teardown.
        end_at_once()
    except KeyboardInterrupt:  # before or after the command proper
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()

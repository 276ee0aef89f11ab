# SPDX-License-Identifier: Apache-2.0
"""The process behind a Child: does as the lines on its standard input say.

It imports next to nothing itself: what a process like this takes is measured too.
"""

import json
import os
import sys

_PACKAGE = "qnnbroker.benchmarks"


def main() -> None:
    """Until standard input ends."""
    # QNN libraries print on standard output when they are loaded.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        module, _, name = order["function"].partition(":")
        try:
            __import__(f"{_PACKAGE}.{module}")
            function = getattr(sys.modules[f"{_PACKAGE}.{module}"], name)
            answer = {"result": function(**order["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    # Without an ordinary exit: the QNN library's threads race with it.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

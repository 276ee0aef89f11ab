# SPDX-License-Identifier: Apache-2.0
"""`python -m qnnbroker.broker CONFIG_JSON`: where the broker process begins, see process.py."""

import sys

if __name__ == "__main__":
    from .interrupts import end_at_once

    end_at_once()  # until the broker takes SIGINT itself
    from .process import leave, main

    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # one more, when it has stopped already
        code = 130
    leave(code)

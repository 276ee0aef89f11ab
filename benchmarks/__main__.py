# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: the command `qnnbroker bench`, from a checkout."""

import sys

from qnnbroker.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()

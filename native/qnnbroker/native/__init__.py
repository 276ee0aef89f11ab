# SPDX-License-Identifier: Apache-2.0
"""The compiled layer: shared memory, fds, doorbells, the QNN binding and the executor.

It does the least that must be compiled; policy is Python, elsewhere. Import the modules by name
(`qnnbroker.native.region`, ...): a client then loads only what it needs.
"""

import importlib.util

if importlib.util.find_spec("qnnbroker.native.runnable") is None:
    raise ImportError(
        "qnnbroker.native is not compiled; in a checkout run `make native` (or `make install`)"
    )

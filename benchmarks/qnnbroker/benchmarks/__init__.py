# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: what the broker costs, against what one would do without it, and the targets.

Each module of `cases` is one benchmark; `suite` finds and runs them, `qnnbroker bench` is the
command line. Nothing here is needed to run a broker or a client, and nothing is imported by this
file: the processes that are measured start here too.
"""

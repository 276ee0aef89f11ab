# SPDX-License-Identifier: Apache-2.0
"""One benchmark per module; `qnnbroker.benchmarks.suite` says what a module has to have."""

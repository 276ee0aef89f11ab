# SPDX-License-Identifier: Apache-2.0
"""The backends: one contract (base), implementations beside it."""

# SPDX-License-Identifier: Apache-2.0
"""Spans of memory that one execute works on: what they may share."""


def check_overlap(spans):
    """Refuses spans (start, size, is_output, name) of which an output shares bytes with another.

    Inputs may share. Two mappings of the same memory at different addresses are not seen.

    Raises:
        ValueError: names the two.
    """
    end = output_end = 0  # the furthest that spans so far reach, and outputs among them
    last = last_output = ""
    for start, size, is_output, name in sorted(spans):
        if start < (end if is_output else output_end):
            other = last if is_output else last_output
            raise ValueError(f"tensors {other!r} and {name!r} overlap, and one is an output")
        if start + size > end:
            end, last = start + size, name
        if is_output and start + size > output_end:
            output_end, last_output = start + size, name

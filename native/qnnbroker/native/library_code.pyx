# SPDX-License-Identifier: Apache-2.0
"""The code of loaded libraries in this process's memory."""

import os
from libc.stdint cimport uint64_t

cdef extern from "qb_code.h" nogil:
    uint64_t qb_code_unmap(const char *prefix)


def unmap(directory):
    """Takes the code and constants of the libraries under a directory out of this process's memory.

    What is used again is mapped again by the kernel, page by page; what was used once, while a
    context was loaded, is not. Pages of which the process has a copy of its own stay.

    Args:
        directory: the path that they were loaded from, as the dynamic loader knows it.

    Returns:
        Bytes of the segments that this was done for.

    Threads: any, also beside those that run that code; releases the GIL. Fork: of this process alone.
    """
    cdef bytes prefix = os.fsencode(os.path.join(directory, ""))
    cdef const char *text = prefix
    cdef uint64_t size
    with nogil:
        size = qb_code_unmap(text)
    return size

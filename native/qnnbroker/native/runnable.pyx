# SPDX-License-Identifier: Apache-2.0
"""Runnable: what a backend hands to the executor. Backends subclass it and fill `ptr`."""

cdef class Runnable:
    """A graph with its tensor arrays, ready to execute. Made by a backend's graph, not by hand."""

    @property
    def closed(self) -> bool:
        """True when the native part is gone; the executor refuses it then."""
        return self.ptr is NULL

# SPDX-License-Identifier: Apache-2.0
"""The heap of this process: giving back what its allocator keeps of freed memory."""

cdef extern from * nogil:
    """
    #include <stdlib.h>
    #ifdef __GLIBC__
    #include <malloc.h>
    #define qb_heap_trim() malloc_trim(0)
    #else
    #define qb_heap_trim() 0 /* other C libraries give back by themselves */
    #endif
    """
    int qb_heap_trim()


def trim():
    """Gives pages that hold nothing but freed memory back to the system: whether there were any.

    Threads: any; releases the GIL. Others that allocate at this moment may wait for a millisecond.
    """
    cdef int given
    with nogil:
        given = qb_heap_trim()
    return given != 0

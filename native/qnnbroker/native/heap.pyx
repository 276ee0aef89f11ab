# SPDX-License-Identifier: Apache-2.0
"""The heap of this process: what its allocator keeps of freed memory, and giving that back."""

cdef extern from * nogil:
    """
    #include <stdlib.h>
    #ifdef __GLIBC__
    #include <malloc.h>
    #define qb_heap_trim() malloc_trim(0)
    /* Either call also ends what glibc does by itself: raise both limits with each block freed. */
    #define qb_heap_keep_below(n) \\
        (mallopt(M_MMAP_THRESHOLD, n) == 1 && mallopt(M_TRIM_THRESHOLD, n) == 1)
    #else
    #define qb_heap_trim() 0 /* other C libraries give back by themselves */
    #define qb_heap_keep_below(n) 0
    #endif
    """
    int qb_heap_trim()
    int qb_heap_keep_below(int size_bytes)


def trim():
    """Gives pages that hold nothing but freed memory back to the system: whether there were any.

    Threads: any; releases the GIL. Others that allocate at this moment may wait for a millisecond.
    """
    cdef int given
    with nogil:
        given = qb_heap_trim()
    return given != 0


def keep_below(int size_bytes):
    """From now on only freed blocks of less than that many bytes are kept: whether it is so.

    Larger ones go back to the system when they are freed, and so does the end of each of the
    allocator's heaps that holds so much freed memory; it has several heaps, and threads take turns
    on them. By itself glibc's allocator keeps up to 64 MiB at the end of each, once a block of
    half that size was freed (mallopt(3)). False with another allocator, which does as it does.

    Threads: any; for the whole process, from what is allocated next.

    Raises:
        ValueError: `size_bytes` is not from 4 KiB to 16 MiB.
    """
    if not 4096 <= size_bytes <= 16 << 20:
        raise ValueError(f"from 4096 to {16 << 20} bytes wanted, found {size_bytes}")
    return qb_heap_keep_below(size_bytes) != 0

# SPDX-License-Identifier: Apache-2.0
"""A process that has hardly any file descriptor left."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_fds(count: int) -> Iterator[None]:
    """For as long as the block lasts this process can open `count` more, and no other."""
    numbers = range(len(os.listdir("/proc/self/fd")) + count + 1)
    free = [number for number in numbers if not _is_open(number)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True

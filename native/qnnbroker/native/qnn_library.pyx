# SPDX-License-Identifier: Apache-2.0
"""QnnLibrary: the two QNN libraries of a directory, loaded; and the lines that they log."""

import errno as _errno
import importlib.util
import os
from pathlib import Path

from libc.errno cimport errno

from qnnbroker.native.counters cimport QB_COUNT_LIBRARY, qb_count

#: Directory of the QNN libraries, for `default_qnn_dir`.
QNN_DIR_ENV = "QNNBROKER_QNN_LIB_DIR"
#: What such a directory holds.
LIBRARY_NAMES = ("libQnnHtp.so", "libQnnSystem.so")

_counted = set()  # directories; a library is never unloaded, so it is counted once


def default_qnn_dir():
    """The directory to load QNN from when none is named.

    `QNNBROKER_QNN_LIB_DIR`, else the installed onnxruntime_qnn package, which is found without being
    imported.

    Raises:
        FileNotFoundError: neither is there; says what to install.
    """
    if named := os.environ.get(QNN_DIR_ENV):
        return Path(named).absolute()
    spec = importlib.util.find_spec("onnxruntime_qnn")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if all(os.path.isfile(os.path.join(folder, name)) for name in LIBRARY_NAMES):
            return Path(folder)
    raise FileNotFoundError(
        _errno.ENOENT,
        f"no QNN libraries: install onnxruntime-qnn, or name a directory that holds "
        f"{' and '.join(LIBRARY_NAMES)} in {QNN_DIR_ENV}",
    )


def drain_log():
    """Takes the lines that wait, oldest first: (level, text), level 1 error to 5 debug. Any thread."""
    cdef uint32_t level
    cdef char[480] text
    lines = []
    assert sizeof(text) == QB_LOG_LINE_BYTES
    while qb_log_take(&level, text):
        lines.append((level, (<char *>text).decode("utf-8", "replace")))
    return lines


def log_dropped():
    """How many lines were lost so far because nobody drained the log."""
    return qb_log_dropped()


def log_fileno():
    """An eventfd that is readable while lines wait. It belongs to the process: only poll it.

    Raises:
        OSError: no fd to be had.
    """
    cdef int fd = qb_log_fd()
    if fd < 0:
        raise OSError(errno, f"eventfd: {os.strerror(errno)}")
    return fd


cdef tuple _version(const uint32_t *triplet):
    return (triplet[0], triplet[1], triplet[2])


cdef class QnnLibrary:
    """libQnnHtp.so and libQnnSystem.so of one directory.

    A QNN library cannot be unloaded, so there is no close; a second QnnLibrary of the same directory
    is the same library. Libraries of several directories may be loaded.

    Loading keeps the library's habits away from the process: nothing it prints reaches stdout (fd 1
    is stderr meanwhile), no configuration file is picked up from the working directory, and
    LIBNATIVE_CONFIG is taken out of the environment. Both are changes to the whole process, so load
    before starting threads that print or use relative paths.

    Threads: any. Fork: a child may use it as long as no context was made before the fork.

    Args:
        directory: holds both files, with their dependencies where the libraries look for them.

    Raises:
        FileNotFoundError: one of the two files is missing.
        OSError: they cannot be loaded, are not QNN, too old, or lack what is needed.
    """

    def __cinit__(self, directory):
        cdef char[1024] why
        why[0] = 0
        folder = os.path.realpath(os.fspath(directory))
        missing = [n for n in LIBRARY_NAMES if not os.path.isfile(os.path.join(folder, n))]
        if missing:
            raise FileNotFoundError(
                _errno.ENOENT,
                f"{folder} has no {' and no '.join(missing)}; "
                f"QNN needs {' and '.join(LIBRARY_NAMES)}",
            )
        os.environ.pop("LIBNATIVE_CONFIG", None)
        encoded = os.fsencode(folder)
        # With the GIL: no other Python thread shall see the changed directory and fd 1.
        self.qnn = qb_qnn_open(encoded, why, sizeof(why))
        if self.qnn is NULL:
            raise OSError(_errno.ELIBBAD, f"QNN: {(<char *>why).decode('utf-8', 'replace')}")
        if folder not in _counted:
            _counted.add(folder)
            qb_count(QB_COUNT_LIBRARY, 1)

    @property
    def directory(self):
        """Where the libraries are, as a Path without links."""
        return Path(os.fsdecode(self.qnn.directory))

    @property
    def provider_name(self):
        """What the backend calls itself, e.g. HTP_QTI_AISW."""
        name = self.qnn.provider_name
        return "" if name is NULL else name.decode("utf-8", "replace")

    @property
    def backend_id(self):
        """QNN's number of the backend; HTP is 6."""
        return self.qnn.backend_id

    @property
    def core_api_version(self):
        """(major, minor, patch) of the QNN API."""
        return _version(self.qnn.core_api)

    @property
    def backend_api_version(self):
        """(major, minor, patch) of the backend's own part of the API."""
        return _version(self.qnn.backend_api)

    @property
    def system_api_version(self):
        """(major, minor, patch) of the system library's API."""
        return _version(self.qnn.system_api)

    def has_capability(self, key):
        """What the library says about a capability: 0 yes, 1000 no, 2000 unknown key.

        A hint and no promise; what counts is whether the call itself gives NOT_SUPPORTED.
        """
        return qb_qnn_has_capability(self.qnn, key) & 0xFFFF

    def __reduce__(self):
        raise TypeError("a QnnLibrary belongs to its process and cannot be pickled")

    def __repr__(self):
        version = ".".join(map(str, self.core_api_version))
        return f"<QnnLibrary {self.provider_name} API {version} in {self.directory}>"

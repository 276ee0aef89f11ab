# SPDX-License-Identifier: Apache-2.0
"""QnnContext: a context binary loaded into a device."""

import errno as _errno
from weakref import WeakValueDictionary

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from qnnbroker.native.counters cimport QB_COUNT_CONTEXT, qb_count
from qnnbroker.native.qnn_backend cimport QnnDevice
from qnnbroker.native.qnn_error cimport check
from qnnbroker.native.qnn_graph cimport make_graph
from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_info cimport check_size, parse
from qnnbroker.native.qnn_library cimport (
    QB_QNN_NORMAL_PRIORITY,
    qb_handle,
    qb_qnn,
    qb_qnn_context_create,
    qb_qnn_context_free,
    qb_qnn_graph,
    qb_qnn_graph_init,
    qb_qnn_graph_retrieve,
)

from qnnbroker.native.qnn_graph import checked_priority

cdef extern from "qb_qnn_mapped.h" nogil:
    void qb_file_source_init(qb_file_source *source, const void *data, uint64_t size, int fd)
    void qb_file_source_end(qb_file_source *source)
    uint32_t qb_file_source_lent(qb_file_source *source)
    uint64_t qb_qnn_context_create_mapped(const qb_qnn *q, qb_handle backend, qb_handle device,
                                          qb_file_source *source, uint32_t priority,
                                          const char *const *enable_graphs, qb_handle *out)

cdef extern from *:
    """
    #if defined(__x86_64__)
    #define QB_EMULATED 1
    #else
    #define QB_EMULATED 0
    #endif
    """
    const bint QB_EMULATED  # x86_64 has QNN's emulation only

#: What the shipped stand-in library calls itself.
_STAND_IN = "QNNBROKER_FAKE"
#: What a graph runs at when nobody says otherwise.
NORMAL_PRIORITY = QB_QNN_NORMAL_PRIORITY


cdef class QnnContext(QnnHandle):
    """A context binary, loaded. Its graphs come from `graph`.

    Every context holds its own copy of the weights, so load a binary once and share the context.

    Threads: any; creating and freeing run without the GIL. Fork: a process that has made a context
    must not fork and use QNN in the child, which would hang.

    Args:
        device: stays open as long as the context.
        data: the whole binary, as a contiguous buffer. Not needed any more, nor referenced, once
            this returns, unless `file_mapped` (`keeps_binary` says so). A file that is truncated meanwhile is a SIGBUS.
        priority: of all its graphs, 0 (low) to 500; 100 is normal, 200 high.
        enable_graphs: names of the graphs to make executable; None means all.
        info: what `parse_binary` said of the same `data`; parsed here when None.
        file_mapped: let the library read `data`, which is a Region then, through callbacks for as
            long as the context lives; it stays mapped until the context is closed.

    Raises:
        ValueError: the device is closed; a priority out of range; unknown, repeated or no
            `enable_graphs`; an absurd description.
        OSError: ENOTSUP: a binary with shared weights on x86_64, where it would crash the process.
        QnnError: the library refuses the binary.
    """

    def __cinit__(self, QnnDevice device not None, data, *, priority=NORMAL_PRIORITY,
                  enable_graphs=None, info=None, bint file_mapped=False):
        cdef Py_buffer view
        cdef int fd = data.fileno() if file_mapped else -1
        cdef qb_handle context = 0
        cdef uint64_t code
        cdef uint32_t wanted_priority = checked_priority(priority)
        cdef const char **names = NULL
        device.ensure_alive()
        self.free_operation = "contextFree"
        self.device = device
        self.qnn = device.qnn
        self.priority = wanted_priority
        self.graphs = WeakValueDictionary()
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        device.busy += 1
        try:
            if info is None:
                info = parse(device.backend.library, view.buf, <uint64_t>view.len)
            else:
                check_size(info, <uint64_t>view.len)
            self.info = info
            self.enabled = _enabled(info, enable_graphs)
            self.natives = <qb_qnn_graph *>calloc(len(info.graphs) + 1, sizeof(qb_qnn_graph))
            if self.natives is NULL:
                raise MemoryError()
            shared = sum(g.shared_weight_bytes for g in info.graphs)
            # The shipped stand-in library takes them; the emulation would die.
            if QB_EMULATED and shared > 0 and device.backend.library.provider_name != _STAND_IN:
                raise OSError(
                    _errno.ENOTSUP,
                    f"the context binary shares {shared} bytes of weights between graphs, "
                    "which QNN's emulation on x86_64 cannot load",
                )
            encoded = [name.encode("utf-8", "surrogateescape") for name in self.enabled]
            if enable_graphs is not None:
                names = <const char **>calloc(len(encoded) + 1, sizeof(char *))
                if names is NULL:
                    raise MemoryError()
                for i, name in enumerate(encoded):
                    names[<size_t>i] = PyBytes_AS_STRING(name)
            if file_mapped:
                self.source = <qb_file_source *>calloc(1, sizeof(qb_file_source))
                if self.source is NULL:
                    raise MemoryError()
                qb_file_source_init(self.source, view.buf, <uint64_t>view.len, fd)
                with nogil:
                    code = qb_qnn_context_create_mapped(
                        self.qnn, device.backend.handle, device.handle, self.source,
                        wanted_priority, names, &context,
                    )
                check(code, "contextCreateFromBinaryWithCallback")
                PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
                self.keeps_binary = True
            else:
                with nogil:
                    code = qb_qnn_context_create(
                        self.qnn, device.backend.handle, device.handle, view.buf,
                        <uint64_t>view.len, wanted_priority, names, &context,
                    )
                check(code, "contextCreateFromBinary")
        finally:
            device.end_call()
            free(names)
            PyBuffer_Release(&view)
        self.adopt(context, device)
        qb_count(QB_COUNT_CONTEXT, 1)

    def __dealloc__(self):
        self.end_source()
        free(self.natives)

    cdef void end_source(self) noexcept:
        """The library reads no more."""
        if self.source is not NULL:
            qb_file_source_end(self.source)
            free(self.source)
            self.source = NULL
        if self.keeps_binary:
            self.keeps_binary = False
            PyBuffer_Release(&self.view)

    cdef uint64_t free_native(self, qb_handle handle) noexcept:
        cdef uint64_t code
        with nogil:
            code = qb_qnn_context_free(self.qnn, handle)
        self.end_source()
        qb_count(QB_COUNT_CONTEXT, -1)
        return code

    def graph(self, name):
        """The graph of that name; the same object as long as somebody holds it.

        Raises:
            ValueError: no such graph, or it was not enabled; the context is closed.
            QnnError: the library does not know it.
        """
        cdef qb_handle handle = 0
        cdef uint64_t code
        cdef bytes encoded
        cdef const char *text
        cdef qb_qnn_graph *native
        self.ensure_alive()
        found = self.graphs.get(name)
        if found is not None:
            return found
        info = self.info.graph(name)
        if name not in self.enabled:
            raise ValueError(f"graph {name!r} is not among the enabled ones: {list(self.enabled)}")
        native = &self.natives[<size_t>self.info.graphs.index(info)]
        encoded = name.encode("utf-8", "surrogateescape")
        text = PyBytes_AS_STRING(encoded)
        self.busy += 1
        try:
            with nogil:
                code = qb_qnn_graph_retrieve(self.qnn, self.handle, text, &handle)
            check(code, "graphRetrieve")
        finally:
            self.end_call()
        if native.handle == 0:  # its priority and counts outlive the QnnGraph
            qb_qnn_graph_init(native, self.qnn, handle, <uint32_t>self.priority)
        return self.graphs.setdefault(name, make_graph(self, info, native))


cdef object _enabled(object info, object names):
    """The graphs that can execute: all, or those named, which must exist. QNN ignores unknown names
    and then has a context in which nothing can execute."""
    if names is None:
        return tuple([g.name for g in info.graphs])
    if isinstance(names, str):
        raise ValueError(f"enable_graphs must be a sequence of names, not {names!r}")
    names = tuple(names)
    if not names:
        raise ValueError("enable_graphs is empty; None enables all graphs")
    if len(set(names)) != len(names):
        raise ValueError(f"enable_graphs repeats a name: {list(names)}")
    for name in names:
        info.graph(name)
    return names

# SPDX-License-Identifier: Apache-2.0
"""QnnGraph: an executable of a context; and QnnRunnable, a graph bound to memory."""

import os
import struct
import warnings

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from qnnbroker.native.counters cimport QB_COUNT_GRAPH, QB_COUNT_RUNNABLE, qb_count
from qnnbroker.native.qnn_error cimport check
from qnnbroker.native.qnn_handle cimport QnnHandle, finalizing
from qnnbroker.native.qnn_library cimport (
    QB_QNN_MAX_PRIORITY,
    qb_qnn_graph,
    qb_qnn_runnable,
    qb_qnn_runnable_init,
    qb_qnn_runnable_running,
)
from qnnbroker.native.runnable cimport Runnable, qb_graph, qb_hist_quantile, qb_runnable

from qnnbroker.native.qnn_error import NOT_SUPPORTED
from qnnbroker.native.qnn_info import element_bits
from qnnbroker.native.qnn_spans import check_overlap

#: Priorities are from 0 (low) to this; 100 is normal.
MAX_PRIORITY = QB_QNN_MAX_PRIORITY
#: QNN states the size of one tensor in 32 bits.
MAX_TENSOR_BYTES = 0xFFFFFFFF

cdef object _getpid = os.getpid, _warn = warnings.warn


def checked_priority(priority):
    """`priority` if QNN takes it.

    Raises:
        ValueError: outside of 0 to MAX_PRIORITY.
    """
    if not 0 <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be from 0 to {MAX_PRIORITY}, not {priority}")
    return priority


cdef QnnGraph make_graph(QnnHandle context, object info, qb_qnn_graph *native):
    """For QnnContext only, which has checked everything and owns `native`."""
    cdef QnnGraph self = QnnGraph.__new__(QnnGraph)
    cdef Py_ssize_t i
    tensors = [*info.inputs, *info.outputs]
    self.specs = <qb_tensor_spec *>calloc(len(tensors) + 1, sizeof(qb_tensor_spec))
    if self.specs is NULL:
        raise MemoryError()
    self.context = context
    self.info = info
    self.kept = []
    for i, tensor in enumerate(tensors):
        self.describe(&self.specs[i], tensor)
    self.native = native
    qb_count(QB_COUNT_GRAPH, 1)
    return self


cdef class QnnGraph:
    """One graph of a QnnContext; made by `QnnContext.graph`.

    It stays when its context is closed, but then every call raises ValueError.

    Threads: any. One graph may execute on several threads at once through several runnables.
    Fork: of no use in a child.
    """

    def __init__(self):
        raise TypeError("a QnnGraph is made by QnnContext.graph")

    def __dealloc__(self):
        if self.native is not NULL:
            qb_count(QB_COUNT_GRAPH, -1)
        free(self.specs)

    cdef int describe(self, qb_tensor_spec *spec, object tensor) except -1:
        """Points `spec` at copies of all that `tensor` says; the copies live in `kept`."""
        cdef bytes name = tensor.name.encode("utf-8", "surrogateescape")
        cdef bytes dims = struct.pack(f"={len(tensor.shape)}I", *tensor.shape)
        cdef bytes scales, offsets, pairs
        spec.id = tensor.tensor_id
        spec.type = tensor.tensor_type
        spec.dtype = tensor.dtype
        spec.rank = len(tensor.shape)
        spec.name = PyBytes_AS_STRING(name)
        spec.dims = <const uint32_t *>PyBytes_AS_STRING(dims)
        self.kept += [name, dims]
        quant = tensor.quantization
        if quant is None or not quant.scales:
            return 0
        n = len(quant.scales)
        scales = struct.pack(f"={n}f", *quant.scales)
        offsets = struct.pack(f"={n}i", *quant.offsets)
        pairs = b"".join(map(struct.Struct("=fi").pack, quant.scales, quant.offsets))
        spec.quantized = True
        spec.encoding = quant.encoding
        spec.bits = quant.bits or 0
        spec.pair_count = n
        spec.axis = 0 if quant.axis is None else quant.axis
        spec.scales = <const float *>PyBytes_AS_STRING(scales)
        spec.offsets = <const int32_t *>PyBytes_AS_STRING(offsets)
        spec.pairs = PyBytes_AS_STRING(pairs)
        self.kept += [scales, offsets, pairs]
        return 0

    @property
    def name(self):
        """Unique within the context binary only."""
        return self.info.name

    @property
    def inputs(self):
        """TensorInfo of each input, in the graph's order."""
        return self.info.inputs

    @property
    def outputs(self):
        """TensorInfo of each output, in the graph's order."""
        return self.info.outputs

    @property
    def priority(self):
        """The priority of following executes; 100 is normal."""
        return self.native.base.priority

    def set_priority(self, priority):
        """Sets the priority of following executes.

        Waits, without the GIL, while this very graph executes. If an executor runs this graph, leave
        it to the executor.

        Args:
            priority: 0 (low) to 500; 100 is normal, 200 high.

        Raises:
            ValueError: out of range, or the context is closed.
            QnnError: refused; NOT_SUPPORTED without priorities.
        """
        cdef uint32_t value = checked_priority(priority)
        cdef uint64_t code = NOT_SUPPORTED
        self.context.ensure_alive()
        if self.native.base.set_priority is not NULL:
            self.context.busy += 1
            try:
                with nogil:
                    code = self.native.base.set_priority(&self.native.base, value)
            finally:
                self.context.end_call()
        check(code, "graphSetConfig")
        self.native.base.priority = value

    def statistics(self):
        """What the executor has counted for this graph; a snapshot. Times are in ns; percentiles are
        of native histograms, within 12 %."""
        cdef qb_graph *g = &self.native.base
        return {
            "priority": g.priority,
            "running": g.running,
            "run_count": g.run_count,
            "error_count": g.error_count,
            "execute_ns_total": g.execute_ns_total,
            "execute_ns_min": g.execute_ns_min,
            "execute_ns_max": g.execute_ns_max,
            "queue_ns_total": g.queue_ns_total,
            "median_ns": g.median_ns,
            "last_end_ns": g.last_end_ns,
            "queue_p50_ns": qb_hist_quantile(&g.queue, 0.5),
            "queue_p99_ns": qb_hist_quantile(&g.queue, 0.99),
            "execute_p50_ns": qb_hist_quantile(&g.execute, 0.5),
            "execute_p99_ns": qb_hist_quantile(&g.execute, 0.99),
            "total_p50_ns": qb_hist_quantile(&g.total, 0.5),
            "total_p99_ns": qb_hist_quantile(&g.total, 0.99),
        }

    def bind(self, inputs, outputs, registrations=None):
        """A runnable that executes on the given memory, in place.

        Args:
            inputs: (owner, offset, size) for each of `inputs`, in that order: `size` bytes from
                `offset` of the buffer that `owner` exports.
            outputs: the same for `outputs`; their owners must be writable.
            registrations: for each input, then each output: None or the QnnRegistration of its memory.

        The owners' buffers stay exported, so their memory stays, until the runnable is closed.

        Raises:
            ValueError: a wrong number of spans; a size that is not the tensor's; a span that leaves
                its buffer or is not aligned to the element; an output that overlaps anything; no
                usable buffer; a registration that is closed, of another context, place, data type
                or shape; the context is closed.
        """
        return QnnRunnable(self, inputs, outputs, registrations)

    def __reduce__(self):
        raise TypeError("a QnnGraph belongs to its process and cannot be pickled")

    def __repr__(self):
        return f"<QnnGraph {self.name!r} of {self.context!r}>"


cdef class QnnRunnable(Runnable):
    """A graph bound to memory; see `QnnGraph.bind`. Keeps the graph and its context alive.

    Close it, or use it as a context manager; a forgotten one warns with ResourceWarning.

    Threads: one execute at a time; several runnables at once. Whoever executes it natively must hold
    a reference to this object. Fork: of no use in a child.
    """

    def __cinit__(self, QnnGraph graph not None, inputs, outputs, registrations=None):
        cdef Py_ssize_t n_in = len(graph.info.inputs), n_out = len(graph.info.outputs), i
        cdef size_t records = <size_t>(n_in + n_out) * QB_TENSOR_BYTES
        cdef size_t head = (sizeof(qb_qnn_runnable) + 15) // 16 * 16
        cdef uint8_t *block
        cdef uint8_t *at
        graph.context.ensure_alive()
        inputs, outputs = tuple(inputs), tuple(outputs)
        if len(inputs) != n_in or len(outputs) != n_out:
            raise ValueError(
                f"graph {graph.name!r} has {n_in} input(s) and {n_out} output(s); "
                f"found {len(inputs)} and {len(outputs)}"
            )
        block = <uint8_t *>calloc(1, head + records + <size_t>(n_in + n_out) * sizeof(Py_buffer))
        if block is NULL:
            raise MemoryError()
        self.graph = graph
        self.native = <qb_qnn_runnable *>block
        self.views = <Py_buffer *>(block + head + records)
        for span, tensor in zip(inputs, graph.info.inputs, strict=True):
            self.take(span, tensor, False)
        for span, tensor in zip(outputs, graph.info.outputs, strict=True):
            self.take(span, tensor, True)
        spans = (*inputs, *outputs)
        check_overlap(
            [
                (<size_t>self.views[i].buf + <size_t>spans[i][1], spans[i][2], i >= n_in, t.name)
                for i, t in enumerate((*graph.info.inputs, *graph.info.outputs))
            ]
        )
        known = tuple(registrations or [None] * (n_in + n_out))
        if len(known) != n_in + n_out:
            raise ValueError(f"{n_in + n_out} registrations wanted, found {len(known)}")
        at = block + head
        for i in range(n_in + n_out):
            qb_tensor_build(
                at,
                &graph.specs[i],
                <uint8_t *>self.views[i].buf + <size_t>spans[i][1],
                <uint32_t>spans[i][2],
            )
            if known[i] is not None:
                self.use(at, known[i], spans[i], i)
            at += QB_TENSOR_BYTES
        qb_qnn_runnable_init(
            self.native,
            graph.native,
            block + head,
            <uint32_t>n_in,
            block + head + <size_t>n_in * QB_TENSOR_BYTES,
            <uint32_t>n_out,
        )
        self.native.registered = None not in known
        self.ptr = &self.native.base
        self.registrations = known
        for memory in known:
            if memory is not None:
                (<QnnHandle>memory).add_child()
        graph.context.add_child()
        qb_count(QB_COUNT_RUNNABLE, 1)

    def __del__(self):
        if self.ptr is NULL or finalizing():
            return
        try:
            if self.graph.context.pid == _getpid():
                _warn(f"never closed: {self!r}", ResourceWarning, source=self, stacklevel=2)
        finally:  # the warning may be an error
            if not self.executing():
                self.release()

    def __dealloc__(self):
        if self.ptr is NULL:
            self.release()  # what a failed __cinit__ left
        else:  # interpreter exit, or executing: the memory must stay, and the graph with it
            Py_INCREF(self.graph)

    cdef int take(self, object span, object tensor, bint output) except -1:
        """Checks one span and takes the export of its buffer, as the next of `views`."""
        cdef Py_buffer *view = &self.views[self.held]
        what = f"{'output' if output else 'input'} {tensor.name!r}"
        owner, offset, size = span
        if size != tensor.size_bytes:
            raise ValueError(f"{what} needs {tensor.size_bytes} bytes, found a span of {size}")
        if not 0 < size <= MAX_TENSOR_BYTES:
            raise ValueError(f"{what} of {size} bytes; QNN takes 1 to {MAX_TENSOR_BYTES}")
        try:
            PyObject_GetBuffer(owner, view, PyBUF_WRITABLE if output else PyBUF_SIMPLE)
        except (BufferError, TypeError) as error:
            access = "writable" if output else "readable"
            raise ValueError(f"{what} needs a {access} contiguous buffer: {error}") from error
        self.held += 1
        if not 0 <= offset <= view.len or size > view.len - offset:
            raise ValueError(
                f"{what} needs {size} bytes from offset {offset}; the buffer has {view.len}"
            )
        alignment = max(1, element_bits(tensor.dtype) // 8)
        if offset % alignment != 0:
            raise ValueError(f"{what} needs an offset that {alignment} divides, found {offset}")
        return 0

    cdef int use(self, void *record, QnnHandle memory, object span, Py_ssize_t i) except -1:
        """Puts a registration into a record. Anything but a live one would crash the library."""
        tensor = (*self.graph.info.inputs, *self.graph.info.outputs)[i]
        memory.ensure_alive()
        if memory.free_operation != "memDeRegister" or memory.parent is not self.graph.context:
            raise ValueError(f"tensor {tensor.name!r}: {memory!r} is no registration of its context")
        found = (memory.dtype, memory.shape, memory.offset)
        wanted = (tensor.dtype, tuple(tensor.shape) or (1,), span[1])
        if found != wanted:
            raise ValueError(f"tensor {tensor.name!r} is {wanted}, the registration is of {found}")
        qb_tensor_use_handle(record, memory.handle)
        return 0

    cdef bint executing(self) noexcept:
        if self.ptr is NULL:
            return False
        return self.busy > 0 or qb_qnn_runnable_running(self.native) > 0

    cdef void release(self) noexcept:
        cdef Py_ssize_t i
        cdef bint live = self.ptr is not NULL
        self.ptr = NULL
        for i in range(self.held):
            PyBuffer_Release(&self.views[i])
        self.held = 0
        self.views = NULL
        free(self.native)
        self.native = NULL
        if live:
            qb_count(QB_COUNT_RUNNABLE, -1)
            for memory in self.registrations:
                if memory is not None:
                    (<QnnHandle>memory).drop_child()
            self.registrations = ()
            self.graph.context.drop_child()

    def execute(self):
        """Runs the graph once and returns when it has; without the GIL.

        Raises:
            ValueError: closed.
            QnnError: the library says so.
        """
        cdef qb_runnable *runnable = self.ptr
        cdef uint64_t code
        if runnable is NULL:
            raise ValueError("QnnRunnable is closed")
        self.graph.context.ensure_alive()
        self.busy += 1
        try:
            with nogil:
                code = runnable.execute(runnable)
            check(code, "graphExecute")
        finally:
            self.busy -= 1

    def close(self):
        """Lets go of the memory. Does nothing when closed.

        Raises:
            BufferError: it is executing.
        """
        if self.ptr is NULL:
            return
        if self.executing():
            raise BufferError(f"{self!r} cannot be closed: it is executing")
        self.release()

    def __enter__(self):
        if self.ptr is NULL:
            raise ValueError("QnnRunnable is closed")
        return self

    def __exit__(self, kind, error, trace):
        if error is None or not self.executing():  # do not hide the error
            self.close()

    def __reduce__(self):
        raise TypeError("a QnnRunnable belongs to its process and cannot be pickled")

    def __repr__(self):
        return f"<QnnRunnable of {self.graph.name!r}{' closed' if self.ptr is NULL else ''}>"

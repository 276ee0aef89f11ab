# SPDX-License-Identifier: Apache-2.0
"""Creator: makes a context out of a held file, with as few copies as the backend allows.

In this order: the backend reads the file's mapping through a callback, and the mapping lives as
long as the context; or it reads the mapping while it creates, and the mapping goes; or, only when
that is asked for, from a heap copy. Every step down is counted, and logged the first time.
"""

import logging
import mmap
import threading
from collections.abc import Sequence

from qnnbroker.protos.errors import Unsupported

from .backends.base import Backend, BackendContext, BinarySpec
from .steady import SteadyFile

log = logging.getLogger(__name__)

#: Values of the option file_mapped_weights.
MODES = ("auto", "require", "off")


class Creator:
    """Creates contexts. Threads: any.

    Args:
        backend: what creates them.
        mode: "auto"; "require": only file-mapped; "off": from a heap copy.
    """

    def __init__(self, backend: Backend, mode: str) -> None:
        self._backend = backend
        self._mode = mode
        self._lock = threading.Lock()
        self._refused = ""  # why the backend takes no callback; "" as long as it might
        self.counts = {"callback": 0, "mapping": 0, "heap": 0, "callback_refused": 0}

    def create(
        self, file: SteadyFile, spec: BinarySpec, enable_graphs: Sequence[str]
    ) -> BackendContext:
        """A context of the file's bytes, which the caller holds. Blocks.

        Raises:
            Unsupported: reason BACKEND_LACKS; file-mapped is required and cannot be.
            BrokerError: the backend refuses the binary.
        """
        if self._mode == "off":
            heap = bytearray(file.size_bytes)
            for offset, piece in file.file.pieces():
                heap[offset : offset + len(piece)] = piece
            return self._counted("heap", self._backend.create_context(heap, spec, enable_graphs))
        why = self._refused
        if not why:
            try:
                return self._counted("callback", self._file_mapped(file, spec, enable_graphs))
            except Unsupported as error:
                why = str(error)
                with self._lock:
                    self.counts["callback_refused"] += 1
                    # Of the library, not of this file: it need not be asked again.
                    if error.ids.get("qnn_code") or "this library" in why:
                        self._refused = why
                log.info("a context is created from a plain mapping: %s", why)
        if self._mode == "require":
            raise Unsupported(
                f"file_mapped_weights = require, but the backend takes no file mapping: {why}"
            )
        with file.map() as region:
            native = self._backend.create_context(region, spec, enable_graphs)
        return self._counted("mapping", native)

    def _file_mapped(
        self, file: SteadyFile, spec: BinarySpec, enable_graphs: Sequence[str]
    ) -> BackendContext:
        if file.file.identity.offset % mmap.PAGESIZE:
            raise Unsupported("the binary does not start at a page of its file")
        region = file.map()
        try:
            return self._backend.create_file_mapped(region, spec, enable_graphs)
        except BaseException:
            region.close()
            raise

    def _counted(self, how: str, native: BackendContext) -> BackendContext:
        with self._lock:
            self.counts[how] += 1
        return native

# SPDX-License-Identifier: Apache-2.0
"""Gathers the files of one model: a bare binary, or a wrapper with its binary inside or beside it,
and the manifest. Who opens them is somebody else's matter; this says which ones are wanted.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from qnnbroker.protos.errors import BrokerError, InvalidRequest, NotFound, Unsupported

from . import manifest as manifests
from .epcontext import (
    ByteRange,
    Wrapper,
    binary_path,
    check_fully_offloaded,
    read_wrapper,
    read_wrapper_from,
    sniff,
)
from .files import FileBytes, ModelFile
from .manifest import Manifest
from .steady import SteadyFile

#: Bytes looked at to tell a wrapper from a binary.
SNIFF_BYTES = 4096
#: A wrapper up to this size is read; a larger one holds its binary, and is looked around in.
READ_BYTES = 1024 * 1024


@dataclass(eq=False)
class OpenedModel:
    """All files of one model, opened, with what the wrapper says. Close it.

    Attributes:
        path: what the model was named as.
        binary: the context binary; of an embedded one, that range of the wrapper.
        whole: the wrapper's file when it is too large to have been read; else None.
        wrapper_sha256: of the wrapper's bytes as they were read; "" if they were not.
    """

    path: Path
    wrapper: Wrapper | None
    binary: SteadyFile
    manifest: Manifest | None
    whole: ModelFile | None = None
    wrapper_sha256: str = ""

    def check_manifest(self, digest: str) -> None:
        """Holds the manifest, if there is one, against the files. May read the wrapper: blocks.

        Raises:
            InvalidRequest: reason BAD_FILE; a hash differs.
        """
        if self.manifest is None:
            return
        found = self.wrapper_sha256
        if self.whole is not None:
            found = self.whole.hash_unheld()
        manifests.check(self.manifest, digest, found)

    def close(self) -> None:
        """Idempotent."""
        if self.whole is not None:
            self.whole.close()
        self.binary.close()


class Gathering:
    """The files of one model on their way. Owns what it is given; `close` it, or `finish`.

    Threads: any, one at a time. Construction reads the file: it blocks.

    Raises:
        BrokerError: by what is wrong with the model file; it is closed then.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._found: dict[str, ModelFile | Manifest | None] = {}
        self._wrapper: Wrapper | None = None
        self._wrapper_sha256 = ""
        self._binary_name = ""
        self._span: ByteRange | None = None
        try:
            if sniff(file.read(0, SNIFF_BYTES)) == "wrapper":
                self._wrapper = self._read_wrapper()
                self._choose_binary(self._wrapper)
        except BaseException:
            file.close()
            raise
        self._manifests = manifests.names_beside(file.path.name, wrapper=self._wrapper is not None)

    def _read_wrapper(self) -> Wrapper:
        if self._file.size_bytes <= READ_BYTES:
            data = self._file.read(0, READ_BYTES)
            self._wrapper_sha256 = hashlib.sha256(data).hexdigest()
            return read_wrapper(data)
        # Not held, so not mapped either; it must be unchanged when it is held for loading.
        wrapper = read_wrapper_from(FileBytes(self._file))
        self._file.check_unchanged()
        return wrapper

    def _choose_binary(self, wrapper: Wrapper) -> None:
        check_fully_offloaded(wrapper)
        main = wrapper.main_nodes[0]
        if any(n.cache_context != main.cache_context for n in wrapper.main_nodes):
            raise Unsupported(
                f"{str(self._file.path)!r} names {len(wrapper.main_nodes)} context binaries; "
                "wrappers of one are taken",
                reason="LAYOUT",
            )
        if isinstance(main.cache_context, ByteRange):
            self._span = main.cache_context
        else:
            directory = self._file.path.parent
            self._binary_name = str(binary_path(directory / "w", main).relative_to(directory))

    def wanted(self) -> list[tuple[str, bool]]:
        """What is not yet given: (name beside the model file, whether it may be missing)."""
        names = [(self._binary_name, False)] if self._binary_name else []
        names += [(name, True) for name in self._manifests]
        return [(name, optional) for name, optional in names if name not in self._found]

    def add(self, name: str, file: ModelFile | None) -> None:
        """A wanted file, or that it is not there. Takes over the file, whatever comes of it.

        Raises:
            InvalidRequest: nobody wants it; or a manifest that is damaged.
            NotFound: reason FILE_MISSING; it may not be missing.
        """
        try:
            if name not in dict(self.wanted()):
                raise InvalidRequest(f"no file {name[:200]!r} is wanted here")
            if name == self._binary_name:
                if file is None:
                    raise NotFound(
                        f"the wrapper {str(self._file.path)!r} names the context binary {name!r}, "
                        "which is not beside it",
                        reason="FILE_MISSING",
                        path=self._file.path.parent / name,
                    )
                self._found[name], file = file, None
            else:
                self._found[name] = None if file is None else self._manifest(name, file)
        finally:
            if file is not None:
                file.close()

    def _manifest(self, name: str, file: ModelFile) -> Manifest | None:
        found = manifests.parse(name, file.read(0, manifests.MAX_BYTES + 1))
        if self._wrapper is None and found.binary_name != self._file.path.name:
            return None  # of another model in this directory
        return found

    def finish(self) -> OpenedModel:
        """All that there is; nothing is left here, also after an error.

        Raises:
            InvalidRequest: a file is still wanted.
            OSError: no file descriptor is left.
        """
        try:
            return self._finish()
        except BaseException:
            self.close()
            raise

    def _finish(self) -> OpenedModel:
        if missing := self.wanted():
            raise InvalidRequest(f"the file {missing[0][0]!r} was not handed over")
        found = [m for m in self._found.values() if isinstance(m, Manifest)]
        whole = None
        beside = self._found.pop(self._binary_name, None)
        if isinstance(beside, ModelFile):
            self._file.close()
            binary = beside
        else:
            binary = self._file
            if self._span is not None:
                whole = None if self._wrapper_sha256 else binary.duplicate()
                binary.narrow(self._span.offset, self._span.length)
        return OpenedModel(
            self._file.path,
            self._wrapper,
            SteadyFile(binary),
            found[0] if found else None,
            whole,
            self._wrapper_sha256,
        )

    def close(self) -> None:
        """Closes what was gathered. Idempotent."""
        self._file.close()
        for file in self._found.values():
            if isinstance(file, ModelFile):
                file.close()
        self._found.clear()


def open_path(source: Path) -> OpenedModel:
    """Opens a model and what belongs to it, with the rights of this process. Blocks.

    Raises:
        BrokerError: by what is wrong with the file, or the one it names.
    """
    gathering = Gathering(ModelFile.open(source))
    try:
        for name, optional in gathering.wanted():
            try:
                file = ModelFile.open(source.parent / name)
            except NotFound:
                file = None
            except BrokerError:
                if not optional:
                    raise
                raise InvalidRequest(
                    f"the manifest {name!r} is there but cannot be read", reason="BAD_FILE"
                ) from None
            gathering.add(name, file)
        return gathering.finish()
    except BaseException:
        gathering.close()
        raise

# SPDX-License-Identifier: Apache-2.0
"""Model files that a client opened and handed over, until it loads them or its session ends."""

from pathlib import Path

from qnnbroker.protos.errors import InvalidRequest

from .files import ModelFile
from .ids import IdTable
from .layouts import Gathering, OpenedModel
from .threads import made_on_thread

#: Models of one session that were handed over and not loaded; the oldest goes when there are more.
MAX_HANDED = 16


class HandedFiles:
    """Of one session. Belongs to the event loop's thread; reading is done on others."""

    def __init__(self) -> None:
        self._ids: IdTable[Gathering] = IdTable("file", "FILE_MISSING")
        self._order: list[int] = []  # of their coming
        self._closed = False

    def __len__(self) -> int:
        return len(self._ids)

    async def begin(self, path: str, fd: int) -> tuple[int, list[tuple[str, bool]]]:
        """A model file, opened by the client as `path`; takes over the fd.

        Returns:
            Its id, and what else is wanted: (name, whether it may be missing).

        Raises:
            BrokerError: by what is wrong with it.
        """
        file = ModelFile.adopt(Path(path), fd, own=False)
        gathering = await read_off_loop(file)
        if self._closed:
            gathering.close()
            raise InvalidRequest("the session ended while the file was read")
        if len(self._order) >= MAX_HANDED:
            self._drop(self._order[0])
        self._ids.add(lambda id: self._keep(id, gathering))
        return self._order[-1], gathering.wanted()

    def _keep(self, file_id: int, gathering: Gathering) -> Gathering:
        self._order.append(file_id)
        return gathering

    def _drop(self, file_id: int) -> None:
        self._order.remove(file_id)
        self._ids.remove(file_id).close()

    def add(self, file_id: int, name: str, fd: int | None) -> list[tuple[str, bool]]:
        """A file that was wanted; without an fd the client has none. What is wanted still.

        Raises:
            NotFound, LeaseRevoked: no such id.
            BrokerError: by what is wrong with the file; the whole model is given up.
        """
        file = None if fd is None else ModelFile.adopt(Path(name), fd, own=False)
        try:
            gathering = self._ids.get(file_id)
        except BaseException:
            if file is not None:
                file.close()
            raise
        try:
            gathering.add(name, file)
        except BaseException:
            self._drop(file_id)
            raise
        return gathering.wanted()

    def take(self, file_id: int) -> OpenedModel:
        """The files, which are the caller's now.

        Raises:
            NotFound, LeaseRevoked: no such id, or it was loaded already.
            InvalidRequest: something is still wanted.
        """
        gathering = self._ids.remove(file_id)
        self._order.remove(file_id)
        return gathering.finish()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        while self._order:
            self._drop(self._order[0])


async def read_off_loop(file: ModelFile) -> Gathering:
    """A Gathering, made on a thread; closed when the caller gives up meanwhile."""
    return await made_on_thread(None, lambda: Gathering(file))

# SPDX-License-Identifier: Apache-2.0
"""Verifier: no binary gets into the worker before it was tried in a process that may die of it.

The library checks nothing: a changed byte can crash it, hang it, or make it compute nonsense. And
binaries of two classes destroy each other in one process, which neither of them shows by itself. So
a new binary is tried beside one that is loaded here, and what came of it is remembered on disk.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    InvalidRequest,
    VersionMismatch,
)
from qnnbroker.v1 import control_pb2

from . import compatibility
from .backends.qnn import error_of_code
from .compatibility import ONE_SOC_MODEL, Facts
from .steady import SteadyFile
from .threads import made_on_thread
from .trial import Outcome, try_binary
from .verdicts import Verdict, VerdictStore

log = logging.getLogger(__name__)

#: QNN codes that say something about the machine at that moment, not about the file.
_PASSING_CODES = frozenset({1002, 1003, 1005, 1006, 1007, 1008, 1009, 1010, 1011})


class Resident(Protocol):
    """What the verifier has to know about a context that is loaded, or about to be."""

    @property
    def content_hash(self) -> str: ...

    @property
    def binary_class(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    def binary(self) -> SteadyFile | None:
        """The file with exactly its bytes, held; None when it is not what it was."""


@dataclass
class TrialCounts:
    """Of this broker's life."""

    trials: int = 0
    accepted: int = 0
    rejected: int = 0
    remembered: int = 0
    without_witness: int = 0


@dataclass
class Verifier:
    """Decides whether a binary may be created here. Belongs to the event loop's thread.

    Args:
        backend: what runs here.
        store: where verdicts are kept.
        limit_seconds: for one trial.
        threads: where trials are waited for; each takes one.
    """

    backend: control_pb2.BackendInfo
    store: VerdictStore
    limit_seconds: float
    threads: Executor
    counts: TrialCounts = field(default_factory=TrialCounts)

    @property
    def device(self) -> str:
        """What verdicts call the device."""
        kind = "emulated" if self.backend.emulated else "chip"
        return f"{kind} soc {self.backend.soc_model} arch {self.backend.dsp_arch}"

    async def admit(
        self,
        content_hash: str,
        file: SteadyFile,
        residents: Callable[[], Iterable[Resident]],
        cancelled: threading.Event,
        verifying: Callable[[], None],
    ) -> str:
        """The class of the binary, once it may be created beside what is loaded.

        After the last look at `residents` nothing is awaited: who calls this must count the binary
        among them at once.

        Raises:
            InvalidRequest: reason BAD_FILE; it was tried and rejected, now or before.
            VersionMismatch: it does not fit this chip or library, or what is loaded here.
            BrokerError: what the library or the trial said.
        """
        tried = alone = False
        while True:
            verdict = self.store.get(content_hash, self.backend.build_id, self.device)
            if verdict is not None and not verdict.accepted and self._still_counts(verdict):
                self.counts.remembered += 1
                raise verdict.refusal()
            loaded = [r for r in residents() if r.binary_class]
            wanted = loaded[0].binary_class if loaded else ""
            if verdict is not None and verdict.accepted:
                if wanted in verdict.conflicts:
                    raise class_conflict(verdict.content_hash, loaded[0].content_hash)
                if alone or wanted in ("", verdict.binary_class):
                    self.counts.remembered += not tried
                    return verdict.binary_class
            tried = True
            verifying()
            witness = await self._witness([r for r in loaded if r.binary_class == wanted])
            if wanted and witness is None:
                self.counts.without_witness += 1
                if self.backend.emulated:  # where two classes destroy each other
                    raise no_witness(content_hash, loaded[0].content_hash)
                log.warning("no loaded binary is there to try a new one beside; trying it alone")
                alone = True
            try:
                await self._try(content_hash, file, witness, verdict, cancelled)
            except WitnessGoneError as error:
                log.info("tried %s beside a file that changed: %s", content_hash[:12], error)
            finally:
                if witness is not None:
                    witness[1].close()

    def _still_counts(self, verdict: Verdict) -> bool:
        """A file that was too slow gets another chance once it may take longer."""
        return not 0 < verdict.limit_seconds < self.limit_seconds

    async def _witness(self, loaded: list[Resident]) -> tuple[Resident, SteadyFile] | None:
        """The smallest loaded binary that is still on disk as it was loaded."""
        for resident in sorted(loaded, key=lambda r: r.size_bytes):
            file = await made_on_thread(self.threads, resident.binary)
            if file is not None:
                return resident, file
        return None

    async def _try(
        self,
        content_hash: str,
        file: SteadyFile,
        witness: tuple[Resident, SteadyFile] | None,
        before: Verdict | None,
        cancelled: threading.Event,
    ) -> None:
        """One trial and what it means; its verdict is in the store afterwards.

        Raises:
            WitnessGoneError: nothing was found out.
            BrokerError: it was rejected, or could not be tried.
        """
        outcome = await self._trial(file, witness, cancelled, content_hash)
        verdict = Verdict(content_hash, self.backend.build_id, self.device, accepted=False)
        own = before.binary_class if before and before.accepted else content_hash[:16]
        wanted = witness[0].binary_class if witness is not None else own
        if not (outcome.kind == "ok" or of_the_moment(outcome)) and witness is not None:
            # Is it the binary, or the two of them together?
            alone = await self._trial(file, None, cancelled, content_hash)
            if alone.kind == "ok":
                conflicts = (*(before.conflicts if before else ()), wanted)
                self.store.put(
                    replace(verdict, accepted=True, binary_class=own, conflicts=conflicts)
                )
                self.counts.rejected += 1
                raise class_conflict(content_hash, witness[0].content_hash, outcome)
            outcome = alone
        if outcome.kind == "ok":
            self.counts.accepted += 1
            self.store.put(
                replace(
                    verdict,
                    accepted=True,
                    binary_class=wanted,  # beside no witness it shows only what it is by itself
                    conflicts=before.conflicts if before else (),
                )
            )
            return
        error = error_of(outcome)
        if of_the_moment(outcome):
            raise error  # nothing to remember
        self.counts.rejected += 1
        self.store.put(
            replace(
                verdict,
                error=type(error).__name__,
                reason=error.reason,
                message=error.message,
                limit_seconds=self.limit_seconds if outcome.kind == "hung" else 0.0,
            )
        )
        raise error

    async def _trial(
        self,
        file: SteadyFile,
        witness: tuple[Resident, SteadyFile] | None,
        cancelled: threading.Event,
        content_hash: str,
    ) -> Outcome:
        beside = witness[1] if witness is not None else None

        def check(facts: Facts) -> None:
            compatibility.check(facts, self.backend)

        def work() -> Outcome:
            while True:
                file.ensure(content_hash)
                if witness is not None:
                    ensure_witness(*witness)
                outcome = try_binary(
                    Path(self.backend.library_dir),
                    file,
                    beside,
                    check=check,
                    limit_seconds=self.limit_seconds,
                    cancelled=cancelled,
                )
                # Pages that went away below the child killed it, not what was in them.
                if outcome.kind == "ok" or (file.safe and (beside is None or beside.safe)):
                    return outcome

        self.counts.trials += 1
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self.threads, work)
        log.info(
            "tried %s %s: %s%s",
            content_hash[:12],
            "beside a loaded binary" if witness else "alone",
            outcome.kind,
            f", {outcome.message}" if outcome.message else "",
        )
        return outcome


class WitnessGoneError(Exception):
    """The binary that one was tried beside is no longer what was loaded."""


def ensure_witness(resident: Resident, file: SteadyFile) -> None:
    """Makes sure that the witness's bytes are held. May copy, so it blocks.

    Raises:
        WitnessGoneError: they are gone.
        LimitExceeded: reason MEMORY.
    """
    try:
        file.ensure(resident.content_hash)
    except InvalidRequest as error:
        raise WitnessGoneError(str(error)) from error


def of_the_moment(outcome: Outcome) -> bool:
    """Whether it says something about the machine at that time, and nothing about the file."""
    return outcome.kind == "cannot" or outcome.code in _PASSING_CODES


def no_witness(content_hash: str, resident_hash: str) -> VersionMismatch:
    """The refusal of a binary that cannot be tried beside what is loaded."""
    return VersionMismatch(
        f"the binary {content_hash[:12]} has to be tried beside one that is loaded, and no file "
        f"holds {resident_hash[:12]} as it was loaded any more (it was written to): unload that "
        "first, or put its file back",
        reason="BINARY_CLASS",
        content_hash=content_hash,
        resident=resident_hash,
    )


def class_conflict(
    content_hash: str, resident_hash: str, outcome: Outcome | None = None
) -> VersionMismatch:
    """The refusal of a binary that would spoil what is loaded."""
    how = f" (tried: {outcome.message})" if outcome is not None and outcome.message else ""
    return VersionMismatch(
        f"the binary {content_hash[:12]} cannot be in one process with {resident_hash[:12]}, which "
        f"is loaded{how}: {ONE_SOC_MODEL}",
        reason="BINARY_CLASS",
        content_hash=content_hash,
        resident=resident_hash,
    )


def error_of(outcome: Outcome) -> BrokerError:
    """What the caller is told about a trial that did not end well."""
    if outcome.kind == "cannot":
        return BackendError(f"the binary could not be tried: {outcome.message}", reason="INTERNAL")
    if outcome.kind == "refused" and outcome.code:
        return error_of_code(
            outcome.code, f"the library refuses the binary ({outcome.stage}): {outcome.message}"
        )
    return InvalidRequest(
        f"the binary is damaged, or of a kind that the library does not take: {outcome.message}",
        reason="BAD_FILE",
        trial=outcome.kind,
        stage=outcome.stage,
    )

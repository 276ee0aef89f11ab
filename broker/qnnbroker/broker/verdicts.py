# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what trial loads found out about context binaries, kept on disk for the next time.

One JSON file for a content hash, a build of the QNN library and a device; so a newer library asks
again. A file that is not ours, damaged, or of another format is as good as none.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qnnbroker.protos.errors import BrokerError, InvalidRequest, all_error_types

log = logging.getLogger(__name__)

FORMAT = 1
#: Larger ones are not ours.
MAX_FILE_BYTES = 64 * 1024
_MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a trial.

    Attributes:
        content_hash: sha256 of the binary.
        build: of the QNN library.
        device: SoC, arch, and whether it is an emulation.
        accepted: whether it loads, and leaves what is loaded beside it alone.
        binary_class: binaries of one class can live in one process; a name made from the hash of
            the first one. "" when refused.
        conflicts: classes that it was tried beside in vain.
        error, reason, message: of the refusal.
        date: ISO 8601, UTC.
        limit_seconds: the time limit, when it was that.
    """

    content_hash: str
    build: str
    device: str
    accepted: bool
    binary_class: str = ""
    conflicts: tuple[str, ...] = ()
    error: str = ""
    reason: str = ""
    message: str = ""
    date: str = ""
    limit_seconds: float = 0.0

    def refusal(self) -> BrokerError:
        """The refusal as an exception that says when it was found out."""
        kinds = {kind.__name__: kind for kind in all_error_types()}
        kind = kinds.get(self.error, InvalidRequest)
        return kind(
            f"{self.message} (found out on {self.date} and remembered)",
            reason=self.reason or None,
            content_hash=self.content_hash,
        )


def default_directory(runtime_dir: Path) -> Path:
    """`$XDG_CACHE_HOME/qnnbroker/verdicts`, `~/.cache/...`, or below the runtime directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "qnnbroker" / "verdicts"
    home = os.environ.get("HOME", "")
    if os.path.isabs(home) and os.path.isdir(home):
        return Path(home) / ".cache" / "qnnbroker" / "verdicts"
    return runtime_dir / "verdicts"


class VerdictStore:
    """The verdicts in one directory. Several brokers may share it. Threads: any."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._unwritten: dict[Path, Verdict] = {}

    def path(self, content_hash: str, build: str, device: str) -> Path:
        """Where that verdict is kept."""
        key = hashlib.sha256(f"{build}\0{device}".encode()).hexdigest()[:16]
        return self.directory / f"{content_hash}-{key}.json"

    def get(self, content_hash: str, build: str, device: str) -> Verdict | None:
        """The verdict, or None. Never fails."""
        path = self.path(content_hash, build, device)
        try:
            found = _parse(_read_own(path))
        except FileNotFoundError:
            return self._unwritten.get(path)
        except (OSError, ValueError, TypeError) as error:
            log.warning("the verdict in %s is of no use: %s", path, error)
            return self._unwritten.get(path)
        if (found.content_hash, found.build, found.device) != (content_hash, build, device):
            log.warning("the verdict in %s is about something else", path)
            return None
        return found

    def put(self, verdict: Verdict) -> Verdict:
        """Keeps it with today's date, whole or not at all; if it cannot be written, in memory."""
        verdict = replace(
            verdict,
            message=verdict.message[:_MAX_TEXT],
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        path = self.path(verdict.content_hash, verdict.build, verdict.device)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{id(verdict):x}")
        try:
            self.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, **asdict(verdict)}, file, indent=1)
                file.flush()
                os.fsync(fd)
            os.replace(temporary, path)
            self._unwritten.pop(path, None)
        except OSError as error:
            log.warning("the verdict on %s is not kept: %s", verdict.content_hash[:12], error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._unwritten[path] = verdict  # for as long as this broker lives
        return verdict


def _read_own(path: Path) -> bytes:
    """A regular file of ours that nobody else may write; what others say about a binary is no
    verdict.

    Raises:
        OSError, ValueError
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise ValueError("not a file that only we can write")
        if info.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{info.st_size} bytes")
        return file.read(MAX_FILE_BYTES)


def _parse(data: bytes) -> Verdict:
    content: Any = json.loads(data)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"not of the format {FORMAT}")
    defaults = asdict(Verdict("", "", "", False))
    if set(content) != set(defaults):
        raise ValueError("other fields than expected")
    conflicts = content.pop("conflicts")
    if not isinstance(conflicts, list) or not all(isinstance(c, str) for c in conflicts):
        raise ValueError("conflicts that are no names")
    limit = content.pop("limit_seconds")
    if type(limit) not in (int, float):
        raise ValueError("a time limit that is no number")
    for name, value in content.items():
        if type(value) is not type(defaults[name]):
            raise ValueError(f"{name} is {type(value).__name__}")
    return Verdict(conflicts=tuple(conflicts), limit_seconds=float(limit), **content)

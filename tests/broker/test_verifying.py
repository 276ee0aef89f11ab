# SPDX-License-Identifier: Apache-2.0
"""What trials mean when something else than the binary goes wrong in them."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.broker.inside import attached, go, loaded, running
from tests.fake_models import MakeModel, adder

from qnnbroker.broker import verifying
from qnnbroker.broker.steady import SteadyFile
from qnnbroker.broker.trial import Outcome, try_binary
from qnnbroker.native.fake import SWITCHES_ENV, switches
from qnnbroker.protos.errors import LimitExceeded, VersionMismatch


def kept(folder: Path) -> list[dict[str, Any]]:
    """The verdicts on disk."""
    return [json.loads(path.read_text()) for path in folder.iterdir()]


def test_a_witness_that_goes_during_a_trial_says_nothing_about_the_binary(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_model(n, adder(n)) for n in ("first", "second"))
    content = first.read_bytes()

    def trying(
        qnn_dir: Path, candidate: SteadyFile, witness: SteadyFile | None, **how: Any
    ) -> Outcome:
        if witness is not None:  # what the kernel does when the time of a lease is over
            fcntl.fcntl(witness.file.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.truncate(first, 0)
        return try_binary(qnn_dir, candidate, witness, **how)

    async def work() -> None:
        folder = tmp_path / "verdicts"
        async with running(verify="always", verdict_dir=str(folder)) as service:
            session = attached(service)
            await loaded(service, session, first)
            with monkeypatch.context() as patched:
                patched.setattr(verifying, "try_binary", trying)
                with pytest.raises(VersionMismatch, match="has to be tried beside"):
                    await loaded(service, session, second)
            assert [v["conflicts"] for v in kept(folder)] == [[]]
            first.write_bytes(content)
            await loaded(service, session, second)

    go(work)


@pytest.mark.parametrize("code", [1002, 1007])
def test_what_the_machine_lacks_for_two_is_no_conflict_of_the_two(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    first, second = (make_model(n, adder(n)) for n in ("first", "second"))

    async def work() -> None:
        folder = tmp_path / "verdicts"
        async with running(verify="always", verdict_dir=str(folder)) as service:
            session = attached(service)
            await loaded(service, session, first)
            # The second creation of a trial process: that of the binary, beside the witness.
            fault = switches(f"fail=contextCreateFromBinary:2:{code}")
            monkeypatch.setenv(SWITCHES_ENV, fault)
            with pytest.raises(Exception, match=str(code)) as refused:
                await loaded(service, session, second)
            assert isinstance(refused.value, LimitExceeded) == (code == 1002)
            assert [v["conflicts"] for v in kept(folder)] == [[]]
            monkeypatch.setenv(SWITCHES_ENV, "")
            await loaded(service, session, second)

    go(work)

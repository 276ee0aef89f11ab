# SPDX-License-Identifier: Apache-2.0
"""Sessions: their tokens, and that closing one gives everything back, once."""

import os
from pathlib import Path

import pytest
from tests.broker.inside import alive, attached, bound, go, hanging, running, until
from tests.fake_models import MakeModel, adder

from qnnbroker.broker.sessions import Peer, printable
from qnnbroker.native.fake import control_loaded
from qnnbroker.protos.errors import LeaseRevoked, LimitExceeded, NotAllowed, NotFound


def test_every_session_has_a_token_of_its_own_that_finds_it() -> None:
    async def work() -> None:
        async with running() as service:
            made = [attached(service, f"client {n}") for n in range(10)]
            assert len({s.token for s in made}) == 10
            for session in made:
                assert len(session.token) == 16
                assert service.sessions.by_token(session.token) is session
                assert service.sessions.by_id(session.session_id) is session
            assert list(service.sessions) == made
            service.sessions.close(made[3], "test")
            with pytest.raises(NotFound) as gone:
                service.sessions.by_token(made[3].token)
            assert gone.value.reason == "SESSION_UNKNOWN"
            with pytest.raises(LeaseRevoked):
                service.sessions.by_id(made[3].session_id)
            with pytest.raises(NotFound):
                made[3].check_open()
            made[4].check_open()

    go(work)


@pytest.mark.parametrize("token", [b"", b"x" * 15, b"x" * 17])
def test_what_is_no_token_is_not_looked_up(token: bytes) -> None:
    async def work() -> None:
        async with running() as service:
            with pytest.raises(NotAllowed, match="16 bytes"):
                service.sessions.by_token(token)

    go(work)


def test_there_are_no_more_than_allowed() -> None:
    async def work() -> None:
        async with running(max_sessions=2) as service:
            first, _ = attached(service), attached(service)
            with pytest.raises(LimitExceeded, match="limit is 2"):
                attached(service)
            service.sessions.close(first, "test")
            attached(service)

    go(work)


def test_closing_gives_everything_back_when_what_runs_has_ended(
    tmp_path: Path, make_model: MakeModel
) -> None:
    path = make_model("slow", adder("slow"))
    before = alive()

    async def work() -> None:
        async with running() as service:
            session = attached(service)
            binding = session.bindings.get(await bound(service, session, path))
            control_loaded("hang=graphExecute@slow:1")
            hung = hanging()
            native = binding.bound.native
            assert native.submit(1) == 0
            assert native.submit(2) == 0
            await until(lambda: hanging() > hung, "the first runs")
            service.sessions.close(session, "test")
            service.sessions.close(session, "again")
            assert (len(service.sessions), service.sessions.closing_count) == (0, 1)
            assert len(service.models) == 0
            assert len(service.contexts) == 1  # in use
            assert (len(session.buffers), len(session.bindings)) == (0, 0)
            control_loaded("unhang")
            await until(lambda: service.sessions.closing_count == 0, "the session is gone")
            await until(lambda: len(service.contexts) == 0, "the context is freed")
        assert alive() == before

    go(work)


def test_a_peer_is_known_by_its_command_line() -> None:
    assert "pytest" in Peer(os.getpid(), 0, 0).command
    assert Peer(2**22 + 1, 0, 0).command == ""


def test_nothing_of_a_name_moves_a_cursor_or_begins_a_line() -> None:
    assert printable("naïve 漢 name") == "naïve 漢 name"
    assert printable("a\nb\tc\x1b[2Jd\u202ee\x00") == "a?b?c?[2Jd?e?"

# SPDX-License-Identifier: Apache-2.0
"""The executor's C code under stress and under sanitizers: executor_stress.c, compiled here.

A fifth of a million submissions, and three million in the full mode (`make stress`).
"""

from pathlib import Path

import pytest
from tests.native.c_program import compiled, said
from tests.stress import FULL, scaled

SOURCES = [
    *("qb_executor.c", "qb_lead.c", "qb_place.c", "qb_sched.c", "qb_session.c", "qb_events.c"),
    *("qb_client.c", "qb_client_wait.c", "qb_doorbell.c", "qb_counters.c"),
]

pytestmark = [pytest.mark.slow] if FULL else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executor_stress")


@pytest.mark.parametrize("spin_ns", [0, 10_000])
@pytest.mark.parametrize(
    ("sanitizer", "submissions", "sessions"),
    [
        ("", 20_000, 4),
        ("", 4_000, 1),
        ("thread", 3_000, 6),
        ("address", 5_000, 3),
    ],
)
def test_every_submission_completes_once_whatever_happens_to_its_binding(
    folder: Path, sanitizer: str, submissions: int, sessions: int, spin_ns: int
) -> None:
    program = compiled(folder, "executor_stress", SOURCES, sanitizer)
    for seed in range(scaled(1, 14)):
        assert said(program, submissions, sessions, spin_ns, seed).startswith("ok ")

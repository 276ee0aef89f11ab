# SPDX-License-Identifier: Apache-2.0
"""How often what a client causes is worth a line in the log."""

from qnnbroker.broker.requests import Seldom


def test_the_first_is_worth_a_line_and_those_soon_after_are_counted() -> None:
    now = [100.0]
    seldom = Seldom(60, lambda: now[0])
    assert seldom.due() == 1
    for now[0] in (100.0, 130.0, 159.9):
        assert seldom.due() == 0
    now[0] = 160.0
    assert seldom.due() == 4
    assert seldom.due() == 0
    now[0] = 1000.0
    assert seldom.due() == 2

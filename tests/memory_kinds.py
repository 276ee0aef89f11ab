# SPDX-License-Identifier: Apache-2.0
"""For modules whose tests hold however the device gets at memory: they run with both ways.

Import `memory_words`; the brokers of the module's fixtures then have one after the other.
"""

import pytest

#: How bindings get at their tensors -> switches of the fake.
WAYS = {"raw": (), "registered": ("mem_register=on",)}


@pytest.fixture(scope="module", params=WAYS)
def memory_words(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Overrides the one of conftest.py."""
    way: str = request.param
    return WAYS[way]

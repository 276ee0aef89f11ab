# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable

def check_overlap(spans: Iterable[tuple[int, int, bool, str]]) -> None: ...

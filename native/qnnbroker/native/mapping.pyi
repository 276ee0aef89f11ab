# SPDX-License-Identifier: Apache-2.0
from typing_extensions import disjoint_base

MAX_REGION_BYTES: int

@disjoint_base
class Mapping:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

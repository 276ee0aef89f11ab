# SPDX-License-Identifier: Apache-2.0
class Runnable:
    @property
    def closed(self) -> bool: ...

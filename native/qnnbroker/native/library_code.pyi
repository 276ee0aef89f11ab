# SPDX-License-Identifier: Apache-2.0
from os import PathLike

def unmap(directory: str | PathLike[str]) -> int: ...

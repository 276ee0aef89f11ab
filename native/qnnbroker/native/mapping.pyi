# SPDX-License-Identifier: Apache-2.0
MAX_REGION_BYTES: int

class Mapping: ...

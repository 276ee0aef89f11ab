# SPDX-License-Identifier: Apache-2.0
"""What both sides of the wire share: errors, tensor specs, frames, paths. Imports only `v1`."""

# SPDX-License-Identifier: Apache-2.0
"""Generated code of the protos of this folder (`make proto`); only this file is written by hand."""

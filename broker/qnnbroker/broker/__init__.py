# SPDX-License-Identifier: Apache-2.0
"""The broker process: owns the backend, the contexts and the shared buffers of every client.

`python -m qnnbroker.broker` runs it; `Broker` and `BrokerConfig` are for embedding and tests.
"""

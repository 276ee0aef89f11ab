# SPDX-License-Identifier: Apache-2.0
"""Which backend a config asks for, opened."""

from collections.abc import Callable
from pathlib import Path

from qnnbroker.native.qnn_library import default_qnn_dir
from qnnbroker.native.region import Region
from qnnbroker.protos.errors import BrokerUnavailable

from ..config import BrokerConfig
from .base import Backend
from .qnn import QnnBackendAdapter


def open_backend(config: BrokerConfig, probe_region: Callable[[], Region] | None = None) -> Backend:
    """Starts the backend; blocks while the library loads.

    Raises:
        BrokerUnavailable: reason NPU_LOST; no library, says what to install.
        BrokerError: it does not start.
    """
    if config.backend == "fake":
        from qnnbroker.native.fake import fake_qnn_dir

        directory = fake_qnn_dir()
    elif config.qnn_lib_dir:
        directory = Path(config.qnn_lib_dir)
    else:
        try:
            directory = default_qnn_dir()
        except FileNotFoundError as error:
            raise BrokerUnavailable(str(error), reason="NPU_LOST") from error
    return QnnBackendAdapter(
        directory,
        name=config.backend,
        log_level=config.qnn_log_level,
        probe_region=probe_region,
    )

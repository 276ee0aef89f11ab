# SPDX-License-Identifier: Apache-2.0
"""The channel of the control service."""

import os
import signal
import threading
from pathlib import Path

from tests.client.conftest import BrokerProcess, MakeModel

from qnnbroker.client import connect


def test_a_broker_that_is_busy_while_the_channel_connects_is_waited_for(
    mortal_broker: BrokerProcess, make_model: MakeModel
) -> None:
    path: Path = make_model()
    pid = mortal_broker.process.pid
    with connect(mortal_broker.runtime_dir) as session:  # the channel connects with the first call
        os.kill(pid, signal.SIGSTOP)
        goes_on = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        goes_on.start()
        try:
            assert session.load(path).name == path.stem
        finally:
            goes_on.join()

# SPDX-License-Identifier: Apache-2.0
"""A client from the protos alone: gRPC and generated code, the tensors inside the messages.

    python examples/grpc_only.py [--runtime-dir DIR]

What any language with gRPC can do: load a model without a session, ask what it wants, run it. The
broker copies the tensors (and counts that); there is no shared memory. The model stays in memory
for the keep-alive that was asked for.
"""

import argparse
import sys
from pathlib import Path

import grpc
import numpy as np

import with_broker
import zoo
from qnnbroker.v1 import control_pb2, types_pb2
from qnnbroker.v1.control_pb2_grpc import ControlServiceStub
from zoo.model import Feeds, Outputs

#: Numbers of the protos to numpy's names; all that this model has.
_DTYPES = {types_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"), types_pb2.DATA_TYPE_INT32: np.dtype("<i4")}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
#: The detail of a failed call, beside its status.
_ERROR_KEY = "qnnbroker-error-bin"


def load(control: ControlServiceStub, wrapper: Path) -> control_pb2.Model:
    """The model; prints the stages of the load."""
    request = control_pb2.LoadModelRequest(path=str(wrapper), keep_alive_seconds=30)
    for report in control.LoadModel(request, timeout=120):
        print(f"  {control_pb2.LoadStage.Name(report.stage)}")
    return report.model


def infer(control: ControlServiceStub, model: control_pb2.Model, feeds: Feeds) -> Outputs:
    """One run. Bytes are in C order, little endian."""
    request = control_pb2.InferRequest(model_id=model.model_id)
    for name, array in feeds.items():
        request.inputs.add(
            name=name, dtype=_NUMBERS[array.dtype], shape=array.shape, data=array.tobytes()
        )
    answer = control.Infer(request, timeout=120)
    print(
        f"  {answer.timing.execute_ns / 1e6:.1f} ms of the device, "
        f"{answer.timing.copied_bytes} bytes copied"
    )
    return {
        t.name: np.frombuffer(t.data, _DTYPES[t.dtype]).reshape(tuple(t.shape))
        for t in answer.outputs
    }


def explain(error: grpc.RpcError) -> str:
    """A failed call in words: the broker's own, when it said any."""
    if not isinstance(error, grpc.Call):
        return str(error)
    for key, value in error.trailing_metadata() or ():
        if key == _ERROR_KEY and isinstance(value, bytes):
            detail = types_pb2.ErrorDetail.FromString(value)
            return f"{detail.type} {detail.reason}: {detail.message}"
    return f"{error.code().name}: {error.details()}"


def main() -> int:
    """Load, describe, run; 0 if the answers are right."""
    parser = argparse.ArgumentParser(description="A client from the protos alone.")
    with_broker.add_options(parser)
    arguments = parser.parse_args()
    wrapper, right = zoo.compiled("silero_vad"), True
    with (
        with_broker.broker(arguments.runtime_dir) as directory,
        grpc.insecure_channel(f"unix:{directory / 'grpc.sock'}") as channel,
    ):
        control = ControlServiceStub(channel)
        try:
            model = load(control, wrapper)
            (graph,) = model.graphs
            for what, specs in (("input", graph.inputs), ("output", graph.outputs)):
                for spec in specs:
                    dtype = types_pb2.DataType.Name(spec.dtype)
                    print(f"  {what} {spec.name}: {dtype} {list(spec.shape)}")
            for case in zoo.model("silero_vad").cases():
                is_right, answer = case.check(infer(control, model, case.feeds))
                print(f"{case.label}: {answer}{'' if is_right else '  WRONG'}")
                right = right and is_right
            control.UnloadModel(control_pb2.UnloadModelRequest(model_id=model.model_id), timeout=60)
        except grpc.RpcError as error:
            print(f"grpc_only.py: {explain(error)}", file=sys.stderr)
            return 1
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(with_broker.run(main))

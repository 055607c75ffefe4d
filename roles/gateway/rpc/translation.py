"""gRPC's messages to inferences and back, as pure functions: what `http/protocol_v2.py` is for HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fabric.errors import InvalidInput, TooLarge
from fabric.link import Tensor
from fabric.messages import RANK_MAX, TENSORS_MAX
from fabric.policy_options import shown
from fabric.tensors import dtype_name
from roles.gateway.inference import (
    VERSION,
    Inference,
    InputTensor,
    OutputWanted,
    budget_of,
    check_parameters,
    check_tensor_parameters,
    check_version,
    priority_of,
    wanted_of,
)
from roles.gateway.rpc.messages import ModelInferResponse
from roles.gateway.tensors import (
    BF16,
    BYTES,
    VALUES_MAX,
    Elements,
    count_of,
    datatype_of,
    from_raw,
    from_values,
    to_raw,
)

_CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    **{f"INT{bits}": "int_contents" for bits in (8, 16, 32)},
    **{f"UINT{bits}": "uint_contents" for bits in (8, 16, 32)},
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""By datatype: the field that has its values."""
PARAMETERS_MAX: Final = 64
"""Of a request, and of each of its tensors."""


def read_infer(request: Any) -> Inference:
    """The inference that a `ModelInferRequest` asks for. Raises InvalidInput, ModelNotFound, TooLarge, Unsupported."""
    check_version(request.model_name, request.model_version)
    parameters = plain_parameters(request.parameters)
    check_parameters(parameters)
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInput(f"{len(request.inputs)} inputs, and {len(raw)} raw_input_contents")
    for what, tensors in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(tensors) > TENSORS_MAX:
            raise InvalidInput(f"{len(tensors)} {what}; one inference may have {TENSORS_MAX}")
    inputs = []
    elements = 0
    for at, one in enumerate(request.inputs):
        check_tensor_parameters(one.name, plain_parameters(one.parameters))
        # One length more than a tensor may have is enough to refuse it: 64 MiB of them are seconds of the loop.
        shape = tuple(one.shape[: RANK_MAX + 1])
        if raw:
            if one.HasField("contents"):
                raise InvalidInput(f"input {shown(one.name)} has contents and raw_input_contents")
            data = from_raw(one.name, one.datatype, shape, memoryview(raw[at]))
        else:
            count = count_of(one.name, one.datatype, shape)
            elements += count
            if elements > VALUES_MAX:
                raise TooLarge(
                    f"{elements} elements and more in contents; there may be {VALUES_MAX}:"
                    " send tensors as raw_input_contents"
                )
            data = _from_contents(one, shape, count)
        inputs.append(InputTensor(one.name, shape, data))
    outputs = []
    for wanted in request.outputs:
        check_tensor_parameters(wanted.name, plain_parameters(wanted.parameters))
        outputs.append(OutputWanted(wanted.name, is_binary=True))
    return Inference(
        request.model_name,
        inputs,
        outputs,
        is_binary=True,
        budget_ms=budget_of(parameters),
        priority=priority_of(parameters),
        request_id=request.id,
    )


def write_infer(inference: Inference, outputs: Mapping[str, Tensor]) -> Any:
    """The `ModelInferResponse`: tensors raw, as Triton answers too."""
    response = ModelInferResponse(model_name=inference.model, model_version=VERSION, id=inference.request_id)
    for name, array, _ in wanted_of(inference, outputs):
        response.outputs.add(name=name, datatype=datatype_of(dtype_name(array.dtype)), shape=array.shape)
        response.raw_output_contents.append(bytes(to_raw(array)))
    return response


def plain_parameters(parameters: Any) -> dict[str, Any]:
    """By name, whichever kind each has. Raises InvalidInput."""
    if len(parameters) > PARAMETERS_MAX:
        raise InvalidInput(f"{len(parameters)} parameters; there may be {PARAMETERS_MAX}")
    found = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(value, kind)
    return found


def _from_contents(one: Any, shape: tuple[int, ...], count: int) -> Tensor | Elements:
    if one.datatype in ("FP16", BF16):
        raise InvalidInput(
            f"input {shown(one.name)} is {one.datatype}, which goes in raw_input_contents only"
        )
    field = _CONTENTS.get(one.datatype)
    if field is None:
        raise InvalidInput(
            f"input {shown(one.name)} has the datatype {shown(one.datatype)}; there is no such one"
        )
    elements = getattr(one.contents, field)
    if len(elements) != count:  # before each of them becomes an object
        raise InvalidInput(f"input {shown(one.name)} has {len(elements)} elements; its shape says {count}")
    if one.datatype == BYTES:
        return tuple(elements)
    return from_values(one.name, one.datatype, shape, list(elements))

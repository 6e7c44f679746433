"""Tests that every field in the project's small .proto files has the same encoding as in the official types."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from dualmap_extproc.wire import access_log_pb2, base_pb2, discovery_pb2, ext_proc_pb2, external_scaler_pb2

with warnings.catch_warnings():
    # envoy_data_plane 2.2 declares validators with an API that pydantic deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filter_
    from envoy_data_plane.envoy.service.accesslog import v3 as accesslog
    from envoy_data_plane.envoy.service.discovery import v3 as discovery
    from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc

WIRE = Path(ext_proc_pb2.__file__).parent
PROTO = Path(__file__).parents[2] / "extproc" / "proto"

PAIRS = [
    (ext_proc_pb2.ProcessingRequest, ext_proc.ProcessingRequest),
    (ext_proc_pb2.ProcessingResponse, ext_proc.ProcessingResponse),
    (discovery_pb2.DiscoveryRequest, discovery.DiscoveryRequest),
    (discovery_pb2.DiscoveryResponse, discovery.DiscoveryResponse),
    (discovery_pb2.ClusterLoadAssignment, endpoint.ClusterLoadAssignment),
    (access_log_pb2.StreamAccessLogsMessage, accesslog.StreamAccessLogsMessage),
    (access_log_pb2.StreamAccessLogsResponse, accesslog.StreamAccessLogsResponse),
]


def scalar(field: FieldDescriptor) -> object:
    """Return a value that differs from the field's default and from the values of neighbouring fields."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return field.enum_type.values[-1].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\x00\xff" + field.name.encode()
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return f"{field.name} \N{SNOWMAN}"
    if field.full_name == "dualmap.wire.HttpStatus.code":
        return 503
    if field.name == "nanos":
        return 42_000  # the official types are datetimes: microseconds
    return 40 + field.number


def fill(message: Message, choice: int) -> None:
    """Set every field of ``message``; in each oneof, set only the field that ``choice`` selects."""
    if isinstance(message, Struct):
        message.update({"text": "a", "number": 2.5, "list": ["b", {"c": None}], "yes": True})
        return
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[choice % len(oneof.fields)] is not field:
            continue
        target = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            if entry.fields_by_name["value"].message_type is None:
                target["key"] = "value"
            else:
                fill(target["key"], choice)
        elif entry is not None:
            child = target.add() if field.is_repeated else target
            child.SetInParent()
            fill(child, choice)
        elif field.is_repeated:
            target.append(scalar(field))
        else:
            setattr(message, field.name, scalar(field))


@pytest.mark.parametrize("choice", range(7))
@pytest.mark.parametrize(("ours", "official"), PAIRS, ids=[ours.__name__ for ours, _ in PAIRS])
def test_wire_messages_round_trip_through_the_official_type(ours, official, choice):
    message = ours()
    fill(message, choice)

    returned = ours()
    returned.ParseFromString(bytes(official.parse(message.SerializeToString())))

    assert returned == message


def test_wire_fields_have_the_official_names():
    official = ext_proc.ProcessingRequest(
        request_body=ext_proc.HttpBody(body=b"{}", end_of_stream=True),
        protocol_config=ext_proc.ProtocolConfiguration(
            request_body_mode=filter_.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
            send_body_without_waiting_for_header_response=True,
        ),
    )

    message = ext_proc_pb2.ProcessingRequest.FromString(bytes(official))

    assert message.request_body.body == b"{}"
    assert message.request_body.end_of_stream
    assert message.protocol_config.request_body_mode == ext_proc_pb2.FULL_DUPLEX_STREAMED
    assert message.protocol_config.send_body_without_waiting_for_header_response


@pytest.mark.parametrize(
    ("ours", "official"),
    [
        (base_pb2.HealthStatus, core.HealthStatus),
        (base_pb2.HeaderValueOption.HeaderAppendAction, core.HeaderValueOptionHeaderAppendAction),
        (ext_proc_pb2.BodySendMode, filter_.ProcessingModeBodySendMode),
        (access_log_pb2.RequestMethod, core.RequestMethod),
    ],
)
def test_wire_enums_have_the_official_numbers(ours, official):
    assert dict(ours.items()) == {value.name: value.value for value in official}


def test_wire_keda_messages_have_the_official_field_numbers():
    """The numbers are from KEDA 2.20's pkg/scalers/externalscaler/externalscaler.proto, by the fields' JSON names."""
    numbers = {
        "ScaledObjectRef": {"name": 1, "namespace": 2, "scalerMetadata": 3},
        "IsActiveResponse": {"result": 1},
        "GetMetricSpecResponse": {"metricSpecs": 1},
        "MetricSpec": {"metricName": 1, "targetSize": 2, "targetSizeFloat": 3},
        "GetMetricsRequest": {"scaledObjectRef": 1, "metricName": 2},
        "GetMetricsResponse": {"metricValues": 1},
        "MetricValue": {"metricName": 1, "metricValue": 2, "metricValueFloat": 3},
    }
    messages = external_scaler_pb2.DESCRIPTOR.message_types_by_name
    assert {name: {each.json_name: each.number for each in of.fields} for name, of in messages.items()} == numbers
    spec = messages["MetricSpec"].fields_by_name
    assert spec["target_size"].type == FieldDescriptor.TYPE_INT64
    assert spec["target_size_float"].type == FieldDescriptor.TYPE_DOUBLE


def test_wire_modules_are_generated_from_the_proto_files(tmp_path):
    """Checks that the generated files are up to date with the .proto files (``make proto``)."""
    package = tmp_path / "dualmap_extproc" / "wire"
    sources = sorted(PROTO.rglob("*.proto"))
    outputs = [f"-I{PROTO}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *outputs, *map(str, sources)], check=True)

    generated = {path.name: path.read_text() for path in package.glob("*_pb2.py*")}

    assert generated == {path.name: path.read_text() for path in WIRE.glob("*_pb2.py*")}
    assert len(generated) == 2 * len(sources) > 0

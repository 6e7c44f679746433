"""The protobuf messages between Envoy and the router, generated (upb) from the project's own small .proto files.

The files declare only the fields that the router reads or writes, with their official numbers. Protobuf does not parse
all other fields. Protobuf does not send message names, so the messages can be in the package ``dualmap.wire``. This
name avoids conflicts with other ``envoy.*`` stubs. ``make proto`` generates the modules; tests compare them with the
.proto files and with ``envoy_data_plane``.
"""

"""The messages Envoy and the router exchange, as protobuf (upb) classes generated from small .proto files of our own.

The files declare, under their official field numbers, only the fields the router reads or writes; everything else
travels as unknown fields, unparsed and unvalidated. Message names on the wire do not exist, and gRPC method paths are
plain strings (``dualmap_extproc.names``), so the package may be called ``dualmap.wire`` without clashing with anybody
else's ``envoy.*`` stubs. ``make proto`` regenerates the modules; tests hold them equal to the .proto files and to
``envoy_data_plane``'s types.
"""

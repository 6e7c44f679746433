"""The program h2spec: conformance tests of HTTP/2 servers, built from the Go module proxy once per machine."""

"""The router's telemetry: Prometheus metrics, the HTTP server for metrics and status, spans, and the dashboard.

This package subscribes to ``request.observations``, and may also import ``autoscaling``. This package never imports
gRPC, and only ``tracing`` imports OpenTelemetry.
"""

"""What the router shows: Prometheus metrics, the HTTP port that serves them, spans, and the dashboard.

Subscribes to ``request.observations``; may also import ``autoscaling``. Never reaches gRPC; only ``tracing`` imports
OpenTelemetry.
"""

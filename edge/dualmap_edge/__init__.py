"""What the applications share at their edges: logs, ports, options of their commands, the way to the API server."""

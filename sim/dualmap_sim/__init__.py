"""The engine model, workloads, and the simulated OpenAI-compatible server built on them."""

"""``python -m bench.engine`` compares the simulator's engine model with a real vLLM."""

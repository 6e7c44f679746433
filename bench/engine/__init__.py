"""``python -m bench.engine``: the engine model of the simulator beside a real vLLM."""

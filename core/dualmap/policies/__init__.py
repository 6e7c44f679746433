"""The routing policies: their input (``situation``), the rule of each, and their registry.

One file per policy, in three folders by the signals it uses. May import keys, pools and errors,
never prompts or replicas. A policy keeps no state.
"""

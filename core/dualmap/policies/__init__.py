"""The routing policies: what they may know (``situation``), the rule of each, and their registry.

One file per policy, in three folders by what the policy looks at. May import keys and pools; a policy keeps no state.
"""

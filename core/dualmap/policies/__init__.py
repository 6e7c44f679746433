"""The routing policies, their input (``situation``) and their registry.

Each policy has one module, in one of three packages by the signals that the policy uses. A policy has no state. This
package may import keys, pools and errors, but not prompts or replicas.
"""

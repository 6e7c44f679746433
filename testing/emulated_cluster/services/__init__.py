"""The emulation of Services: a DNS server for their names and a TCP proxy for their cluster addresses.

May import: `api` and `control_plane`.
"""

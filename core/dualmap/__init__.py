"""DualMap's core: chooses the member for each LLM request and records the reason.

The core is pure Python and uses only the standard library and a hash library. The core has no I/O, no clock and no
random source. All methods receive the time as ``now`` (monotonic seconds) and return decisions and observations as
values. The ext_proc server (``dualmap_extproc``) and the simulator (``dualmap_sim``) use the same objects.
"""

"""DualMap's core: chooses the member for each LLM request and records the reason.

Pure Python over the standard library and a hash library: no I/O, no clock, no randomness it was not given.
Time comes in as ``now`` (monotonic seconds), decisions and observations go out as values. The ext_proc server
(``dualmap_extproc``) and the simulator (``dualmap_sim``) drive the same objects.
"""

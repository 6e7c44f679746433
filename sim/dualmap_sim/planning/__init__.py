"""Plans capacity: the least number of instances that keeps the SLO on a workload, with its uncertainty.

This package may import the core and the simulator. It has no clock and reads no files, except what an experiment loads.
"""

"""Autoscaling: the demand on each pool, its sum over all routers, and KEDA's external scaler.

May import ``request`` (observations) and the rooms below it; gRPC in ``scaler`` only.
"""

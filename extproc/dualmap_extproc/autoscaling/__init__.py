"""Autoscaling: the demand on each pool, its sum over all routers, and KEDA's external scaler.

May import ``request`` (observations), ``wire`` and gRPC; gRPC in ``scaler`` only.
"""

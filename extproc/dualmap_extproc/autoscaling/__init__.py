"""Autoscaling: the demand on each pool, its sum over all routers, and KEDA's external scaler.

This package may import ``request`` (observations) and the packages below ``request``. Only ``scaler`` may import gRPC.
"""

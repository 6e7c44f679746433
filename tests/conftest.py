"""What holds for every unit test: hypothesis never judges by the clock of a shared machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

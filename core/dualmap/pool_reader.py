"""InferencePool objects (Kubernetes API or YAML file, already parsed) to Pool values: one reader, two sources."""

from dualmap.pool import Pool


def read_pools(document: object, *, source: str) -> tuple[Pool, ...]:
    """Read one object, a List, or an InferencePoolList; raises PoolError naming field, value and what is accepted."""
    raise NotImplementedError

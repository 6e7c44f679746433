"""Tests of reading ``spec.kvStore``."""

import pytest

from dualmap.errors import PoolError
from dualmap.objects.fields import Fields
from dualmap.objects.kv_store_reader import read_kv_store
from dualmap.pools.pool import Tokenizer


@pytest.mark.parametrize("kind", ["Redis", "Mooncake"])
def test_endpoint_with_a_password_is_rejected_without_quoting_it(kind: str) -> None:
    fields = Fields({"type": kind, "endpoint": "redis://user:s3cret@10.0.0.1:6379"}, "spec.kvStore")

    with pytest.raises(PoolError, match=r"spec\.kvStore\.endpoint") as caught:
        read_kv_store(fields, Tokenizer())

    assert "s3cret" not in str(caught.value)
    assert "10.0.0.1:6379" in str(caught.value)

"""Tests of reading ``spec.kvStore``."""

import pytest

from dualmap.errors import PoolError
from dualmap.objects.fields import Fields
from dualmap.objects.kv_store_reader import read_kv_store
from dualmap.pools.pool import Tokenizer, TokenSource


@pytest.mark.parametrize("kind", ["Redis", "Mooncake", "None"])
@pytest.mark.parametrize(
    "endpoint",
    [
        "redis://user:s3cret@10.0.0.1:6379",
        "redis://10.0.0.1:6379/0?password=s3cret",
        "http://u:s3cr@s3cret@10.0.0.1:6379/?token=s3cret#s3cret",
        "http://10.0.0.1:6379/#s3cret",
    ],
)
def test_endpoint_with_a_password_is_rejected_without_quoting_it(kind: str, endpoint: str) -> None:
    fields = Fields({"type": kind, "endpoint": endpoint}, "spec.kvStore")

    with pytest.raises(PoolError, match=r"spec\.kvStore\.endpoint") as caught:
        read_kv_store(fields, Tokenizer())

    assert "s3cr" not in str(caught.value)
    assert "10.0.0.1:6379" in str(caught.value)


@pytest.mark.parametrize("port", ["", ":0", ":65536"])
def test_endpoint_without_a_valid_port_is_rejected_with_the_accepted_ports(port: str) -> None:
    fields = Fields({"type": "Mooncake", "endpoint": f"http://master{port}"}, "spec.kvStore")

    with pytest.raises(PoolError, match="a port from 1 to 65535"):
        read_kv_store(fields, Tokenizer())


@pytest.mark.parametrize("host", ["[1.2.3.4]", "[::::]", "[fe80]"])
@pytest.mark.parametrize(("kind", "scheme"), [("Redis", "redis"), ("Mooncake", "http")])
def test_endpoint_with_a_wrong_address_in_brackets_is_rejected(kind: str, scheme: str, host: str) -> None:
    fields = Fields({"type": kind, "endpoint": f"{scheme}://{host}:6379"}, "spec.kvStore")

    with pytest.raises(PoolError, match=r"spec\.kvStore\.endpoint"):
        read_kv_store(fields, Tokenizer(source=TokenSource.RENDERER, url="http://[fd00::1]:8001"))


def test_key_with_a_model_that_has_a_comma_is_rejected_for_mooncake() -> None:
    given = {"type": "Mooncake", "endpoint": "http://[fd00::1]:9003", "key": "{model}@{hash}"}
    tokenizer = Tokenizer(source=TokenSource.RENDERER, url="http://10.0.0.1:8001")

    with pytest.raises(PoolError, match="'a,b' has a comma"):
        read_kv_store(Fields(given, "spec.kvStore"), tokenizer, model="a,b")

    assert read_kv_store(Fields(given, "spec.kvStore"), tokenizer, model="ab").key == "{model}@{hash}"

from pathlib import Path

import pytest

from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store.target import RedisSettingsError, Target, read_settings, target_of
from dualmap_extproc.transport.tls import self_signed


def target(url: str, password: str | None = None) -> Target:
    return target_of(RedisSettings(url=url, password=password))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache", Target(host="cache")),
        ("redis://cache:7000/3", Target(host="cache", port=7000, db=3)),
        ("redis://cache/", Target(host="cache")),
        ("redis://[::1]:7000", Target(host="::1", port=7000)),
        ("redis://:p%40ss@cache", Target(host="cache", password="p@ss")),
        ("redis://router:secret@cache", Target(host="cache", user="router", password="secret")),
        ("redis://router@cache", Target(host="cache", user="router")),
        ("rediss://cache", Target(host="cache", tls=True)),
        ("unix:///run/redis.sock", Target(path="/run/redis.sock")),
        (
            "unix://router:secret@/run/redis.sock?db=2",
            Target(path="/run/redis.sock", db=2, user="router", password="secret"),
        ),
    ],
)
def test_redis_target_url_is_parsed(url: str, expected: Target) -> None:
    assert target(url) == expected


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("cache:6379", "the scheme is unknown"),
        ("http://cache", "the scheme is unknown"),
        ("redis://", "the host is missing"),
        ("redis://:6379", "the host is missing"),
        ("redis://cache:port", "the port is not a number"),
        ("redis://cache:99999", "the port is not a number"),
        ("redis://[::1", "the text is not a URL"),
        ("redis://cache/first", "the database is not a number"),
        ("redis://cache/-1", "the database is not a number"),
        ("redis://cache?ssl_cert_reqs=none", "a URL with a query is not supported"),
        ("redis://cache#1", "a URL with a fragment is not supported"),
        ("unix://", "the socket path is missing"),
        ("unix:///s?password=hidden", "the query has options other than db"),
        ("unix:///s?db=x", "the database is not a number"),
        ("redis://user:hidden/word@cache", "write / in a password as %2F"),
        ("redis://user:hidden#word@cache", "write / in a password as %2F"),
        ("redis://user:12#word@cache", "write # in a password as %23"),
    ],
)
def test_redis_target_error_does_not_quote_an_invalid_url(url: str, reason: str) -> None:
    with pytest.raises(RedisSettingsError) as caught:
        target(url)
    message = str(caught.value)
    assert message.startswith("--redis: the URL is not accepted: ")
    assert reason in message
    assert "redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]" in message
    assert "hidden" not in message
    assert "word" not in message.replace("password", "").replace("PASSWORD", "")
    assert caught.value.__cause__ is None


def test_redis_target_prefers_a_separate_password() -> None:
    assert target("redis://:old@cache", "new").password == "new"


def test_redis_target_text_hides_the_password() -> None:
    settings = read_settings("redis://user:hidden@cache:7000", password=None, password_file=None, ca_file=None)
    shown = target_of(settings)
    assert shown.password == "hidden"
    assert not any("hidden" in text for text in (repr(settings), repr(shown), shown.shown))
    assert shown.shown == "redis://cache:7000"


class TestFiles:
    def read(self, *, url: str = "rediss://cache", password: str | None = None, **files: Path | None) -> RedisSettings:
        options = {"password_file": None, "ca_file": None, **files}
        return read_settings(url, password=password, **options)

    def test_redis_password_file_line_end_is_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "password"
        path.write_text(" s e c \r\n")
        assert self.read(password_file=path, password="environment").password == " s e c "

    def test_redis_password_without_file_comes_from_the_environment(self) -> None:
        assert self.read(password="environment").password == "environment"
        assert self.read(password="").password is None

    @pytest.mark.parametrize(
        ("content", "reason"), [(b"", "the file is empty"), (b"\n", "the file is empty"), (b"\xff", "not UTF-8")]
    )
    def test_redis_password_file_without_password_is_rejected(
        self, tmp_path: Path, content: bytes, reason: str
    ) -> None:
        path = tmp_path / "password"
        path.write_bytes(content)
        with pytest.raises(RedisSettingsError, match=f"--redis-password-file: {path}: {reason}"):
            self.read(password_file=path)

    def test_missing_redis_password_or_ca_files_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(RedisSettingsError, match=r"--redis-password-file: .*none: No such file"):
            self.read(password_file=tmp_path / "none")
        with pytest.raises(RedisSettingsError, match=r"--redis-ca: .*none: No such file"):
            self.read(ca_file=tmp_path / "none")

    def test_redis_ca_file_without_certificate_is_rejected(self, tmp_path: Path) -> None:
        path = tmp_path / "ca.crt"
        path.write_text("nothing")
        with pytest.raises(RedisSettingsError, match=f"--redis-ca: {path}: no PEM certificates"):
            self.read(ca_file=path)

    def test_redis_ca_file_requires_tls(self, tmp_path: Path) -> None:
        path = tmp_path / "ca.crt"
        path.write_bytes(self_signed()[1])
        assert target_of(self.read(ca_file=path)).ca_file == path
        with pytest.raises(RedisSettingsError, match="--redis-ca requires rediss://"):
            self.read(url="redis://cache", ca_file=path)

"""Translate URLs and fsspec options of object stores to obstore's options. Imports neither fsspec nor obstore.

Nothing here may show a credential: the `repr` of a place omits its options, and no error quotes a value.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ckptstore.backends.store_names import checked_name
from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.host.bandwidth import bytes_per_second

__all__ = ["ObjectPlace", "place_of"]

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_SHORTEST: Final = 3
"""Minimum length of a bucket's name, with every vendor."""
_COMPONENT: Final = re.compile(r"(?!\.{1,2}(/|$))[A-Za-z0-9_.=+@:, -]+")
_TRIES: Final = 5


class Concealed(Mapping[str, Any]):
    """Options that may hold credentials. Printing them (``vars``, a debugger) shows only their number."""

    __slots__ = ("_held",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._held = dict(options)

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<{len(self)} options, not shown>"


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """The place of a store and how to access it.

    Attributes:
        url: the URL that the user passed.
        scheme: one of `schemes.BUCKETS`.
        bucket, prefix: ``prefix`` is ``""`` for the bucket itself.
        endpoint: the server's URL; None: the vendor's default.
        config: options of obstore's store; holds credentials.
        client: options of obstore's HTTP client.
        tries: maximum number of times that a request is sent.
        profile: a profile in the vendor's files, which boto3 reads; None: none.
        from_files: whether boto3 must look for the credentials.
        bandwidth: maximum bytes per second; None: unlimited.
        patience: seconds after which nothing is sent again; None: only `tries` limits retries.
    """

    url: str
    scheme: str
    bucket: str
    prefix: str
    endpoint: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    tries: int = _TRIES
    profile: str | None = field(default=None, repr=False)
    from_files: bool = False
    bandwidth: float | None = None
    patience: float | None = None


def place_of(url: str, options: Mapping[str, Any] | None = None) -> ObjectPlace:
    """Parse a URL and fsspec's options.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``.
        options: `storage_options`.

    Raises:
        UsageError: the URL is malformed or contains a credential, or an option or its value is invalid. The message
            quotes no value.
        MissingDependencyError: a profile must be read, and boto3 is not installed.
    """
    scheme = url.partition("://")[0].lower()
    rest = url.partition("://")[2]
    if "@" in rest.partition("/")[0]:
        raise UsageError(f"{scheme}://: a store's URL holds no credentials; give storage_options, or the environment")
    parts = urlsplit(url)
    bucket, _, prefix = rest.partition("/")
    prefix = checked_name(url, prefix)
    if 0 < len(bucket) < _SHORTEST:
        raise UsageError(
            f"{url}: the bucket's name, {bucket!r}, is too short: names of buckets have {_SHORTEST} letters or more"
        )
    wrong = not _BUCKET.fullmatch(bucket) or parts.query or parts.fragment
    if wrong or (prefix and not all(_COMPONENT.fullmatch(part) for part in prefix.split("/"))):
        raise UsageError(
            f"{url}: the URL of a store is {scheme}://bucket/prefix, of letters, digits and _.=+@:,- in names"
        )
    given = dict(options or {})
    config: dict[str, Any] = {}
    patience = _take(given, "timeout", (int, float))
    if patience is not None and not patience > 0:
        raise UsageError("storage_options: timeout: a number of seconds above 0 is needed")
    client, tries = _connection(given, patience)
    endpoint = _take(given, "endpoint_url", str)
    anonymous = bool(_take(given, "anon", bool))
    if anonymous:
        config["skip_signature"] = True
    limit = _take(given, "bandwidth", (int, float, str))
    found = ObjectPlace(url, scheme, bucket, prefix, endpoint, config, client, tries)
    place = {"s3": _s3, "gs": _gs, "az": _az}[scheme](found, given, config)
    return replace(place, bandwidth=None if limit is None else bytes_per_second(limit), patience=patience)


def _take(given: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Remove an option -> its value; None if it was not given. Raises `UsageError`, without the value."""
    value = given.pop(name, None)
    if isinstance(value, str):
        _check_text(f"storage_options: {name}", value)
    if value is not None and not isinstance(value, kind):
        expected = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
        raise UsageError(f"storage_options: {name} is a {type(value).__name__}; {expected} is needed")
    return value


def _check_text(what: str, value: str) -> None:
    """Refuse characters that no header may contain: a secret mounted as a file ends with a newline. Quotes no value."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise UsageError(f"{what}: it holds a control character (a newline at its end, perhaps)")


def _none_left(given: Mapping[str, Any], scheme: str, known: str, where: str = "") -> None:
    if given:
        names = ", ".join(sorted(f"{where}{name}" for name in given))
        raise UsageError(f"storage_options: {scheme}:// has no option {names}; it has {known}")


def _connection(given: dict[str, Any], patience: float | None) -> tuple[dict[str, Any], int]:
    """Translate botocore's timeouts and tries (`config_kwargs`) -> options of the client, and tries."""
    words = dict(_take(given, "config_kwargs", Mapping) or {})
    client: dict[str, Any] = {}
    connect = _take(words, "connect_timeout", (int, float))
    read = _take(words, "read_timeout", (int, float))
    retries = dict(_take(words, "retries", Mapping) or {})
    tries = _take(retries, "max_attempts", int)
    _none_left(retries, "s3", "max_attempts", "config_kwargs.retries.")
    _none_left(words, "s3", "connect_timeout, read_timeout, retries.max_attempts", "config_kwargs.")
    if any(value is not None and not value > 0 for value in (connect, read, tries)):
        raise UsageError("storage_options: config_kwargs: time-outs and tries are above 0")
    client["connect_timeout"] = f"{int((connect or 5) * 1000)}ms"
    client["timeout"] = f"{max(1, int(min(read or 60, patience or math.inf) * 1000))}ms"
    return client, _TRIES if tries is None else tries


def _checked_endpoint(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        raise UsageError("storage_options: endpoint_url holds a credential; give key and secret instead")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise UsageError("storage_options: endpoint_url is http:// or https://, a host, and perhaps a port")
    return endpoint.rstrip("/")


def _s3(place: ObjectPlace, given: dict[str, Any], config: dict[str, Any]) -> ObjectPlace:
    environment = os.environ
    for variable in environment:
        if variable.startswith("AWS_"):
            _check_text(variable, environment[variable])
    more = dict(_take(given, "client_kwargs", Mapping) or {})
    region = _take(more, "region_name", str)
    endpoint = place.endpoint or _take(more, "endpoint_url", str)
    more.pop("endpoint_url", None)
    for word, name in (("key", "access_key_id"), ("secret", "secret_access_key"), ("token", "session_token")):
        if (value := _take(given, word, str)) is not None:
            config[name] = value
    profile = _take(given, "profile", str)
    checksum = _take(given, "checksum", bool)
    known = (
        "key, secret, token, profile, anon, endpoint_url, client_kwargs.region_name, config_kwargs, checksum, "
        "bandwidth, timeout"
    )
    _none_left(more, "s3", known, "client_kwargs.")
    _none_left(given, "s3", known)
    if ("access_key_id" in config) != ("secret_access_key" in config):
        raise UsageError("storage_options: key and secret belong together")
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = endpoint or next((environment[name] for name in variables if environment.get(name)), None)
    endpoint = _checked_endpoint(endpoint)
    plain = endpoint is not None and endpoint.startswith("http://")
    if endpoint is not None:
        config["endpoint"] = endpoint
    if plain:
        config["allow_http"] = True
    if region is not None:
        config["region"] = region
    if checksum is not False:
        config["checksum_algorithm"] = "crc64nvme"
    # Over TLS the checksum protects the bytes; signing them in a second pass would cost three times as much.
    config["unsigned_payload"] = not plain and checksum is not False
    config["disable_bulk_delete"] = True  # gc deletes one object at a time, and every server supports that
    profile, from_files = _profile(profile, config)
    config.pop("allow_http", None)
    client = {**place.client, **({"allow_http": True} if plain else {})}
    return ObjectPlace(
        place.url, "s3", place.bucket, place.prefix, endpoint, config, client, place.tries, profile, from_files
    )


def _profile(profile: str | None, config: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The profile that boto3 must read, if any, and whether boto3 must look for credentials at all."""
    if profile is None:
        if "access_key_id" in config or config.get("skip_signature") or _in_environment():
            return None, False
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
        files = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
        if profile is None and not files.is_file():
            return None, False
    elif "access_key_id" in config:
        raise UsageError("storage_options: profile says where key and secret are; give one or the other")
    if importlib.util.find_spec("boto3") is None:
        named = "the profile files (~/.aws)" if profile is None else f"the profile {profile!r}"
        raise MissingDependencyError(
            f"credentials of {named} are read by boto3: pip install boto3; or give key and secret, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return profile, True


def _in_environment() -> bool:
    """Whether the environment names credentials in variables that obstore reads itself."""
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    return any(os.environ.get(name) for name in names)


def _gs(place: ObjectPlace, given: dict[str, Any], config: dict[str, Any]) -> ObjectPlace:
    if (token := _take(given, "token", str)) is not None:
        config["service_account"] = token
    _none_left(given, "gs", "token (a service account's file), anon, endpoint_url, config_kwargs, bandwidth, timeout")
    return _other(place, config, "base_url")


def _az(place: ObjectPlace, given: dict[str, Any], config: dict[str, Any]) -> ObjectPlace:
    words = ("account_name", "account_key", "tenant_id", "client_id", "client_secret")
    for word in words:
        if (value := _take(given, word, str)) is not None:
            config[word] = value
    if (token := _take(given, "sas_token", str)) is not None:
        config["sas_key"] = token
    _none_left(given, "az", f"{', '.join(words)}, sas_token, anon, endpoint_url, config_kwargs, bandwidth, timeout")
    return _other(place, config, "endpoint")


def _other(place: ObjectPlace, config: dict[str, Any], word: str) -> ObjectPlace:
    endpoint = _checked_endpoint(place.endpoint)
    client = dict(place.client)
    if endpoint is not None:
        config[word] = endpoint
        if endpoint.startswith("http://"):
            client["allow_http"] = True
    return ObjectPlace(place.url, place.scheme, place.bucket, place.prefix, endpoint, config, client, place.tries)

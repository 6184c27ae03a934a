"""Valid URLs and options of object stores; credentials appear nowhere."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends import open_backend
from ckptstore.backends.object_store.object_options import ObjectPlace, place_of
from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.errors import UsageError
from tools.objects.server import KEY, SECRET, Server, free_port

URL = "s3://bucket/runs/gpt"
TOKEN = "FwoGZXIvYXdzTheTokenOfNobody"
AWS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the credentials of the user who runs the tests."""
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def place(**options: Any) -> ObjectPlace:
    return place_of(URL, options)


def test_the_words_of_fsspec_become_those_of_obstore() -> None:
    found = place(
        key=KEY,
        secret=SECRET,
        token=TOKEN,
        endpoint_url="https://minio.example:9000/",
        client_kwargs={"region_name": "eu-central-1"},
        config_kwargs={"connect_timeout": 1.5, "read_timeout": 30, "retries": {"max_attempts": 2}},
    )
    assert (found.bucket, found.prefix, found.endpoint) == ("bucket", "runs/gpt", "https://minio.example:9000")
    assert found.config["access_key_id"] == KEY
    assert found.config["secret_access_key"] == SECRET
    assert found.config["session_token"] == TOKEN
    assert found.config["region"] == "eu-central-1"
    assert found.config["unsigned_payload"] is True  # over TLS, with a checksum
    assert found.config["checksum_algorithm"] == "crc64nvme"
    assert found.client == {"connect_timeout": "1500ms", "timeout": "30000ms"}
    assert found.tries == 2


def test_plain_http_is_signed_and_anonymous_is_not() -> None:
    found = place(endpoint_url="http://127.0.0.1:9000", anon=True)
    assert found.client["allow_http"] is True
    assert found.config["unsigned_payload"] is False
    assert found.config["skip_signature"] is True
    assert "checksum_algorithm" not in place(checksum=False, anon=True).config
    assert place(checksum=False, anon=True).config["unsigned_payload"] is False


def test_the_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert place().endpoint == "http://127.0.0.1:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    assert place().endpoint == "http://127.0.0.1:2"
    assert place(endpoint_url="http://127.0.0.1:3").endpoint == "http://127.0.0.1:3"


def test_other_vendors() -> None:
    found = place_of("gs://bucket/x", {"token": "/keys/one.json", "endpoint_url": "http://127.0.0.1:4443"})
    assert (found.config["service_account"], found.config["base_url"]) == ("/keys/one.json", "http://127.0.0.1:4443")
    found = place_of("az://container", {"account_name": "me", "account_key": "k"})
    assert (found.config["account_name"], found.config["account_key"], found.prefix) == ("me", "k", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sekret": SECRET}, "sekret.*key, secret, token"),
        ({"client_kwargs": {"verify": SECRET}}, r"client_kwargs\.verify"),
        ({"config_kwargs": {"proxies": SECRET}}, r"config_kwargs\.proxies"),
        ({"config_kwargs": {"retries": {"mode": SECRET}}}, r"config_kwargs\.retries\.mode"),
        ({"config_kwargs": {"read_timeout": 0}}, "above 0"),
        ({"key": 7, "secret": SECRET}, "key is a int"),
        ({"secret": SECRET}, "belong together"),
        ({"key": KEY}, "belong together"),
        ({"key": KEY, "secret": SECRET, "profile": "x"}, "one or the other"),
        ({"endpoint_url": f"https://{KEY}:{SECRET}@host"}, "holds a credential"),
        ({"endpoint_url": f"host/{SECRET}"}, "http:// or https://"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_invalid_option_is_named_and_its_value_never_shown(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ckptstore.UsageError, match=named) as caught:
        ckptstore.open(URL, storage_options=options)
    told = "".join(traceback.format_exception(caught.value))
    assert SECRET not in told
    assert KEY not in told


def test_a_url_with_credentials_is_refused_without_repeating_them() -> None:
    with pytest.raises(ckptstore.UsageError, match="holds no credentials") as caught:
        ckptstore.open(f"s3://{KEY}:{SECRET}@bucket/x")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_options_of_what_has_none_are_an_error(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}", "memory://x"):
        with pytest.raises(ckptstore.UsageError, match="storage_options"):
            ckptstore.open(url, storage_options={"key": KEY})


def test_a_profile_is_read_by_boto3_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ckptstore.MissingDependencyError, match=r"'training'.*pip install boto3"):
        place(profile="training")
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(ckptstore.MissingDependencyError, match="'other'"):
        place()
    assert not place(key=KEY, secret=SECRET).from_files
    monkeypatch.delenv("AWS_PROFILE")
    assert not place().from_files
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    with pytest.raises(ckptstore.MissingDependencyError, match=r"profile files \(~/.aws\)"):
        place()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert place(profile="training").profile == "training"
    assert place().from_files


def test_a_missing_extra_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['obstore'] = None; sys.modules['fsspec'] = None\n"
        "import ckptstore\n"
        "for url in ('s3://b/x', 'sftp://h/x'):\n"
        "    try: ckptstore.open(url)\n"
        "    except ckptstore.MissingDependencyError as error: print(error, error.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "s3:// URLs need obstore: pip install 'ckptstore[s3]' 9"
    assert second.startswith("sftp:// is for fsspec to open")
    assert second.endswith("pip install 'ckptstore[s3]' 9")


def test_nothing_shows_a_credential(s3: Server, caplog: pytest.LogCaptureFixture) -> None:
    """In no repr, error or log: without a server, without the bucket, and in a working store."""
    caplog.set_level(logging.DEBUG)
    options = {"key": KEY, "secret": SECRET, "token": TOKEN, "config_kwargs": {"retries": {"max_attempts": 1}}}
    told = [repr(place_of(URL, options))]
    nowhere = options | {"endpoint_url": f"http://127.0.0.1:{free_port()}"}
    store = ckptstore.open(URL, storage_options=nowhere)
    told += [repr(store), repr(store.backend), repr(store.journal), str(vars(store))]
    with pytest.raises(ckptstore.StorageError, match="cannot connect") as refused:
        store.checkpoints()
    told.append("".join(traceback.format_exception(refused.value)))
    absent = ckptstore.open("s3://no-such-bucket/x", storage_options=s3.options)
    with pytest.raises(ckptstore.StoreNotFoundError, match="no such bucket") as missing:
        absent.checkpoints()
    told.append("".join(traceback.format_exception(missing.value)))
    told += [record.getMessage() for record in caplog.records]
    for text in told:
        assert not any(secret in text for secret in (KEY, SECRET, TOKEN)), text


def test_a_bucket_that_is_not_there(s3: Server) -> None:
    with pytest.raises(ckptstore.StoreNotFoundError, match="there is no such bucket"):
        ckptstore.open("s3://no-such-bucket/x", create=True, storage_options=s3.options)
    store = ckptstore.open(s3.url(), storage_options=s3.options)
    with pytest.raises(ckptstore.StoreNotFoundError, match="no FORMAT file"):
        store.checkpoints()
    assert store.latest_step() is None


def test_a_hostile_listing_names_what_is_wrong(s3: Server) -> None:
    if not s3.port:
        pytest.skip("puts keys that only a server of our own need bear")
    import http.client

    backend = ObjectBackend(s3.url(), s3.options)
    backend.create("log/1", b"x")
    path = backend.url.removeprefix("s3://")
    connection = http.client.HTTPConnection("127.0.0.1", s3.port, timeout=20)
    connection.request("PUT", f"/{path}/log/%01x", body=b"x")
    assert connection.getresponse().status == 200
    connection.close()
    with pytest.raises(ckptstore.ForeignObjectError, match="a name that no store gives"):
        backend.list("")
    assert backend.get("log/1") == b"x"


def test_a_fork_gets_an_error_that_says_to_open_again(s3: Server) -> None:
    """obstore's threads do not exist in a child: a request there would wait for ever."""
    script = (
        "import os, sys, json, warnings; warnings.simplefilter('ignore')\n"
        "from ckptstore.backends.object_store.objects import ObjectBackend\n"
        "backend = ObjectBackend(sys.argv[1], json.loads(sys.stdin.read())); backend.list('')\n"
        "if os.fork() == 0:\n"
        "    try: backend.list('')\n"
        "    except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-c", script, s3.url()],
        input=json.dumps(s3.options),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert "UsageError" in done.stdout
    assert "opened before a fork" in done.stdout


_TOUR = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import ckptstore
options = json.loads(sys.stdin.read())
if sys.argv[2] == "used":
    list(ckptstore.open(sys.argv[1], storage_options=options).checkpoints())
child = os.fork()
if child == 0:
    try:
        with ckptstore.open(sys.argv[1], storage_options=options).writer() as writer:
            writer.save({"x": 1.5}, step=1)
        print("works", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("before", ["used", "imported"])
def test_a_fork_of_a_process_that_used_a_bucket_cannot_open_another_one(s3: Server, before: str) -> None:
    """Neither the old object nor a new one. A process that has sent no request yet may fork."""
    import json

    url = f"{s3.url()}/run"
    with ckptstore.open(url, storage_options=s3.options).writer() as writer:
        writer.save({"x": 0.5}, step=0)
    done = subprocess.run(
        [sys.executable, "-c", _TOUR, url, before],
        input=json.dumps(s3.options),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    if before == "used":
        assert done.stdout.startswith("UsageError"), done
        assert "was forked from process" in done.stdout
        assert "spawn" in done.stdout
    else:
        assert done.stdout == "works\n", done


def test_a_closed_store_reads_on_with_new_threads(s3: Server) -> None:
    backend = open_backend(s3.url(), True, s3.options)
    backend.create("seg/1/a", bytes(20 << 20))
    for _ in range(2):
        with backend.open_source("seg/1/a") as source:
            out = bytearray(source.size)
            out[:] = b"x" * len(out)
            source.read_into(0, memoryview(out))
            assert not any(out)
        backend.close()


@pytest.mark.parametrize("word", ["key", "token", "endpoint_url"])
def test_a_newline_in_an_option_is_named_without_its_value(word: str) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"} | {word: "http://value\n"}
    with pytest.raises(ckptstore.UsageError, match=f"{word}: it holds a control character") as told:
        ckptstore.open("s3://bucket/run", storage_options=options)
    assert "value" not in str(told.value)


def test_a_newline_in_a_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mounted\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with pytest.raises(ckptstore.UsageError, match="AWS_ACCESS_KEY_ID: it holds a control character"):
        ckptstore.open("s3://bucket/run")


@pytest.mark.parametrize("url", ["s3://b/run", "gs://ab", "az://x/y/z"])
def test_a_bucket_whose_name_is_too_short_is_named(url: str) -> None:
    """The error used to say that the URL of a store is s3://bucket/prefix, which this one is."""
    bucket = url.partition("://")[2].partition("/")[0]
    with pytest.raises(UsageError, match=f"the bucket's name, '{bucket}', is too short: .* 3 letters or more"):
        place_of(url, {})
    assert place_of("s3://abc/run", {"anon": True}).bucket == "abc"

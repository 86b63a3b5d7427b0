"""Objects in S3 through our own signed requests, against moto's server, looked at with boto3."""

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from agentcore_rl_toolkit._aws import ServiceError, SignedHttp, Storage

# moto's server shares our process and leaves its ends of the sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

ODD_KEYS = ["a/b/c.json", "with space+plus", "percent%20 and ?query#part", "ünïcode/日本", "tilde~dots..//double"]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", b"").close()  # other servers' state lives on
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(endpoint: str) -> Any:
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="results")
    return client


@pytest.mark.parametrize("key", ODD_KEYS)
def test_an_object_is_written_once_with_its_type_and_checksum(s3: Any, key: str) -> None:
    storage = Storage()
    assert not storage.exists("results", key)
    storage.put("results", key, b'{"a": 1}', "application/json")
    with pytest.raises(ServiceError) as caught:
        storage.put("results", key, b"other", "application/json")
    assert (caught.value.status, caught.value.code) == (412, "PreconditionFailed")
    assert storage.exists("results", key)
    assert storage.get("results", key) == b'{"a": 1}'
    assert storage.list("results", "", "").keys == [key]
    found = s3.get_object(Bucket="results", Key=key, ChecksumMode="ENABLED")
    assert (found["Body"].read(), found["ContentType"]) == (b'{"a": 1}', "application/json")
    own = s3.put_object(Bucket="results", Key="boto3", Body=b'{"a": 1}', ChecksumAlgorithm="CRC32")
    assert found["ChecksumCRC32"] == own["ChecksumCRC32"]
    storage.close()


def test_an_empty_object_exists(s3: Any) -> None:
    s3.put_object(Bucket="results", Key="empty", Body=b"")
    storage = Storage()
    assert storage.exists("results", "empty")
    storage.close()


def test_a_missing_bucket_is_named_by_every_call(s3: Any) -> None:
    storage = Storage()
    calls = [
        lambda: storage.exists("nowhere", "k"),
        lambda: storage.put("nowhere", "k", b"", "text/plain"),
        lambda: storage.get("nowhere", "k"),
        lambda: storage.list("nowhere", "", ""),
    ]
    for call in calls:
        with pytest.raises(ServiceError) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (404, "NoSuchBucket")
    storage.close()


@pytest.mark.parametrize(
    ("environment", "region"),
    [({}, "us-east-1"), ({"AWS_REGION": "eu-west-3"}, "eu-west-3"), ({"AWS_DEFAULT_REGION": "sa-east-1"}, "sa-east-1")],
)
def test_requests_are_signed_for_the_region_of_the_environment(
    s3: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], region: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    storage, signed = Storage(), []
    send = SignedHttp.send

    def note(self: Any, signer: Any, service: str, region: str, *rest: Any) -> Any:
        signed.append(region)
        return send(self, signer, service, region, *rest)

    monkeypatch.setattr(SignedHttp, "send", note)
    storage.exists("results", "k")
    assert signed == [region]
    storage.close()


def test_without_an_endpoint_of_one_s_own_it_is_aws_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    storage = Storage("eu-central-1")
    _, url, region = storage._place("results")
    assert region == "eu-central-1"
    assert re.fullmatch(r"https://results\.s3\.(eu-central-1\.)?amazonaws\.com/", url)
    storage.close()

"""S3's own answers, by a loopback server: conditional writes, faults, and a run that goes on from a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.errors import FinetuneError
from finetune.storage.backends import ObjectStorage, attempt, explain, open_storage
from finetune.storage.journal import Saved, is_conditional, newest_entry, take_lease

pytest.importorskip("s3fs", reason="pip install -e '.[storage]'")
moto_server = pytest.importorskip("moto.server", reason="pip install -e '.[test]'")
pytestmark = pytest.mark.slow  # four seconds for moto and botocore


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = moto_server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An own place in the bucket, and this process's credentials for it."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="runs")
    return f"s3://runs/{tmp_path.name}/devils"


def test_the_operations(url: str, tmp_path: Path) -> None:
    storage = open_storage(url)
    assert storage.names() == []
    assert storage.create("00000001.json", b"one")
    assert not storage.create("00000001.json", b"two")
    assert storage.read("00000001.json") == b"one"
    (tmp_path / "large").write_bytes(bytes(range(256)) * 4096)
    storage.put("00000002/checkpoints/step-00000002/large", tmp_path / "large")
    storage.put("00000002/small", b"small")
    assert storage.names() == ["00000001.json", "00000002"]
    storage.get("00000002/checkpoints/step-00000002/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    storage.remove(["00000002"])
    assert storage.names() == ["00000001.json"]
    with pytest.raises(FileNotFoundError):
        storage.read("00000009.json")


def test_two_owners(url: str) -> None:
    storage = open_storage(url)
    first = take_lease(storage, None, lambda _: None)
    assert is_conditional(first)
    saved = Saved(2, first.next_folder, {"a": 1})
    first.publish({"checkpoints/step-00000002/a": b"a"}, [saved], {})
    with pytest.raises(FinetuneError, match="writes there"):
        take_lease(open_storage(url), newest_entry(storage), lambda _: None)
    first.stop_renewing()
    second = take_lease(open_storage(url), newest_entry(storage), lambda _: None)
    with pytest.raises(FinetuneError, match="has taken over this run"):
        first.publish({}, [saved], {})
    assert newest_entry(storage) == second.entry
    second.close()


def test_a_store_that_ignores_the_condition_is_found_out(url: str) -> None:
    class Overwriting(ObjectStorage):
        def create(self, path: str, content: bytes) -> bool:
            self._system.pipe_file(f"{self._root}/{path}", content)
            return True

    storage = open_storage(url)
    assert isinstance(storage, ObjectStorage)
    lease = take_lease(Overwriting(url, storage._system), None, lambda _: None)
    assert not is_conditional(lease)
    lease.close()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"bucket": "none"}, "is not there"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "cannot be reached"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "refuses this user"),
    ],
)
def test_faults_are_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, str | None], line: str
) -> None:
    for name, value in change.items():
        if value is None:
            monkeypatch.delenv(name)
        elif name.isupper():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    if "bucket" in change:
        url = "s3://no-such-bucket/x"
    storage = open_storage(url)
    if isinstance(storage, ObjectStorage):
        storage._system.retries = 1  # not fifteen seconds of s3fs's own
    with pytest.raises(FinetuneError) as caught:
        attempt(storage, lambda: storage.create("00000001.json", b"x"), lambda _: None)
    assert str(caught.value).startswith(f"{url}: {line}")
    assert "\n" not in str(caught.value)


def test_a_refusal_and_a_full_bucket(url: str) -> None:
    from s3fs.errors import translate_boto_error

    class Answer(Exception):
        def __init__(self, code: str, status: int, message: str) -> None:
            super().__init__(f"An error occurred ({code}) when calling the PutObject operation: {message}")
            self.response = {
                "Error": {"Code": code, "Message": message},
                "ResponseMetadata": {"HTTPStatusCode": status},
            }

    storage = open_storage(url)
    for code, status, message, line in (
        ("InvalidAccessKeyId", 403, "The AWS Access Key Id you provided does not exist", "refuses this user"),
        ("SignatureDoesNotMatch", 403, "Check your secret", "refuses this user"),
        ("AccessDenied", 403, "Access Denied", "refuses this user"),
        ("XMinioStorageFull", 507, "Storage backend has reached its minimum free drive threshold", "is full"),
        ("QuotaExceeded", 403, "Bucket quota exceeded", "is full"),
        ("SlowDown", 503, "Please reduce your request rate", "cannot be reached"),
        ("RequestTimeTooSkewed", 403, "The difference between the request time and the current time", "'s clock"),
    ):
        found, _ = explain(storage, translate_boto_error(Answer(code, status, message)))
        assert line in str(found), (code, str(found))


def test_a_training_goes_on_from_the_bucket(
    url: str, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.train import main
    from tests.support.models.tiny import write_chats
    from tests.support.runs.recipes import tiny_lora, write_recipe

    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80, 25, 100, 40, 55])
    steps = {"training": {"max_steps": 2}, "save_steps": 1, "eval_steps": 100, "run": {"storage": url}}
    recipe = write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps))
    assert main([str(recipe), f"output_dir={tmp_path}/first"]) == 0
    assert main([str(recipe), f"output_dir={tmp_path}/second"]) == 0
    assert "resumed from step 2" in capsys.readouterr().err
    one, two = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("first", "second")
    )
    assert one == two
    entry = newest_entry(open_storage(url))
    assert entry is not None
    assert json.loads(open_storage(url).read(f"{entry.records_folder}/run_state.json"))["state"] == "finished"

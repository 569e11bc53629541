"""A bucket on the Hub: the installed client, its real Xet library, and the loopback Hub.

The Hub's own calls (tree, paths-info, batch, resolve, tokens) go by HTTP to the loopback Hub. Contents go through
hf_xet into a `local://` store, so chunks, hashes, uploads and downloads are the library's own. The wire between hf_xet
and the Hub's file store is not run here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune.errors import FinetuneError
from finetune.hub.bucket import HubBucket
from finetune.launch.launcher import Launch
from finetune.recipe.loader import load_recipe
from finetune.run_folder.folder import RunIdentity
from finetune.storage import journal, restart
from finetune.storage.backends import attempt, explain, open_storage
from finetune.storage.journal import Lease, Saved, is_conditional, newest_entry, take_lease
from tests.support.hub import Hub, running_hub, server
from tests.support.hub.server import TOKEN
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import least, tiny_lora, write_recipe

pytest.importorskip("hf_xet", reason="the Hub's client has no Xet library on this platform")
URL = "hf://buckets/me/runs/devils"


@pytest.fixture
def bucket_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With a private bucket `me/runs`."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "xet").mkdir()
    with running_hub(store=tmp_path / "xet") as hub:
        hub.add_bucket("me/runs")
        yield hub


@pytest.fixture
def opened(bucket_hub: Hub) -> Callable[..., HubBucket]:
    def opened(url: str = URL, *, private: bool = True) -> HubBucket:
        return HubBucket(url, private=private, endpoint=bucket_hub.url)

    return opened


def test_the_operations(opened: Callable[..., HubBucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BUCKET_PAGE", 2)
    storage, beside = opened(), opened(f"{URL}2")
    assert storage.names() == []
    beside.put("00000001/small", b"another run's")
    assert storage.names() == [], "the Hub matches a prefix by its letters"
    assert storage.create("00000001.json", b"one")
    assert not storage.create("00000001.json", b"two")
    assert storage.read("00000001.json") == b"one"
    (tmp_path / "large").write_bytes(os.urandom(300_000))
    storage.put("00000001/checkpoints/step-00000002/large", tmp_path / "large")
    storage.put("00000001/small", b"small")
    storage.put("00000001/small", b"is replaced")
    storage.put("00000001/empty", b"")
    storage.put("lease-00000001.json", b"{}")
    assert storage.names() == ["00000001", "00000001.json", "lease-00000001.json"], "a page has two names"
    assert storage.read("00000001/small") == b"is replaced"
    assert storage.read("00000001/empty") == b""
    storage.get("00000001/checkpoints/step-00000002/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    storage.remove(["00000001", "lease-00000001.json", "00000007"])
    assert storage.names() == ["00000001.json"], "a folder's name begins its entry's"
    assert beside.read("00000001/small") == b"another run's"
    for path in ("00000009.json", "00000001/small"):
        with pytest.raises(FileNotFoundError):
            storage.read(path)


def test_names_that_begin_alike_are_another_runs(
    opened: Callable[..., HubBucket], bucket_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the Hub lists for `devils/`: files of `devils2` are neither seen nor deleted."""
    storage, beside = opened(), opened(f"{URL}2")
    storage.put("00000001/a", b"mine")
    beside.put("0000001/a", b"another run's")
    beside.put("x00000001/a", b"another run's")
    tree = storage._api.list_bucket_tree
    monkeypatch.setattr(
        storage._api, "list_bucket_tree", lambda bucket, prefix, **how: tree(bucket, prefix.rstrip("/"), **how)
    )
    assert storage.names() == ["00000001"]
    storage.remove(["00000001", "", "/0000001", "/x00000001"])
    assert sorted(bucket_hub.buckets["me/runs"].files) == ["devils2/0000001/a", "devils2/x00000001/a"]


def test_another_writer_is_seen_at_once(opened: Callable[..., HubBucket]) -> None:
    """The client's file system answers from listings that it made before, and would overwrite the other's entry."""
    mine, other = opened(), opened()
    assert mine.create("00000001.json", b"mine")
    assert mine.names() == ["00000001.json"]
    assert other.create("00000002.json", b"the other's")
    assert mine.names() == ["00000001.json", "00000002.json"]
    assert not mine.create("00000002.json", b"mine")
    assert mine.read("00000002.json") == b"the other's"


def test_two_owners(opened: Callable[..., HubBucket]) -> None:
    first = take_lease(opened(), None, lambda _: None)
    saved = Saved(2, first.next_folder, {"a": 1})
    first.publish({"checkpoints/step-00000002/a": b"a"}, [saved], {})
    patient = pytest.MonkeyPatch()
    patient.setattr(journal, "WATCH_SECONDS", 30.0)  # a busy machine renews late; the first sign of life ends it
    with pytest.raises(FinetuneError, match="writes there"):
        take_lease(opened(), newest_entry(opened()), lambda _: None)
    patient.undo()
    first.stop_renewing()
    second = take_lease(opened(), newest_entry(opened()), lambda _: None)
    with pytest.raises(FinetuneError, match="has taken over this run"):
        first.publish({}, [saved], {})
    assert newest_entry(opened()) == second.entry
    second.close()


def test_of_starts_at_one_moment_one_wins(opened: Callable[..., HubBucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look before either writes, so both create the entry. The later one's counts, and the other sees that."""
    looked, put, owners, refused = threading.Barrier(2), HubBucket.put, list[Lease](), list[str]()

    def late(storage: HubBucket, path: str, source: Any) -> None:
        if path == "00000001.json":
            looked.wait(20)
        put(storage, path, source)

    def start() -> None:
        try:
            owners.append(take_lease(opened(), None, lambda _: None))
        except FinetuneError as error:
            refused.append(str(error))

    monkeypatch.setattr(HubBucket, "put", late)
    starts = [threading.Thread(target=start) for _ in range(2)]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    assert (len(owners), len(refused)) == (1, 1)
    assert re.fullmatch(rf"{URL}: process \d+ on .* began at the same moment; wait for it, .*", refused[0])
    assert newest_entry(opened()) == owners[0].entry
    owners[0].close()


@pytest.mark.parametrize("nodes", [1, 2])
def test_several_machines_are_refused(
    opened: Callable[..., HubBucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Each write that is only looked for before passes the test with a second write, so the storage itself says so."""
    path = write_recipe(tmp_path, least(run={"storage": URL}, output_dir=str(tmp_path / "run")))
    monkeypatch.setattr(restart, "open_storage", lambda url, private: opened(url, private=private))
    launch = Launch((), None, None, False, 2 * nodes, 0, True, nodes=nodes)
    lines: list[str] = []

    def start() -> None:
        mirror = restart.take_over(load_recipe(path).recipe, launch, RunIdentity({}, (), {}), lines.append)
        assert mirror is not None
        mirror.give_back()

    refused = f"{URL}: has no conditional writes, so it keeps no two writers apart"
    if nodes == 1:
        start()
        assert lines == [f"{refused}; start this run once at a time"]
        return
    with pytest.raises(FinetuneError) as caught:
        start()
    assert str(caught.value) == f"{refused}; several machines need another storage, or a run folder that all see"
    lease = take_lease(opened(), newest_entry(opened()), lambda _: None)
    assert not is_conditional(lease)
    lease.close()


Work = Callable[[HubBucket], Any]
LIMIT = "Private repository storage limit reached, please upgrade your plan"
RATE = "We had to rate limit you, you hit the quota of 1000 api requests per 5 minutes period."


@pytest.mark.parametrize(
    ("url", "fault", "line"),
    [
        (
            "hf://buckets/me/none/x",
            {},
            "the Hub answered 404 (Repository not found); make the bucket first (hf buckets create me/none --private), "
            "or correct its name",
        ),
        (URL, {"call": "xet_token", "status": 403}, " answered 403"),
        (
            URL,
            {"call": "bucket_batch", "status": 403, "message": "Forbidden"},
            "the Hub answered 403 (Forbidden); check",
        ),
        (URL, {"call": "bucket_batch", "status": 403, "message": LIMIT}, f"({LIMIT}); free some space there, or raise"),
        (
            URL,
            {"call": "bucket_batch", "wrong_hash": True},
            "the Hub answered 422 (could not be applied); try again later",
        ),
    ],
)
def test_faults_are_one_line(
    opened: Callable[..., HubBucket], bucket_hub: Hub, url: str, fault: dict[str, Any], line: str
) -> None:
    if fault:
        bucket_hub.fail(**fault, times=9)
    storage = opened(url)
    with pytest.raises(FinetuneError) as caught:
        attempt(storage, lambda: storage.create("00000001.json", b"x"), lambda _: None)
    assert str(caught.value).startswith(f"{url}: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert bucket_hub.buckets["me/runs"].files == {}


def test_a_refused_listing_is_no_empty_place(opened: Callable[..., HubBucket], bucket_hub: Hub) -> None:
    """Else a start would begin anew, over the run that is there."""
    bucket_hub.fail("bucket_tree", status=403, message="Forbidden")
    with pytest.raises(FinetuneError, match=r"the Hub answered 403 \(Forbidden\); check the token's rights"):
        attempt(opened(), lambda: newest_entry(opened()), lambda _: None)


def test_a_limit_of_requests_is_no_full_bucket(opened: Callable[..., HubBucket]) -> None:
    import huggingface_hub.errors as errors

    class Answer:
        status_code, content, headers = 429, b"", {"X-Error-Message": RATE}

    error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    error.response = Answer()  # type: ignore[assignment]
    found, may_pass = explain(opened(), error)
    assert (str(found), may_pass) == (f"{URL}: the Hub answered 429 ({RATE}); try again later", True)


def test_a_missing_object_is_no_full_bucket(opened: Callable[..., HubBucket]) -> None:
    """A number in a name is not the status 507."""
    for name in ("00000507.json", "00000007/507/x"):
        with pytest.raises(FinetuneError, match=f"devils: is not there .*{name}"):
            attempt(opened(), lambda name=name: opened().read(name))


def test_a_refused_file_is_sent_again(opened: Callable[..., HubBucket], bucket_hub: Hub) -> None:
    """A file that the Hub did not take beside others is told in an answer 200, which clients before 2.4 do not read.
    A file alone is told by a 422, which all read."""
    bucket_hub.fail("bucket_batch", wrong_hash=True)
    storage = opened()
    attempt(storage, lambda: storage.put("00000002/a", b"a"), lambda _: None)
    assert storage.read("00000002/a") == b"a"
    assert [request.status for request in bucket_hub.log if request.call == "bucket_batch"] == [422, 200]


def test_without_a_network_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FinetuneError, match=f"^{URL}: HF_HUB_OFFLINE is set, so the Hub cannot be asked; unset it$"):
        open_storage(URL)


def test_a_public_bucket_is_refused_unless_told(opened: Callable[..., HubBucket], bucket_hub: Hub) -> None:
    opened().check()
    bucket_hub.buckets["me/runs"].private = False
    with pytest.raises(FinetuneError, match="the bucket is public, which was not requested; name a private one, or"):
        opened().check()
    opened(private=False).check()


def test_an_object_draws_no_progress_bar(
    opened: Callable[..., HubBucket], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", None)
    enable_progress_bars()
    storage = opened()
    storage.put("lease-00000001.json", b"{}")
    assert storage.read("lease-00000001.json") == b"{}"
    assert capfd.readouterr().err == ""
    assert not are_progress_bars_disabled(), "a model's download shows its bar"


CHILD = "import sys; from finetune.storage import journal; journal.WATCH_SECONDS = 2.0; "
CHILD += "from finetune.train import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_a_killed_training_goes_on_from_the_bucket_to_the_bit(
    bucket_hub: Hub, tiny_llama: Path, tmp_path: Path
) -> None:
    """Processes that know HF_ENDPOINT alone. The first is killed as soon as a checkpoint is complete."""
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80, 25, 100, 40, 55])
    steps = {"training": {"max_steps": 12}, "save_steps": 1, "save_total_limit": 2, "eval_steps": 6}
    recipe = write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps, run={"storage": URL}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": bucket_hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])

    def started(folder: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(recipe), f"output_dir={tmp_path / folder}", *words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first = started("first")
    files = bucket_hub.buckets["me/runs"].files
    while "devils/00000002.json" not in files and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    told, _ = first.communicate()
    assert first.returncode == -signal.SIGKILL, told
    second = started("second")
    told, _ = second.communicate(timeout=300)
    assert second.returncode == 0, told
    found = re.search(rf"{URL}: the checkpoint of step (\d+) is in {tmp_path}/second now", told)
    assert found is not None, told
    assert int(found[1]) < 12, told
    assert "%|" not in told, "no progress bars"
    words = [sys.executable, "-m", "finetune.cli.main", "status", URL, "--json"]
    status = json.loads(subprocess.run(words, env=environment, capture_output=True, check=True, timeout=100).stdout)
    assert (status["state"], status["step"], status["checkpoint"]["step"]) == ("finished", 12, 12)
    whole = started("whole", "run.storage=null")
    whole.communicate(timeout=300)
    assert whole.returncode == 0

    def losses(folder: str) -> list[tuple[Any, ...]]:
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["kind"], line["step"], line["loss"]) for line in lines if line["kind"] != "phase"]

    assert losses("second") == losses("whole")
    ours, theirs = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("second", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert not any(str(tmp_path).encode() in content for content in _contents(bucket_hub, tmp_path))


def _contents(hub: Hub, tmp_path: Path) -> Iterator[bytes]:
    storage = HubBucket(URL, private=True, endpoint=hub.url)
    for path in list(hub.buckets["me/runs"].files):
        yield storage.read(path.removeprefix("devils/"))

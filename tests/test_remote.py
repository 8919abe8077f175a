"""Reading and writing remote storage through every fault: what it means, what is repeated."""

from __future__ import annotations

import errno
import os
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from object_store import Faults, ObjectStore

from fsdp_pretrain.errors import ConfigError, Exit
from fsdp_pretrain.remote import Problem, Remote, RemoteError, Url

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_pretrain.remote._FIRST_PAUSE", 0.01)


@pytest.fixture(params=["s3", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """An empty directory of either kind."""
    if request.param == "file":
        return Remote(Url(f"file://{tmp_path}/storage/here"))
    return Remote(request.getfixturevalue("object_store").url / "here")


def test_objects_are_written_read_listed_and_removed(remote: Remote, tmp_path: Path) -> None:
    assert remote.list() == {}
    remote.write("a", b"first")
    remote.write("a", CONTENT)
    (tmp_path / "local").write_bytes(CONTENT)
    remote.upload(tmp_path / "local", "below/b c+é%.bin")
    assert remote.read("below/b c+é%.bin") == remote.read("a") == CONTENT
    assert remote.read("a", 100, 1100) == CONTENT[100:1100] and remote.read("a", 10_000) == CONTENT[10_000:]
    assert remote.list() == {"a": 10_240, "below/b c+é%.bin": 10_240}
    remote.delete(["a", "never there"])
    assert list(remote.list()) == ["below/b c+é%.bin"]


@pytest.mark.parametrize("folder", ["storage", "storage/record"])
def test_a_folder_that_does_not_answer_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Else a run would begin at step 0 beside its mirror."""
    remote = Remote(Url(f"file://{tmp_path}/storage"), patience=0)
    for name in ("record/a", "checkpoints/b"):
        remote.write(name, CONTENT)
    scan = os.scandir

    def stale(path: str) -> Any:
        if Path(path) == tmp_path / folder:
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(RemoteError, match="Stale file handle") as told:
        remote.list()
    assert told.value.is_temporary
    monkeypatch.undo()
    (tmp_path / "storage/record").rename(tmp_path / "moved")
    (tmp_path / "storage/record").symlink_to(tmp_path / "moved")
    assert remote.list() == {"record/a": 10_240, "checkpoints/b": 10_240}


def test_a_reader_never_meets_a_part_of_an_object(tmp_path: Path) -> None:
    remote, versions = Remote(Url(f"file://{tmp_path}/storage")), [CONTENT * 400, CONTENT * 200]
    (tmp_path / "local").write_bytes(versions[1])

    def write() -> None:
        for _ in range(20):
            remote.write("a", versions[0])
            remote.upload(tmp_path / "local", "a")

    remote.write("a", versions[0])
    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert remote.read("a") in versions
    writer.join()
    assert remote.list() == {"a": len(versions[1])}


def test_absent_objects_and_wrong_ranges(remote: Remote) -> None:
    with pytest.raises(RemoteError, match=r"here/x does not exist") as raised:
        remote.read("x")
    assert raised.value.problem is Problem.MISSING and not raised.value.is_temporary
    remote.write("short", b"0123456789")
    remote.patience = 0.0
    for start, stop in ((5, 15), (10, 12), (40, 50)):
        with pytest.raises(RemoteError) as raised:
            remote.read("short", start, stop)
        assert raised.value.problem is Problem.FAILED


FAULTS = {
    "busy": (Faults(failing=1.0), Problem.FAILED),
    "too many": (Faults(failing=1.0, status=429), Problem.FAILED),
    "broken": (Faults(failing=1.0, status=500), Problem.FAILED),
    "cut": (Faults(cut=1.0), Problem.FAILED),
    "expired": (Faults(expired=400), Problem.DENIED),
    "forbidden": (Faults(expired=403), Problem.DENIED),
    "refused": (Faults(refuse=True), Problem.FAILED),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_fault_is_told_after_one_request(object_store: ObjectStore, scheme: str, fault: str) -> None:
    """Neither fsspec nor the vendor's library repeats by itself: that is counted nowhere."""
    faults, problem = FAULTS[fault]
    if (scheme, fault) == ("http", "expired"):
        problem = Problem.FAILED  # of S3 only, 400 means that
    object_store.put("a", CONTENT)
    remote = Remote(object_store.url if scheme == "s3" else object_store.http_url, patience=0.0)
    object_store.faults = faults
    with pytest.raises(RemoteError, match=f"{remote.url}/a") as raised:
        remote.read("a", 0, 1000)
    assert raised.value.problem is problem, raised.value
    assert len(object_store.log) == (0 if faults.refuse else 1)
    object_store.faults = Faults()
    assert remote.read("a", 0, 1000) == CONTENT[:1000]


@pytest.mark.parametrize("fault", [Faults(failing=0.5), Faults(cut=0.5), Faults(failing=0.5, status=500)])
def test_what_fails_now_and_then_is_repeated(object_store: ObjectStore, fault: Faults) -> None:
    for name in "abcdef":
        object_store.put(name, CONTENT)
    remote = Remote(object_store.url)
    object_store.faults = fault
    for name in "abcdef":
        assert remote.read(name, 10, 2010) == CONTENT[10:2010]
    wrong = sum(bool(request.fault) for request in object_store.log)
    assert 0 < wrong == len(object_store.log) - 6


@pytest.mark.parametrize(("scheme", "package"), [("az", "adlfs"), ("file", "fsspec")])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=package) as raised:
        Remote(Url(f"{scheme}://bucket/a"))
    assert "pip install" in raised.value.remedy


@pytest.mark.parametrize(
    ("bucket", "settings", "cause"),
    [
        ("wrong!", {}, "Invalid bucket name"),
        ("bucket", {"AWS_PROFILE": "nowhere"}, "nowhere"),
        ("bucket", {"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "Invalid endpoint"),
    ],
)
def test_settings_that_are_wrong_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch, bucket: str, settings: dict[str, str], cause: str
) -> None:
    """Nothing is tried again: a person must put them right."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteError, match=cause) as raised:
        Remote(Url(f"s3://{bucket}/a")).read("b")
    assert raised.value.exit == Exit.REFUSED and "check credentials" in raised.value.remedy


def test_a_bucket_that_does_not_exist_is_told_before_anything_is_written(object_store: ObjectStore) -> None:
    remote = Remote(Url("s3://not-there/corpora"))
    for call in (lambda: remote.list(), lambda: remote.write("a", b"x")):
        with pytest.raises(RemoteError, match="bucket does not exist") as raised:
            call()
        assert raised.value.problem is Problem.MISSING and "buckets are not created" in raised.value.remedy


def test_no_checksums_but_our_own(object_store: ObjectStore, tmp_path: Path) -> None:
    """Other servers fail at those of the vendor's library."""

    remote = Remote(object_store.url)
    remote.write("a", CONTENT)
    (tmp_path / "a").write_bytes(CONTENT)
    remote.upload(tmp_path / "a", "b")
    assert remote.read("a") == CONTENT and len(remote.read("b", 0, 100)) == 100
    assert not any(request.checksums for request in object_store.log)


SECRETS = (
    "https://host/corpus?S3CR3T",
    "https://user:S3CR3T@host/corpus",
    "https://host/corpus?X-Amz-Signature=S3CR3T",
    "s3://bucket/corpus?AWSAccessKeyId=key&Signature=S3CR3T",
    "az://container/runs?sv=2024&sig=S3CR3T",
    "gs://bucket?token=S3CR3T",
)


@pytest.mark.quick
@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.promise("secrets")
def test_a_query_may_hold_a_secret(text: str) -> None:
    with pytest.raises(ValueError, match="must not hold credentials") as raised:
        Url(text)
    assert "S3CR3T" not in str(raised.value)


@pytest.mark.quick
@pytest.mark.parametrize("text", SECRETS[:2])
@pytest.mark.promise("secrets")
def test_no_command_prints_a_secret(text: str, lab: Any, run_command: Any) -> None:
    for changes in ({"data": {"sources": [{"name": "a", "path": text}]}}, {"checkpoint": {"mirror": text}}):
        done = run_command("fsdp_pretrain.cli", "plan", lab.config(**changes))
        assert done.returncode == 78 and "must not hold credentials" in done.stderr, done.stderr
        assert "S3CR3T" not in done.stdout + done.stderr
    done = run_command("fsdp_pretrain.data.cli", "inspect", text)
    assert done.returncode == 78 and "S3CR3T" not in done.stdout + done.stderr, done.stderr


@pytest.mark.quick
def test_a_server_without_ranges_is_told_at_once(tmp_path: Path) -> None:
    """Nothing is tried again."""
    asked = list[str]()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            asked.append(self.path)

    (tmp_path / "a").write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        remote = Remote(Url(f"http://127.0.0.1:{server.server_port}"))
        assert remote.read("a") == remote.read("a", 0, len(CONTENT)) == CONTENT
        for start, stop in ((0, 100), (100, 200)):
            asked.clear()
            with pytest.raises(RemoteError, match="does not send ranges of an object") as raised:
                remote.read("a", start, stop)
            assert raised.value.problem is Problem.NO_RANGES and raised.value.exit == Exit.REFUSED
            assert asked == ["/a"]
        server.shutdown()


def test_waiting_for_an_answer_counts_as_patience(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two silent seconds are two tries of one second each."""
    monkeypatch.setattr("fsdp_pretrain.remote._READ_SECONDS", 1)
    object_store.put("a", CONTENT)
    remote = Remote(object_store.url, patience=2.0)
    object_store.faults = Faults(hang=True)
    asked, ask = list[str](), remote._files.cat_file
    monkeypatch.setattr(remote._files, "cat_file", lambda path, **rest: asked.append(path) or ask(path, **rest))
    with pytest.raises(RemoteError, match="imeout"):
        remote.read("a", 0, 10)
    assert len(asked) == 2

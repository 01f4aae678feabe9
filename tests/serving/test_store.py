"""Rows and files agree, whatever moment a kill chose; owners see their own only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ttmem import ServeError
from ttmem.serving.errors import ApiError
from ttmem.serving.store import ATTEMPTS, Record, Store

OPTIONS = {"method": "latent", "preset": "quick"}


def add(store: Store, owner: str = "a", name: str | None = None, most: int = 10) -> str:
    with store.upload() as path:
        path.write_text("a document")
        return store.add_job(owner, name, OPTIONS, path, "txt", most)


def bring(store: Store, owner: str = "a", name: str | None = None) -> str:
    with store.upload() as path:
        path.write_bytes(b"a memory")
        return store.add_memory(owner, name, {"entries": 1}, path)


def finish(store: Store, id: str) -> bool:
    file = store.job_folder(id) / "memory.ttmem"
    file.write_bytes(b"finished")
    return store.complete(id, {"entries": 2}, file)


def everything(store: Store) -> set[str]:
    return {path.name for part in (store.memories, store.jobs, store.incoming) for path in part.iterdir()}


def refusal(call: Any, *arguments: Any) -> int:
    with pytest.raises(ApiError) as refused:
        call(*arguments)
    return refused.value.status_code


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


def again(store: Store) -> Store:
    """As after a kill: nothing is told to the store."""
    store.close()
    return Store(store.folder)


def test_the_life_of_a_job(store: Store) -> None:
    id = add(store, name="doc")
    assert (store.job_folder(id) / "source.txt").read_text() == "a document"
    found = store.next_job()
    assert found == store.find("a", "doc") == store.find("a", id)
    assert isinstance(found, Record)
    assert found.options == {**OPTIONS, "kind": "txt"}
    assert store.begin(id)
    assert not store.begin(id)
    assert store.next_job() is None
    assert finish(store, id)
    done = store.find("a", id)
    assert (done.status, done.details, done.bytes) == ("ready", {"entries": 2}, 8)
    assert everything(store) == {f"{id}.ttmem"}
    assert not store.fail(id, "late", "too late")
    store.delete(id)
    assert everything(store) == set()
    assert refusal(store.find, "a", id) == 404


def test_another_owners_is_as_if_it_were_not(store: Store) -> None:
    id = bring(store, "a", "doc")
    other = bring(store, "b", "doc")  # names are each owner's own
    assert refusal(store.find, "b", id) == refusal(store.find, "b", "mem-none") == 404
    assert store.find("b", "doc").id == other
    assert [record.id for record in store.page("a", 9)] == [id]
    assert refusal(store.page, "b", 9, id) == 404
    with store.upload() as path:
        assert refusal(store.add_memory, "a", "doc", {}, path) == 409
    assert everything(store) == {f"{id}.ttmem", f"{other}.ttmem"}


def test_timings_come_in_the_order_of_the_stages(store: Store) -> None:
    for seconds in ({"z": 1.0, "a": 2.0, "m": 3.0}, {"z": 2.0, "b": 1.0, "a": 4.0}):
        store.set_timings("kind", seconds)
        assert list(store.timings("kind").items()) == list(seconds.items())
    assert store.timings("other") == {}


def test_pages(store: Store) -> None:
    ids = [bring(store) for _ in range(5)]
    first = store.page("a", 2)
    rest = store.page("a", 9, first[-1].id)
    assert [record.id for record in first + rest] == ids
    assert [record.id for record in store.page("a", 9, None, "queued")] == []


def test_a_full_queue(store: Store) -> None:
    add(store, most=2)
    add(store, most=2)
    with store.upload() as path:
        assert refusal(store.add_job, "a", None, OPTIONS, path, "txt", 2) == 429
    assert len(list(store.jobs.iterdir())) == 2


def test_what_was_running_goes_on_after_a_kill(store: Store) -> None:
    id = add(store)
    for _ in range(ATTEMPTS - 1):
        assert store.begin(id)
        store = again(store)
        assert store.find("a", id).status == "queued"
    assert store.begin(id)
    work = store.job_folder(id) / "work"
    work.mkdir()
    (work / "rollouts.safetensors").write_text("a step is finished, so that the next deaths count from here on")
    store = again(store)
    (work / "rollouts.safetensors").unlink()
    assert store.find("a", id).attempts == 0
    for _ in range(ATTEMPTS - 1):
        assert store.begin(id)
        store = again(store)
    assert store.begin(id)
    store.pause(id)  # a server that stops takes its attempt back
    assert store.begin(id)
    store = again(store)
    failed = store.find("a", id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error["code"] == "worker_died"
    assert everything(store) == set()


def test_a_kill_before_or_after_any_step_loses_nothing_finished(store: Store) -> None:
    kept = bring(store)
    uploading = store.incoming / "partial"
    uploading.write_text("half an upl")
    (store.memories / "mem-orphan.ttmem").write_text("written, but not yet in the database")
    (store.jobs / "mem-orphan").mkdir()
    cancelled, moved = add(store), add(store)
    store.begin(moved)
    store.memory_file(moved).write_bytes(b"moved, but still running in the database")
    folder = store.job_folder(cancelled)
    store.fail(cancelled, "cancelled", "on request", "cancelled")
    folder.mkdir()  # as if the kill had come before the folder was deleted
    store = again(store)
    assert everything(store) == {f"{kept}.ttmem", moved}
    assert (store.job_folder(moved) / "memory.ttmem").read_bytes() == b"moved, but still running in the database"
    assert store.find("a", moved).status == "queued"
    assert store.find("a", kept).status == "ready"


def test_a_file_that_is_gone_is_told(store: Store) -> None:
    id = bring(store)
    store.memory_file(id).unlink()
    found = again(store).find("a", id)
    assert found.status == "failed"
    assert found.error is not None
    assert found.error["code"] == "memory_damaged"


def test_a_full_disk_refuses_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Store(tmp_path / "small", disk_bytes=10**6)
    kept = bring(small)
    with pytest.raises(ApiError) as refused, small.upload(10**6):
        pass
    assert refused.value.status_code == 413
    with pytest.raises(ApiError) as refused, small.upload():
        raise OSError(28, "No space left on device")
    assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
    assert everything(small) == {f"{kept}.ttmem"}


def test_one_server_per_folder(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="another server"):
        Store(store.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ServeError):
        Store(tmp_path / "file")
    store.close()
    (store.folder / "ttmem.sqlite").write_bytes(os.urandom(8192))
    with pytest.raises(ServeError):
        Store(store.folder)

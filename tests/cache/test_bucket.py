"""Objects in object stores: obstore's memory, a directory, and an S3 server (design, section 5; AMB-092)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import obstore
import pytest

from sdcp_mono.cache import bucket_objects
from sdcp_mono.cache.bucket import Bucket, as_segment, from_segment, open_store, together
from sdcp_mono.cache.bucket_objects import BucketObjects
from sdcp_mono.cache.disk import TierUnusable
from sdcp_mono.core.ports import Got, ObjectStore
from sdcp_mono.core.problems import Conflict, Malformed, Refusal, TooLarge, Unavailable, Unprocessable

SCOPE = bytes(range(16))
URI = f"mlc://cache.example:8443/{SCOPE.hex()}/q_rows/a.b_C"
OPEN = "mlc://local/-/prompt/one"  # of no scope


def run(*steps: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of ``steps``, in order, on one event loop."""

    async def in_order() -> list[Any]:
        return [await step for step in steps]

    return asyncio.run(in_order())


@pytest.fixture(params=["memory", "file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_url"))
    return open_store("memory://" if request.param == "memory" else (tmp_path / "the objects").as_uri())


@pytest.fixture
def objects(bucket: Bucket, clock: Any) -> BucketObjects:
    return BucketObjects(bucket, clock=clock)


# ---- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)) * 40])
def test_an_object_comes_back_as_it_was(objects: BucketObjects, value: bytes) -> None:
    store: ObjectStore = objects
    (meta,) = run(store.put(URI, value))
    assert (meta.uri, meta.size) == (URI, len(value))
    assert run(store.get(URI, SCOPE), store.head(URI, SCOPE)) == [value, meta]


def test_rows_become_bytes_when_they_leave(objects: BucketObjects) -> None:
    class Rows:
        def to_bytes(self) -> bytes:
            return b"rows"

    run(objects.put(URI, Rows()))
    assert run(objects.get(URI, SCOPE)) == [b"rows"]


def test_objects_are_immutable(objects: BucketObjects) -> None:
    (meta,) = run(objects.put(URI, b"first"))
    for value in (b"first", b"second"):
        with pytest.raises(Conflict):
            run(objects.put(URI, value))
    assert run(objects.get(URI, SCOPE), objects.head(URI, SCOPE)) == [b"first", meta]


def test_of_many_who_put_at_once_one_succeeds(bucket: Bucket) -> None:
    async def race() -> tuple[list[bytes], Any]:
        async def one(number: int) -> bytes | None:
            try:
                await BucketObjects(bucket).put(URI, b"%d" % number)
            except Conflict:
                return None
            return b"%d" % number

        won = [value for value in await asyncio.gather(*map(one, range(8))) if value is not None]
        return won, await BucketObjects(bucket).get(URI, SCOPE)

    won, there = asyncio.run(race())
    assert won == [there]


@pytest.mark.parametrize(
    ("start", "stop", "part"),
    [(0, 4, b"0123"), (3, 100, b"3456789"), (-5, 2, b"01"), (4, 4, b""), (5, 2, b""), (10, 20, b""), (50, 60, b"")],
)
def test_a_part_of_an_object(objects: BucketObjects, start: int, stop: int, part: bytes) -> None:
    run(objects.put(URI, b"0123456789"))
    assert run(objects.get_range(URI, SCOPE, start, stop)) == [part]


def test_another_scope_s_object_is_like_a_missing_one(objects: BucketObjects) -> None:
    run(objects.put(URI, b"secret"), objects.put(OPEN, b"open"))
    missing = URI[:-1]
    for uri, scope in ((URI, bytes(16)), (URI, None), (OPEN, SCOPE), (missing, SCOPE), ("not a URI", SCOPE)):
        assert run(
            objects.get(uri, scope),
            objects.get_range(uri, scope, 0, 1),
            objects.head(uri, scope),
            objects.get_many([uri], scope),
        ) == [None, None, None, [Got("missing")]]
    assert run(objects.get(OPEN, None)) == [b"open"]


def test_a_batch_has_a_status_for_each(objects: BucketObjects, bucket: Bucket) -> None:
    run(objects.put(URI, b"here"), objects.put(URI + "2", b"damaged"))
    (path,) = (entry["path"] for page in obstore.list(bucket._store) for entry in page if entry["path"][-1] == "2")
    obstore.put(bucket._store, path, b"other bytes")
    (answers,) = run(objects.get_many([URI + "2", URI, URI + "3", "not a URI"], SCOPE))
    assert list(answers) == [Got("failed"), Got("ok", b"here"), Got("missing"), Got("missing")]


def test_a_deleted_object_is_missing_and_its_uri_is_free(objects: BucketObjects) -> None:
    run(objects.put(URI, b"old"), objects.delete(URI), objects.delete(URI))
    assert run(objects.get(URI, SCOPE), objects.put(URI, b"new"), objects.get(URI, SCOPE))[::2] == [None, b"new"]


# ---- time ------------------------------------------------------------------------------------------------------------


def test_an_expired_object_is_missing_and_its_uri_is_free(objects: BucketObjects, clock: Any) -> None:
    run(objects.put(URI, b"short", ttl_ms=500))
    clock.pass_ms(499)
    assert run(objects.get(URI, SCOPE)) == [b"short"]
    with pytest.raises(Conflict):
        run(objects.put(URI, b"next"))
    clock.pass_ms(1)
    assert run(
        objects.get(URI, SCOPE), objects.get_range(URI, SCOPE, 0, 1), objects.head(URI, SCOPE), objects.lease(URI, 100)
    ) == [None, None, None, None]
    run(objects.put(URI, b"next", ttl_ms=500))
    assert run(objects.get(URI, SCOPE)) == [b"next"]


def test_amb_092_a_lease_is_what_is_left_of_an_object_s_life(objects: BucketObjects, clock: Any) -> None:
    run(objects.put(URI, b"short", ttl_ms=500), objects.put(OPEN, b"long"))
    now = int(clock() * 1000)
    (short, long, none) = run(objects.lease(URI, 800), objects.lease(OPEN, 800, "me"), objects.lease(OPEN + "x", 800))
    assert (short.expires_ms, long.expires_ms, none) == (now + 500, now + 800, None)
    clock.pass_ms(400)
    (again,) = run(objects.renew(OPEN, long.lease_id, 800))
    assert again.expires_ms == now + 1200
    run(objects.unlease(URI, short.lease_id))
    assert run(objects.get(URI, SCOPE)) == [b"short"]
    clock.pass_ms(100)
    assert run(objects.renew(URI, short.lease_id, 800)) == [None]


@pytest.mark.parametrize("ttl_ms", [0, -1, 24 * 3600 * 1000 + 1])
def test_a_ttl_has_limits(objects: BucketObjects, ttl_ms: int) -> None:
    for step in (objects.put(URI, b"x", ttl_ms=ttl_ms), objects.lease(URI, ttl_ms)):
        with pytest.raises(Unprocessable, match="ttl_ms"):
            run(step)


def test_a_uri_has_one_spelling(objects: BucketObjects) -> None:
    for uri in ("mlc://local/-/prompt/../x", "mlc://local/-/prompt/", "https://local/-/prompt/x", ""):
        with pytest.raises(Malformed):
            run(objects.put(uri, b"x"))


def test_an_object_has_a_limit(objects: BucketObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    run(objects.put(URI, b"12345"))
    monkeypatch.setattr(bucket_objects, "MAX_BYTES", 4)
    with pytest.raises(TooLarge, match="at most 4"):
        run(objects.put(OPEN, b"12345"))
    with pytest.raises(Unavailable, match="at most"):
        run(objects.get(URI, SCOPE))


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 10, 20, 30, 39, 40, 44])
@pytest.mark.parametrize("damage", ["flipped", "cut", "longer"])
def test_wrong_bytes_are_never_served(objects: BucketObjects, bucket: Bucket, at: int, damage: str) -> None:
    run(objects.put(URI, b"value"))
    (path,) = (entry["path"] for page in obstore.list(bucket._store) for entry in page)
    file = bytearray(obstore.get(bucket._store, path).bytes())
    if damage == "flipped":
        file[at] ^= 1
    obstore.put(bucket._store, path, file[:at] if damage == "cut" else file + b"x" * (damage == "longer"))
    with pytest.raises(Unavailable):
        run(objects.get(URI, SCOPE))


def test_wrong_bytes_from_the_server_are_never_served(s3: Any, s3_url: str) -> None:
    objects = BucketObjects(open_store(s3_url))
    run(objects.put(URI, b"value"))
    s3.fault = lambda method, path: "garble"
    for step in (objects.get(URI, SCOPE), objects.get_range(URI, SCOPE, 0, 2), objects.head(URI, SCOPE)):
        with pytest.raises(Unavailable):
            run(step)
    assert run(objects.get_many([URI], SCOPE)) == [[Got("failed")]]


@pytest.mark.parametrize("fault", ["500 after", "cut after"])
@pytest.mark.parametrize("times", [1, 1000])
def test_stored_but_the_answer_is_lost(s3: Any, s3_url: str, fault: str, times: int) -> None:
    objects = BucketObjects(open_store(s3_url))
    left = iter(range(times))
    s3.fault = lambda method, path: fault if method == "PUT" and next(left, None) is not None else None
    (meta,) = run(objects.put(URI, b"value"))
    assert run(objects.head(URI, SCOPE), objects.get(URI, SCOPE)) == [meta, b"value"]
    with pytest.raises(Conflict):
        run(objects.put(URI, b"value"))


@pytest.mark.parametrize("fault", ["refuse", "cut", "hold"])
def test_a_store_that_is_down_is_unavailable_and_asked_a_few_times_only(s3: Any, s3_url: str, fault: str) -> None:
    objects = BucketObjects(open_store(s3_url, call_seconds=0.5 if fault == "hold" else 20.0))
    run(objects.put(URI, b"value"))
    s3.requests.clear()
    s3.fault = lambda method, path: fault
    with pytest.raises(Unavailable) as refusal:
        run(objects.get(URI, SCOPE))
    assert refusal.value.retry_after_ms
    assert len(s3.requests) <= 3
    assert run(objects.get_many([URI], SCOPE)) == [[Got("failed")]]
    with pytest.raises(Unavailable):
        run(objects.put(OPEN, b"value"))


def test_a_batch_runs_together_within_a_bound(s3: Any, s3_url: str) -> None:
    objects = BucketObjects(open_store(s3_url))
    (answers,) = run(objects.get_many([f"mlc://local/-/prompt/{number}" for number in range(64)], None))
    assert [answer.status for answer in answers] == ["missing"] * 64
    assert 1 < s3.most_at_once <= 16


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_secrets_are_not_repeated(s3_url: str) -> None:
    for url in ("s3://key:hunter2@sdcp/x", "az://box/x?sig=hunter2", "s3://sdcp/x#hunter2"):
        with pytest.raises(TierUnusable, match="environment") as refusal:
            open_store(url)
        assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://server/x", "expected s3://"),
        ("bucket", "expected s3://"),
        ("s3://nobucket/x", "404"),
        ("az://box/x", "setting"),
    ],
)
def test_what_is_no_object_store_is_refused_in_one_sentence(s3_url: str, url: str, reason: str) -> None:
    with pytest.raises(TierUnusable, match=reason) as refusal:
        open_store(url)
    assert "\n" not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_a_server_that_is_not_there_is_refused(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TierUnusable, match="no answer"):
        open_store(s3_url, call_seconds=1.0)


def test_a_directory_that_can_not_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierUnusable):
        open_store((tmp_path / "file" / "below").as_uri())


def test_without_obstore_the_extra_is_named() -> None:
    program = "import sys; sys.modules['obstore'] = None; import sdcp_mono.cache.bucket"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'sdcp-mono[objectstore]'" in result.stderr.splitlines()[-1]


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", ".", "..", "a/b", "!", "!2F", "%2F", "ü", "a b\n", "mlc://x:1/-/k/n.m"])
def test_a_name_is_one_segment_and_comes_back(name: str) -> None:
    segment = as_segment(name)
    assert from_segment(segment) == name
    assert set(segment) <= set("!-_~") | {chr(c) for c in range(128) if chr(c).isalnum()}


@pytest.mark.parametrize("name", ["", "a" * 701])
def test_a_name_has_limits(name: str) -> None:
    with pytest.raises(Refusal, match="1 to 700"):
        as_segment(name)


def test_together_ends_all_before_it_raises() -> None:
    ended: list[int] = []

    async def call(number: int) -> int:
        await asyncio.sleep(0)
        ended.append(number)
        if number == 3:
            raise Unavailable("three")
        return number

    with pytest.raises(Unavailable, match="three"):
        run(together(call, range(40)))
    assert sorted(ended) == list(range(40))

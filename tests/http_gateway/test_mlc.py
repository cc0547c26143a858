"""The MLC's HTTP surface: immutable objects, ranges, leases, conditional appends, epochs (AMB-092, 148 to 156)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import cbor2
import pytest

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import LogAppend
from sdcp_mono.core.problems import Conflict, TooLarge, Unprocessable
from sdcp_mono.http_gateway import exchange
from sdcp_mono.http_gateway.mlc_client import Caches, HttpRows, MlcClient
from sdcp_mono.http_gateway.peer import Peer

SCOPE = bytes(range(16))
AT = f"/mlc/{SCOPE.hex()}"


def record(epoch: int, round: int) -> CommitRecord:
    return CommitRecord(epoch=epoch, round=round, emitted=(7,), committed=round, digest=b"d" * 32)


def test_objects_are_written_once(kit: Any) -> None:
    async def test(site: Any) -> None:
        path = f"{AT}/q_rows/a"
        put = await site.curl("drafter", "PUT", path, b"0123456789", if_none_match="*")
        assert put.status == 201
        assert put.headers["etag"].startswith('"')
        assert (await site.curl("drafter", "PUT", path, b"other", if_none_match="*")).kind == (412, "")
        assert (await site.curl("drafter", "PUT", path, b"other")).kind == (412, "")
        assert (await site.curl("drafter", "PUT", f"{AT}/q_rows/b", b"x", if_match='"1"')).kind == (412, "")
        got = await site.curl("verifier", "GET", path)
        assert (got.status, got.body, got.headers["content-type"]) == (200, b"0123456789", "application/octet-stream")
        head = await site.curl("verifier", "HEAD", path)
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "10")
        assert (await site.curl("drafter", "DELETE", path)).status == 204
        assert (await site.curl("drafter", "GET", path)).kind == (404, "")
        for wrong in (
            "/mlc/-/q_rows/a",
            f"/mlc/{bytes(16).hex()}/q_rows/a",
            "/mlc/x/q_rows/a",
            f"{AT}/Q/a",
            f"{AT}/q_rows/a%2Fb",
        ):
            assert (await site.curl("drafter", "GET", wrong)).kind == (404, "")

    kit.run(test)


@pytest.mark.parametrize(
    ("wanted", "status", "body", "range_"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"), ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"), ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=5-99", 206, b"56789", "bytes 5-9/10"), ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=-0", 416, None, "bytes */10"), ("bytes=4-3", 416, None, "bytes */10"),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)  # fmt: skip
def test_ranges(kit: Any, wanted: str, status: int, body: bytes | None, range_: str | None) -> None:
    async def test(site: Any) -> None:
        await site.curl("drafter", "PUT", f"{AT}/blob/a", b"0123456789")
        got = await site.curl("verifier", "GET", f"{AT}/blob/a", range=wanted)
        assert (got.status, got.headers.get("content-range")) == (status, range_)
        assert got.body == body or status == 416

    kit.run(test)


def test_a_range_is_told_of_and_conditional(kit: Any) -> None:
    """RFC 9110, 13.1.5, 14.4 and 15.5.17: the length in a 416, and the whole where the tag is not the current one."""

    async def test(site: Any) -> None:
        path = f"{AT}/blob/a"
        tag = (await site.curl("drafter", "PUT", path, b"0123456789")).headers["etag"]
        beyond = await site.curl("verifier", "GET", path, range="bytes=10-")
        assert (beyond.kind, beyond.headers["content-range"]) == ((416, ""), "bytes */10")
        same = await site.curl("verifier", "GET", path, range="bytes=0-1", if_range=tag)
        assert (same.status, same.body, same.headers["etag"]) == (206, b"01", tag)
        other = await site.curl("verifier", "GET", path, range="bytes=0-1", if_range='"x"')
        assert (other.status, other.body) == (200, b"0123456789")
        for wrong in (f"{AT}/blob/b", "/mlc/-/blob/a"):  # another scope's answers like a missing one
            assert (await site.curl("verifier", "GET", wrong, range="bytes=0-1")).kind == (404, "")
            assert (await site.curl("verifier", "HEAD", wrong)).status == 404

    kit.run(test)


def test_a_batch_answers_each_object_by_itself(kit: Any) -> None:
    async def test(site: Any) -> None:
        big = bytes(5 * 2**20)
        for name, value in (("a", b"abc"), ("b", big), ("c", big), ("d", b"")):
            assert (await site.curl("drafter", "PUT", f"{AT}/blob/{name}", value)).status == 201
        await site.curl("router", "PUT", f"{AT}/log/l", b"", if_none_match="*")
        names = ["blob/a", "blob/none", "blob/b", "blob/c", "log/l", "../-/blob/a", "x", "blob/d"]
        got = await site.curl("verifier", "POST", f"{AT}/batch", {"objects": names})
        missing = {"status": "missing"}
        assert got.cbor == [
            {"status": "ok", "value": b"abc"}, missing, {"status": "ok", "value": big},
            {"status": "large", "size": len(big)}, missing, missing, missing, {"status": "ok", "value": b""},
        ]  # fmt: skip
        foreign = await site.curl("verifier", "POST", "/mlc/-/batch", {"objects": ["blob/a"]})
        assert foreign.cbor == [missing]
        assert (await site.curl("verifier", "POST", "/mlc/x/batch", {"objects": []})).kind == (404, "")
        assert (await site.curl("verifier", "POST", f"{AT}/batch", {"objects": ["a"] * 257})).kind == (413, "")
        assert (await site.curl("verifier", "POST", f"{AT}/batch", {"objects": 1})).kind == (400, "")
        assert (await site.curl("drafter", "GET", f"{AT}/batch")).kind == (405, "")

    kit.run(test)


def test_a_scope_beyond_its_share_is_told_and_nobody_else_is(kit: Any) -> None:
    async def test(site: Any) -> None:
        half = bytes(32 * 2**20)
        assert (await site.curl("drafter", "PUT", f"{AT}/blob/a", half)).status == 201
        refused = await site.curl("drafter", "PUT", f"{AT}/blob/b", b"x")
        assert (refused.kind, refused.headers["retry-after"]) == ((503, ""), "1")
        assert refused.problem["detail"].startswith("scope_bytes: ")
        assert (await site.curl("drafter", "PUT", "/mlc/-/blob/b", b"x")).status == 201

    kit.run(test)


@pytest.mark.parametrize(("kind", "minutes"), [("q_rows", 3), ("draft_kv", 3), ("prompt", 10)])
def test_a_kind_has_its_life(kit: Any, kind: str, minutes: int) -> None:
    """Where the writer names no TTL; a lease outlasts it, and is counted under who let it run out."""

    async def test(site: Any) -> None:
        now = 1000.0
        site.objects._clock = site.objects.leases._clock = lambda: now
        path = f"{AT}/{kind}/a"
        await site.curl("drafter", "PUT", path, b"x")
        now += 60 * minutes - 1
        assert (await site.curl("verifier", "HEAD", path)).status == 200
        await site.curl("drafter", "POST", f"{path}/lease", {"ttl_ms": 2000, "holder": "round 5"})
        now += 1.5
        assert (await site.curl("verifier", "GET", path)).status == 200
        now += 0.5
        assert (await site.curl("verifier", "GET", path)).kind == (404, "")
        assert site.objects.leases.forced == {kit.BASES["drafter"]: 1}

    kit.run(test)


def test_what_is_being_sent_keeps_its_room(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that doesn't read: the object is deleted, and its bytes are not given away before the reader is gone."""

    async def test(site: Any) -> None:
        path, size = f"{AT}/blob/a", 30 * 2**20
        reading = site.objects.reading
        began, left = asyncio.Event(), asyncio.Event()

        @asynccontextmanager
        async def heard(*wanted: Any) -> AsyncIterator[bytes | None]:
            try:
                async with reading(*wanted) as value:
                    began.set()
                    yield value
            finally:
                left.set()

        monkeypatch.setattr(exchange, "WRITE_SECONDS", 2.0)  # after which a reader is gone
        site.objects.reading = heard
        await site.curl("drafter", "PUT", path, bytes(size))
        async with kit.Wire.connect(site.gateway.port, site.files("verifier")) as slow:
            slow.task.cancel()  # it reads nothing from here on
            await slow.start("GET", path, end=True)
            await began.wait()
            await site.curl("drafter", "DELETE", path)
            assert (await site.curl("verifier", "HEAD", path)).status == 404
            assert site.objects.used_bytes == size
        await left.wait()
        assert site.objects.used_bytes == 0

    kit.run(test)


def test_amb_092_leases(kit: Any) -> None:
    async def test(site: Any) -> None:
        path = f"{AT}/blob/a"
        await site.curl("drafter", "PUT", path, b"x")
        granted = await site.curl("drafter", "POST", f"{path}/lease", {"ttl_ms": 60_000})
        assert granted.cbor["expires_ms"] == 60_000
        await site.curl("drafter", "DELETE", path)
        assert (await site.curl("verifier", "GET", path)).status == 200  # deleted, and still leased
        lease = f"{path}/lease/{granted.cbor['lease']}"
        assert (await site.curl("drafter", "PUT", lease, {"ttl_ms": 1000})).status == 200
        assert (await site.curl("drafter", "PUT", f"{path}/lease/other", {"ttl_ms": 1000})).kind == (404, "")
        assert (await site.curl("drafter", "DELETE", lease)).status == 204
        assert (await site.curl("verifier", "GET", path)).kind == (404, "")
        assert (await site.curl("drafter", "POST", f"{path}/lease", {"ttl_ms": 1000})).kind == (404, "")
        for wrong in ({"ttl_ms": 0}, {"ttl_ms": "1"}, {}):
            assert (await site.curl("drafter", "POST", f"{path}/lease", wrong)).kind == (400, "")

    kit.run(test)


def test_sdcp_170_appends_are_conditional(kit: Any) -> None:
    async def test(site: Any) -> None:
        log = f"{AT}/log/a"

        async def post(role: str, body: Any, tag: str = "", **headers: str) -> Any:
            headers |= {"if_match": tag} if tag else {}
            return await site.curl(role, "POST", log, cbor.encode_record(body), **headers)

        created = await site.curl("router", "PUT", log, b"", if_none_match="*")
        assert (created.status, created.headers["etag"]) == (201, '"0"')
        assert (await post("verifier", record(1, 1))).kind == (428, "")
        assert (await post("verifier", record(1, 1), "*")).kind == (412, "")
        done = await post("verifier", record(1, 1), '"0"')
        assert (done.status, done.headers["etag"]) == (204, '"1"')
        assert (await post("verifier", record(1, 1), '"0"')).status == 204  # the same again: a lost answer (AMB-150)
        assert (await post("verifier", record(1, 2), '"0"')).kind == (412, "")  # another writer came first
        assert (await post("router", record(1, 2), '"1"')).kind == (403, "")  # only a verifier commits
        assert (await post("verifier", FenceRecord(epoch=2), '"1"')).kind == (403, "")  # only a router fences
        assert (await post("router", FenceRecord(epoch=2), '"0"')).kind == (412, "")
        fenced = await post("router", FenceRecord(epoch=2), '"1"')
        assert (fenced.status, fenced.headers["etag"]) == (204, '"2"')
        assert (await post("router", FenceRecord(epoch=2), '"2"')).kind == (409, "")  # AMB-154
        assert (await post("verifier", record(1, 2), '"2"')).kind == (409, "")  # AMB-155: a fresh tag doesn't help
        assert (await post("verifier", record(2, 2), '"2"')).status == 204
        got = await site.curl("router", "GET", log)
        assert (got.headers["content-type"], got.headers["etag"]) == ("application/cbor-seq", '"3"')
        records = [record(1, 1), FenceRecord(epoch=2), record(2, 2)]
        assert got.body == b"".join(map(cbor.encode_record, records))
        assert (await site.curl("router", "PUT", log, b"", if_none_match="*")).kind == (412, "")  # not empty
        whole = got.body + cbor.encode_record(record(2, 3))
        put = await site.curl("verifier", "PUT", log, whole, if_match='"3"')  # the portable form (6.8)
        assert (put.status, put.headers["etag"]) == (204, '"4"')
        forged = got.body[:40] + b"\x00" + got.body[41:] + cbor.encode_record(record(2, 4))
        assert (await site.curl("verifier", "PUT", log, forged, if_match='"4"')).kind[0] in (400, 412)
        assert (await site.curl("verifier", "POST", log, got.body[:-1], if_match='"4"')).kind == (400, "")
        assert (await site.curl("verifier", "DELETE", log)).kind == (403, "")
        assert (await site.curl("router", "DELETE", log)).status == 204
        assert (await post("verifier", record(2, 9), '"0"')).kind == (412, "")

    kit.run(test)


def test_the_client_is_an_object_store_and_a_commit_log(kit: Any) -> None:
    async def test(site: Any) -> None:
        async with Peer(kit.BASES["mlc"], site.files("router"), address=site.url("mlc")) as peer:
            mlc = MlcClient(peer)
            uri = mlc.uri(SCOPE, "blob", "a")
            assert uri == f"{kit.BASES['mlc']}{SCOPE.hex()}/blob/a"
            meta = await mlc.put(uri, b"abc", ttl_ms=60_000)
            assert (meta.size, meta.etag != "") == (3, True)
            with pytest.raises(Conflict):
                await mlc.put(uri, b"abc")
            assert await mlc.get(uri, SCOPE) == b"abc"
            assert await mlc.get(uri, None) is None  # another scope's looks like none
            assert await mlc.get(mlc.uri(SCOPE, "blob", "b"), SCOPE) is None
            with pytest.raises(TooLarge):
                await mlc.get(uri, SCOPE, limit=2)
            ranges = [(0, 2), (1, 99), (-5, 1), (3, 9), (2, 2)]
            assert [await mlc.get_range(uri, SCOPE, *r) for r in ranges] == [b"ab", b"bc", b"a", b"", b""]
            assert await mlc.get_range(uri, None, 0, 2) is None
            assert [await mlc.get_range(mlc.uri(SCOPE, "blob", "b"), SCOPE, 0, n) for n in (0, 1)] == [None, None]
            assert await mlc.head(uri, SCOPE) == meta
            assert [await mlc.head(uri, None), await mlc.head(mlc.uri(SCOPE, "blob", "b"), SCOPE)] == [None, None]
            large = [mlc.uri(SCOPE, "blob", f"large-{number}") for number in range(2)]
            for name in large:
                await mlc.put(name, bytes(5 * 2**20), ttl_ms=60_000)
            wanted = [uri, mlc.uri(SCOPE, "blob", "b"), mlc.uri(None, "blob", "a"), *large]
            got = await mlc.get_many(wanted, SCOPE)
            assert [(g.status, None if g.value is None else len(g.value)) for g in got] == [
                ("ok", 3), ("missing", None), ("missing", None), ("ok", 5 * 2**20), ("ok", 5 * 2**20),
            ]  # fmt: skip
            lease = await mlc.lease(uri, 60_000)
            assert lease is not None
            assert await mlc.renew(uri, lease.lease_id, 60_000) is not None
            assert await mlc.renew(uri, "other", 60_000) is None
            await mlc.unlease(uri, lease.lease_id)
            await mlc.delete(uri)
            assert await mlc.lease(uri, 1000) is None
        log = mlc.uri(SCOPE, "log", "a")
        async with (
            Peer(kit.BASES["mlc"], site.files("router"), address=site.url("mlc")) as router,
            Peer(kit.BASES["mlc"], site.files("verifier"), address=site.url("mlc")) as verifier,
        ):
            await MlcClient(router).create(log)
            writer = MlcClient(verifier)
            appends = [
                LogAppend(log, 0, record(1, 1)),
                LogAppend(log, 0, record(1, 2)),
                LogAppend(log, 1, record(1, 2)),
            ]
            assert await writer.append(appends) == ["ok", "fenced", "ok"]
            with pytest.raises(Conflict):
                await MlcClient(router).create(log)
            assert await MlcClient(router).fence(log, 2)
            assert not await MlcClient(router).fence(log, 2)
            assert await writer.append([LogAppend(log, 3, record(1, 3))]) == ["fenced"]
            assert await writer.read(log, 1) == (record(1, 2), FenceRecord(epoch=2))
            # The same log by the store of this process: one object, two ways to it.
            assert len(await site.log.read(f"mlc://local/{SCOPE.hex()}/log/a")) == 3
            await MlcClient(router).drop(log)
            assert await writer.read(log) == ()

    kit.run(test)


class Listener:
    """A host that counts who connects; it must not be anybody."""

    def __init__(self) -> None:
        self.seen = 0

    async def __aenter__(self) -> Listener:
        def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.seen += 1
            writer.close()

        self.server = await asyncio.start_server(met, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()


def test_sdcp_204_references_are_fetched_from_trusted_caches_only(kit: Any) -> None:
    async def test(site: Any) -> None:
        async with Listener() as other, Peer(kit.BASES["mlc"], site.files("verifier"), address=site.url("mlc")) as peer:
            mlc = MlcClient(peer)
            caches = Caches({kit.BASES["mlc"]: mlc})
            rows = HttpRows(caches, kit.VOCAB, kit.ToyRows.from_bytes)
            scope = SCOPE.hex()
            for uri in (
                f"https://127.0.0.1:{other.port}/mlc/{scope}/q_rows/a", f"http://127.0.0.1:{other.port}/{scope}/q_rows/a",
                "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", f"mlc://local/{scope}/q_rows/a",
                f"{kit.BASES['mlc']}../verifier/", f"{kit.BASES['mlc']}{scope}/q_rows/a?x=1",
                f"{kit.BASES['mlc']}{scope}/q_rows/%61", f"{kit.BASES['mlc']}more/{scope}/q_rows/a",
                f"https://127.0.0.1:8443@127.0.0.1:{other.port}/mlc/{scope}/q_rows/a",
            ):  # fmt: skip
                with pytest.raises(Exception, match="q_rows") as refused:
                    await rows.fetch(uri, (5,), SCOPE)
                assert refused.value.unavailable, uri
                with pytest.raises(Unprocessable):
                    await caches.tokens(uri, SCOPE)
            assert other.seen == 0
            good = mlc.uri(SCOPE, "q_rows", "good")
            await mlc.put(good, kit.ToyRows([[1 / 64] * 64]).to_bytes())
            assert len((await rows.fetch(good, (5,), SCOPE)).rows) == 1
            with pytest.raises(Exception, match="not there") as missing:
                await rows.fetch(good, (5,), bytes(16))  # AMB-137: the session's scope only
            assert missing.value.unavailable
            with pytest.raises(Exception, match="256 octets") as short:
                await rows.fetch(good, (5, 6), SCOPE)
            assert short.value.unavailable  # AMB-134
            await mlc.put(mlc.uri(SCOPE, "q_rows", "long"), kit.ToyRows([[1 / 64] * 64] * 2).to_bytes())
            with pytest.raises(Exception, match="more than") as long:
                await rows.fetch(mlc.uri(SCOPE, "q_rows", "long"), (5,), SCOPE)
            assert not long.value.unavailable
            await mlc.put(mlc.uri(SCOPE, "tokens", "t"), cbor2.dumps([1, 2, 3]))
            assert await caches.tokens(mlc.uri(SCOPE, "tokens", "t"), SCOPE) == (1, 2, 3)
            published = HttpRows(caches, kit.VOCAB, kit.ToyRows.from_bytes, publish_to=mlc)
            uri = await published.publish(kit.ToyRows([[1 / 64] * 64]), SCOPE)
            assert len((await rows.fetch(uri, (5,), SCOPE)).rows) == 1
            await published.release(uri)
            assert await mlc.get(uri, SCOPE) is None

    kit.run(test)


def test_a_session_by_https_log_is_read_and_fenced_over_the_wire(kit: Any) -> None:
    """AMB-148: a foreign router names our log by https; it sees the records and its fence stops the verifier."""

    async def test(site: Any) -> None:
        at = f"/mlc/{kit.SESSION.hex()}/log/s"
        opening = kit.opening(commit_log=f"https://127.0.0.1:8443{at}")
        opened = await site.curl("router", "POST", "/verifier/sessions", opening)
        path = f"/verifier/sessions/{kit.path}/drafter"
        state = (await site.curl("router", "PUT", path, kit.assignment(opened.cbor))).cbor
        first = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (5, 6)))
        got = await site.curl("router", "GET", at)
        (commit,), _ = cbor.decode_records(got.body)
        assert (commit.emitted, commit.digest) == ((5, 6, 7), first.cbor["digest"])
        fence = cbor.encode_record(FenceRecord(epoch=2))
        assert (await site.curl("router", "POST", at, fence, if_match=got.headers["etag"])).status == 204
        fenced = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(first.cbor, (8,)))
        assert fenced.kind == (409, "sdcp-stale-epoch")  # AMB-157
        output = await site.curl("router", "GET", f"/verifier/sessions/{kit.path}/output")
        assert output.kind == (409, "sdcp-stale-epoch")  # AMB-158
        for wrong in ("https://elsewhere/mlc/-/log/a", "mlc://other/-/log/a", "https://127.0.0.1:8443/mlc/-/blob/a"):
            refused = await site.curl(
                "router", "POST", "/verifier/sessions", kit.opening(session=b"o" * 16, commit_log=wrong)
            )
            assert refused.kind == (422, ""), wrong

    kit.run(test)

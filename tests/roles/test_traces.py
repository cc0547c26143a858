"""The spans of whole sessions, with every role an object of one process, and with gRPC between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core.messages import Action
from sdcp_mono.core.ports import ScoreFailure, ScoreRequest
from sdcp_mono.telemetry.context import of_session
from sdcp_mono.telemetry.spans import Span
from sdcp_mono.telemetry.tracing import Note, Tracing, spans_of

SESSION = bytes(range(16))
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context


class Kept:
    """A queue that nobody empties."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def put(self, note: Note) -> None:
        self.notes.append(note)

    def spans(self, name: str = "") -> list[Span]:
        return [span for note in self.notes for span in spans_of(note, 0) if name in ("", span.name)]


def right(kit: Any) -> Any:
    return kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))


def wrong(kit: Any) -> Any:
    return kit.toy.ToyDraft(lambda last: kit.toy.one_hot((kit.EDGES[last] + 1) % kit.VOCAB, kit.VOCAB))


def tree(spans: Sequence[Span]) -> dict[bytes, list[str]]:
    """The names of every span's children."""
    children = defaultdict(list)
    for span in spans:
        children[span.parent_id].append(span.name)
    return children


def events(spans: Sequence[Span]) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, event.attributes) for span in spans for event in span.events]


def test_a_round_is_one_tree_over_all_roles(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept]), m_fixed=4) as world:
            # A named session, whose trace therefore depends on the attempt: only the calls can tell the others.
            assert len(await world.text(kit.request(max_new=12, session=SESSION))) == 12
            await world.idle()

    run(main())
    spans = kept.spans()
    (root,) = [span for span in spans if span.name == "sdcp.session"]
    assert (root.parent_id, root.attributes["sdcp.role"]) == (b"", "router")
    assert root.trace_id != of_session(SESSION).trace_id
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert {span.attributes["sdcp.session_id"] for span in spans} == {SESSION.hex()}
    rounds = sorted((s for s in spans if s.name == "sdcp.round"), key=lambda s: s.attributes["sdcp.round"])
    children = tree(spans)
    assert set(children) == {b"", root.span_id, *(span.span_id for span in rounds)}
    assert children[root.span_id] == ["sdcp.round"] * len(rounds)
    # The first token is decoded before a drafter is there (lead); then 4 + 1 tokens a round, and one is left.
    assert [span.attributes["sdcp.m"] for span in rounds][:3] == [0, 4, 4]
    assert sorted(children[rounds[0].span_id]) == ["sdcp.commit", "sdcp.verify"]
    for span in rounds[1:3]:
        assert sorted(children[span.span_id]) == ["sdcp.commit", "sdcp.draft", "sdcp.verify"]
    by = {(s.name, s.attributes.get("sdcp.round")): s for s in spans}
    draft, verify, commit = (by[f"sdcp.{name}", 2] for name in ("draft", "verify", "commit"))
    assert [s.attributes["sdcp.role"] for s in (draft, verify, commit)] == ["drafter", "verifier", "verifier"]
    begins = [span.start_ns for span in (rounds[1], draft, verify, commit)]
    assert begins == sorted(begins)
    assert root.start_ns <= rounds[0].start_ns
    assert draft.end_ns <= verify.start_ns
    assert verify.end_ns <= commit.start_ns <= commit.end_ns == rounds[1].end_ns <= root.end_ns


def test_attributes_say_what_design_section_7_asks_for(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept]), m_fixed=4) as world:
            await world.text(kit.request(max_new=12))
            await world.idle()

    run(main())
    (second,) = [span for span in kept.spans("sdcp.round") if span.attributes["sdcp.round"] == 2]
    told = {key: value for key, value in second.attributes.items() if key not in ("sdcp.session_id", "sdcp.role")}
    assert told == {
        "sdcp.round": 2, "sdcp.epoch": 1, "sdcp.base": 1, "sdcp.m": 4, "sdcp.accepted": 4, "sdcp.emitted": 5,
        "sdcp.action": "continue", "sdcp.m_cap": told["sdcp.m_cap"], "sdcp.drafter": "toy",
    }  # fmt: skip
    (verify,) = [span for span in kept.spans("sdcp.verify") if span.attributes["sdcp.round"] == 2]
    assert (verify.attributes["sdcp.batch.requests"], verify.attributes["sdcp.batch.rows"]) == (1, 5)
    assert verify.attributes["sdcp.tier_hits"] == 0
    assert 0 <= verify.attributes["sdcp.queue_seconds"] <= verify.seconds
    (commit,) = [span for span in kept.spans("sdcp.commit") if span.attributes["sdcp.round"] == 2]
    assert commit.attributes["sdcp.append_seconds"] == pytest.approx(commit.seconds, abs=1e-6)
    (root,) = kept.spans("sdcp.session")
    assert {key: value for key, value in root.attributes.items() if key.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "sdcp_mono",
        "gen_ai.request.model": "toy", "gen_ai.response.model": "toy", "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": root.attributes["gen_ai.response.time_to_first_chunk"],
    }  # fmt: skip


def test_the_session_is_part_of_its_clients_trace(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept])) as world:
            await world.text(kit.request(trace=CLIENT))
            await world.text(kit.request(trace="00-nonsense"))
            await world.idle()

    run(main())
    ours, other = kept.spans("sdcp.session")
    assert (ours.trace_id.hex(), ours.parent_id.hex()) == (CLIENT[3:35], CLIENT[36:52])
    assert other.parent_id == b""
    mine = [span for span in kept.spans() if span.attributes["sdcp.session_id"] == ours.attributes["sdcp.session_id"]]
    assert {span.attributes["sdcp.role"] for span in mine} == {"router", "verifier", "drafter"}
    assert {span.trace_id for span in mine} == {ours.trace_id}


def test_the_same_request_again_is_another_trace(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept])) as world:
            for _ in range(2):
                await world.text(kit.request(session=SESSION))
            await world.idle()

    run(main())
    first, second = kept.spans("sdcp.session")
    assert first.trace_id != second.trace_id
    ids = [span.span_id for span in kept.spans()]
    assert len(ids) == len(set(ids))


def test_an_escalation_is_an_event_where_it_was_decided_and_where_it_was_acted_on(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        tracing = Tracing([kept], sample=0.0)  # kept all the same
        async with kit.node(wrong(kit), tracing=tracing, low_ratio=50, m_fixed=4) as world:
            world.serving.terms = structs.replace(
                world.serving.terms, low_rounds=1, fallback=(int(Action.REDUCE), int(Action.SWITCH))
            )
            await world.read(kit.request(max_new=24))
            await world.idle()

    run(main())
    rounds = kept.spans("sdcp.round")
    (root,) = kept.spans("sdcp.session")
    assert {span.parent_id for span in rounds} == {root.span_id}
    decided = [facts["sdcp.action"] for name, facts in events(rounds) if name == "sdcp.escalation"]
    assert decided[:2] == ["reduce", "switch"]
    acted = [(name, facts.get("sdcp.action")) for name, facts in events([root])]
    assert ("sdcp.escalation", "switch") in acted
    by_action = {span.attributes["sdcp.action"] for span in rounds}
    assert "continue" not in by_action  # what neither failed nor was slow is not in the sample


def test_a_rejection_is_an_event_of_its_round_and_of_its_draft(kit: Any, run: Any) -> None:
    kept = Kept()
    failed: list[int] = []

    def fail(request: ScoreRequest) -> ScoreFailure | None:
        if request.tokens and not failed:
            failed.append(request.length)
            return ScoreFailure("out of memory")
        return None

    async def main() -> None:
        target = kit.toy.ToyTarget(kit.toy.chain(kit.EDGES), kit.CARD, fail)
        async with kit.node(right(kit), target=target, tracing=Tracing([kept], sample=0.0), m_fixed=4) as world:
            await world.text(kit.request())
            await world.idle()

    run(main())
    (span,) = kept.spans("sdcp.round")
    assert events([span])[0] == (
        "sdcp.rejected", {"sdcp.epoch": 1, "sdcp.round": span.attributes["sdcp.round"], "sdcp.problem": "503"}
    )  # fmt: skip
    assert span.attributes["sdcp.accepted"] == 4  # the drafter sent it again
    assert sorted(child for child in tree(kept.spans())[span.span_id]) == ["sdcp.commit", "sdcp.verify"]


def test_what_is_not_in_the_sample_leaves_nothing(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept], sample=0.0)) as world:
            await world.text(kit.request())
            await world.idle()

    run(main())
    assert kept.notes == []


def test_a_slow_round_is_kept_whatever_the_sample(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept], sample=0.0, slow_seconds=1e-9)) as world:
            await world.text(kit.request())
            await world.idle()

    run(main())
    assert {span.name for span in kept.spans()} == {"sdcp.round", "sdcp.draft", "sdcp.verify", "sdcp.commit"}


def test_tracing_that_fails_is_no_business_of_a_round(kit: Any, run: Any, caplog: Any) -> None:
    class Broken:
        def put(self, note: Note) -> None:
            raise RuntimeError("no room")

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([Broken()])) as world:
            assert await world.text(kit.request(max_new=20)) == kit.follow(3, 20)
            await world.assert_empty()

    run(main())
    assert "a trace is incomplete" in caplog.text


def test_roles_forget_what_is_over(kit: Any, run: Any) -> None:
    tracing = Tracing([Kept()])

    async def main() -> None:
        async with kit.node(right(kit), tracing=tracing) as world:
            await world.text(kit.request())
            await world.assert_empty()
            tracers = (world.serving._tracer, world.drafter._tracer, world.verifier._phases._tracer)
            assert [tracer._open for tracer in tracers] == [{}, {}, {}]
            assert (world.verifier._phases._ended, world.verifier._phases._scored) == ({}, {})

    run(main())


def test_a_fenced_round_is_told_by_who_lost_it_and_the_failover_by_the_router(kit: Any, run: Any) -> None:
    kept = Kept()

    async def main() -> None:
        async with kit.node(right(kit), tracing=Tracing([kept], sample=0.0), m_fixed=4) as world:
            generation = await world.serving.generate(kit.request(max_new=200))
            chunks = generation.chunks()
            tokens = list((await anext(chunks)).tokens)
            (active,) = world.serving._active.values()
            assert await world.log.fence(active.commit_log, 3)  # as another router would, which took it for dead
            async for chunk in chunks:
                tokens += chunk.tokens
            await generation.close()
            assert tuple(tokens) == kit.follow(3, 200)
            await world.idle()

    run(main())
    (lost,) = [span for span in kept.spans("sdcp.round") if span.error == "fenced"]
    assert (lost.attributes["sdcp.epoch"], lost.attributes["sdcp.role"]) == (1, "verifier")
    assert [name for name, _ in events([lost])] == ["sdcp.fenced"]
    (root,) = kept.spans("sdcp.session")
    assert lost.parent_id == root.span_id
    told = [(name, facts.get("sdcp.epoch")) for name, facts in events([root])]
    assert told[:2] == [("sdcp.admitted", None), ("sdcp.opened", 1)]
    moved = [event for event in told if event[0] in ("sdcp.failover", "sdcp.opened")]
    assert moved[-1] == ("sdcp.opened", moved[-2][1])  # opened at the epoch of its fence
    assert moved[-1][1] == 4

"""What is asked of a verifier about output delivery (6.7)."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import Bench, rejected, told
from sdcp_mono.conformance.kit import Level, Table, expect

MUST, DECISION = Level.MUST, Level.DECISION
table = Table()

AT_ONCE_SECONDS: Final = 2.0  # an answer that was told not to wait; a busy machine needs some time for it


@table("SDCP-164", MUST, "6.7", "output?from=n answers the tokens at indices n and later")
async def from_index(bench: Bench) -> str:
    session = await bench.open()
    while len(session.tokens) < 7:
        await session.verdict(await session.right(2))
    for n in range(len(session.tokens) + 1):
        output = await session.output(n)
        expect(output["from"] == n, f"from={n}: from {output['from']}")
        expect(output["tokens"] == session.tokens[n:], f"from={n}: {len(output['tokens'])} tokens")
    return f"every n from 0 to {len(session.tokens)}"


@table("SDCP-065", MUST, "5.2", "output: members; finish only with final")
async def output_members(bench: Bench) -> str:
    session = await bench.open(max_new=4)
    outputs = [await session.output()]
    while not session.ended:
        await session.verdict(await session.right(1))
        outputs.append(await session.output())
    for output in outputs:
        found = wire.defects("output", output)
        expect(not found, "; ".join(found))
        expect(output["final"] == ("finish" in output), f"final {output['final']}, finish {output.get('finish')}")
    return f"{len(outputs)} messages"


@table("SDCP-165", MUST, "6.7", "a reader waits for tokens")
async def waits(bench: Bench) -> str:
    session = await bench.open()
    waiting = asyncio.create_task(session.get("?from=0", wait=None))
    await asyncio.sleep(0)
    verdict = await session.verdict(await session.right(2))
    answer = await waiting
    expect(answer.status == 200, told(answer))
    output = wire.decode(answer.body)
    expect(output["final"] is False, "final on a running session")
    expect(output["tokens"] == verdict["emitted"] or output["tokens"] == [], f"tokens {output['tokens']}")
    answer = await session.get(f"?from={len(session.tokens)}", wait=0)
    output = wire.decode(answer.body)
    expect((answer.status, output["tokens"], output["final"]) == (200, [], False), f"no tokens left: {output}")
    return "a waiting reader was answered, with nothing new 200, no tokens, not final"


@table("SDCP-167", MUST, "6.7", "indices are stable, every message has the epoch")
async def stable(bench: Bench) -> str:
    session = await bench.open()
    for at in (0, 1, 2):
        await session.verdict(await session.wrong(3, at))
        first, again = await session.output(), await session.output()
        expect(first == again and first["tokens"] == session.tokens, "output changed between two reads")
        expect(first["epoch"] == 1, f"epoch {first['epoch']}")
    return "three reads twice, epoch 1"


@table("SDCP-169", MUST, "6.7", "the last message is final, with finish or fail")
async def final(bench: Bench) -> str:
    stop = (await bench.greedy(1))[0]
    for what, changes, finish in (
        ("stop token", {"stop": [stop]}, wire.FINISH),
        ("max_new", {"max_new": 1}, wire.FINISH),
        ("ladder", {"low_rounds": 1, "fallback": [wire.FAIL]}, wire.FAIL),
    ):
        session = await bench.open(**changes)
        expect((await session.output())["final"] is False, f"{what}: final before the end")
        await session.verdict(await session.wrong(1))
        output = await session.output()
        seen = (output["final"], output.get("finish"))
        expect(seen == (True, finish), f"{what}: final and finish {seen}, not {(True, finish)}")
    return "after a stop token and max_new 4, after the ladder 5"


@table("AMB-163", DECISION, "6.7", "from: missing is 0, anything but a number is 400")
async def from_missing(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(1))
    answer = await session.get("")
    expect(answer.status == 200 and wire.decode(answer.body)["tokens"] == session.tokens, f"no from: {told(answer)}")
    for bad in ("-1", "x", "1.5"):
        rejected(await session.get(f"?from={bad}"), (400,), f"from={bad}")
    return "missing 0; -1, x and 1.5 are 400"


@table("AMB-164", DECISION, "6.7", "from beyond the end of a closed session")
async def from_beyond(bench: Bench) -> str:
    session = await bench.open(max_new=1)
    await session.verdict([0])
    output = await session.output(5)
    expect((output["tokens"], output["final"]) == ([], True), f"{output}")
    return "no tokens, final"


@table("AMB-166", DECISION, "6.7", "Prefer: wait=0 is answered at once")
async def no_wait(bench: Bench) -> str:
    session = await bench.open()
    started = time.monotonic()
    answer = await session.get("?from=0", wait=0)
    seconds = time.monotonic() - started
    expect(answer.status == 200 and seconds < AT_ONCE_SECONDS, f"{told(answer)} after {seconds:.1f} s")
    return "answered without waiting"


@table("AMB-168", DECISION, "6.7", "final comes with the last tokens, and again")
async def final_when(bench: Bench) -> str:
    session = await bench.open(max_new=2)
    await session.verdict(await session.right(2))
    first, again = await session.output(), await session.output()
    expect(first["final"] and first["tokens"] == session.tokens and first == again, f"{first}")
    return "the last tokens and final together, twice"

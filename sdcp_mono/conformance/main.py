"""Run the checks of one role against a URL and tell what was seen."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from sdcp_mono.conformance import (
    bench,
    depot,
    drafter,
    report,
    router,
    stage,
    verifier_contract,
    verifier_control,
    verifier_http,
    verifier_output,
    verifier_rounds,
    verifier_rows,
)
from sdcp_mono.conformance.http2 import NoAnswer
from sdcp_mono.conformance.kit import Check, Finding, Options, run

# Checks under way. A verifier that batches answers them in one pass; of a drafter mostly silence is waited for; a
# router is told who is alive, which is one truth for all checks.
AT_ONCE: Final = {"verifier": 4, "drafter": 8, "router": 1}

Shown = Callable[[Finding], None]

CHECKS: Final[dict[str, list[Check]]] = {
    "verifier": [
        *verifier_http.table.checks,
        *verifier_contract.table.checks,
        *verifier_rounds.table.checks,
        *verifier_control.table.checks,
        *verifier_output.table.checks,
        *verifier_rows.table.checks,
    ],
    "drafter": drafter.table.checks,
    "router": router.table.checks,
}
BENCHES: Final[dict[str, Callable[[Options], AbstractAsyncContextManager[Any]]]] = {
    "verifier": bench.bench,
    "drafter": stage.stage,
    "router": depot.depot,
}


async def examine(role: str, options: Options, shown: Shown | None = None, at_once: int | None = None) -> list[Finding]:
    """Every check of the role, in order. Raises ``ValueError`` for what has to be given first."""
    chosen = [check for check in CHECKS[role] if not options.only or check.id in options.only]
    slots = asyncio.Semaphore(at_once or AT_ONCE[role])

    async def one(check: Check, bench: Any) -> Finding:
        async with slots, bench.workplace() as place:
            finding = await run(check, place)
        if shown is not None:
            shown(finding)
        return finding

    async with BENCHES[role](options) as bench:
        return list(await asyncio.gather(*(one(check, bench) for check in chosen)))


def conformance(
    url: str,
    role: str,
    certs: Path,
    *,
    mlc: str | None = None,
    mlc_prefix: str | None = None,
    target: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    context: int | None = None,
    trigger: str | None = None,
    listen: str = "",
    untrusted: bool = False,
    only: Sequence[str] = (),
    as_json: bool = False,
    junit: Path | None = None,
) -> int:
    """``sdcp-mono conformance URL --role ROLE``; digests in hex.

    Answers the exit code: 0, 1 when a MUST failed, 2 when nothing could be run.
    """
    errors = Console(stderr=True)
    if role not in CHECKS:
        errors.print(f"role: {role!r} is not one of {', '.join(CHECKS)}")
        return 2
    started = time.monotonic()
    try:
        options = Options(
            url=url,
            certs=certs,
            mlc=mlc,
            mlc_prefix=mlc_prefix,
            target=None if target is None else bytes.fromhex(target),
            tokenizer=None if tokenizer is None else bytes.fromhex(tokenizer),
            vocab_size=vocab_size,
            context=context,
            trigger=trigger,
            listen=listen,
            untrusted=untrusted,
            only=frozenset(only),
        )
        findings = asyncio.run(examine(role, options))
    except (ValueError, OSError, NoAnswer) as error:
        errors.print(f"conformance: {error}", markup=False)
        return 2
    seconds = time.monotonic() - started
    if as_json:
        sys.stdout.write(report.as_json(findings) + "\n")
    else:
        report.show(findings, Console(), f"{role} at {url}, {seconds:.1f} s")
    if junit is not None:
        report.write_junit(findings, junit, f"sdcp.{role}", seconds)
    return report.exit_code(findings)

"""One pass of the fused decoder: weights x context x rows of one session or sessions of one row.

    python benchmarks/decoder.py FOLDER [--json] [--threads N] [--repetitions N] [--weights bfloat16,int4]

FOLDER holds a model that the fused decoder supports (safetensors). ``floor`` is a plain read of the packed weights by
the same threads; ``matmul`` the pass's matmuls alone. All cases of a weight format are interleaved within every
repetition; figures are medians, ratios are to the one-row pass at the same context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sdcp_mono.kernels import native
from sdcp_mono.kernels.native import FORMATS, Format, Weight
from sdcp_mono.runners.decoder import RaggedBatch
from sdcp_mono.runners.fused import FusedDecoder

BLOCK_SIZE = 16
CONTEXTS = (128, 1024)
ROWS = (1, 2, 3, 5, 8, 9, 17)  # of one session: one decoded token, or M = rows - 1 proposed ones verified
SESSIONS = (2, 4, 8, 16)  # of one row each


@dataclass(frozen=True, slots=True)
class Case:
    context: int  # tokens before the pass
    sessions: int
    rows: int  # of each session

    def batch(self, vocab: int) -> RaggedBatch:
        """Every session has its own blocks; what they hold doesn't matter to the time."""
        total, end = self.sessions * self.rows, self.context + self.rows
        blocks = -(-(max(CONTEXTS) + max(ROWS)) // BLOCK_SIZE)
        tables = np.arange(self.sessions * blocks, dtype=np.int32).reshape(self.sessions, blocks)
        positions = np.tile(np.arange(self.context, end, dtype=np.int32), self.sessions)
        owner = np.repeat(np.arange(self.sessions), self.rows)
        return RaggedBatch(
            token_ids=np.random.default_rng(0).integers(0, vocab, total, dtype=np.int32),
            positions=positions,
            query_starts=np.arange(0, total + 1, self.rows, dtype=np.int32),
            context=np.full(self.sessions, end, np.int32),
            block_tables=tables,
            slots=tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            logit_rows=np.arange(total, dtype=np.int32),
        )


def cases() -> list[Case]:
    return [
        Case(context, sessions, rows)
        for context in CONTEXTS
        for sessions, rows in (*((1, rows) for rows in ROWS), *((sessions, 1) for sessions in SESSIONS))
    ]


def measure(folder: str, weights: Format, threads: int, repetitions: int) -> dict[str, object]:
    decoder = FusedDecoder.from_pretrained(folder, weights, threads)
    decoder.allocate(max(SESSIONS) * -(-(max(CONTEXTS) + max(ROWS)) // BLOCK_SIZE), BLOCK_SIZE)
    lib, matrices = native.library(), decoder.matrices
    array = (Weight * len(matrices))(*matrices)
    size = sum(lib.sdcp_packed_bytes(w.format, w.n, w.k) for w in matrices)
    most = max(case.sessions * case.rows for case in cases())
    x = np.random.default_rng(1).standard_normal((most, max(w.k for w in matrices)), dtype=np.float32)
    y = np.zeros((most, max(w.n for w in matrices)), np.float32)

    def matmuls(rows: int) -> Callable[[], float]:
        return lambda: float(lib.sdcp_measure_pass(array, len(matrices), x.ctypes.data, y.ctypes.data, rows))

    def whole(case: Case) -> Callable[[], float]:
        batch = case.batch(decoder.vocab_size)

        def run() -> float:
            start = time.perf_counter()
            decoder.forward(batch)
            return time.perf_counter() - start

        return run

    jobs: dict[object, Callable[[], float]] = {"floor": lambda: float(lib.sdcp_measure_read(matrices[0].data, size))}
    for case in cases():
        jobs[case.sessions * case.rows] = matmuls(case.sessions * case.rows)
        jobs[case] = whole(case)
    times: dict[object, list[float]] = {name: [] for name in jobs}
    for repetition in range(repetitions + 1):  # the first warms up
        for name, job in jobs.items():
            seconds = job()
            if repetition:
                times[name].append(seconds * 1e3)
    ms = {name: statistics.median(values) for name, values in times.items()}
    return {
        "weights": weights,
        "isa": native.isa(weights),
        "threads": threads,
        "megabytes": round(size / 1e6, 1),
        "floor_ms": round(ms["floor"], 2),
        "passes": [
            {
                "context": case.context,
                "sessions": case.sessions,
                "rows": case.rows,
                "ms": round(ms[case], 2),
                "best_ms": round(min(times[case]), 2),
                "to_one_row": round(ms[case] / ms[Case(case.context, 1, 1)], 2),
                "to_floor": round(ms[case] / ms["floor"], 2),
                "outside_matmul": round(1 - ms[case.sessions * case.rows] / ms[case], 2),
            }
            for case in cases()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=native.default_threads())
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--weights", default=",".join(FORMATS))
    options = parser.parse_args()
    if not native.available():
        sys.exit("the kernels aren't compiled: python hatch_build.py")
    for weights in (name for name in FORMATS if name in options.weights.split(",")):
        result = measure(options.folder, weights, options.threads, options.repetitions)
        if options.json:
            print(json.dumps(result))
            continue
        print("{weights} ({isa}, {threads} threads): {megabytes} MB, floor {floor_ms} ms".format(**result))
        print("  context  sessions  rows      ms    best  to one row  to floor  outside matmul")
        for row in result["passes"]:  # type: ignore[attr-defined]
            print(
                "  {context:7}  {sessions:8}  {rows:4}  {ms:6.2f}  {best_ms:6.2f}  {to_one_row:10.2f}  {to_floor:8.2f}"
                "  {outside_matmul:14.0%}".format(**row)
            )


if __name__ == "__main__":
    main()

"""All matmuls of one pass of SmolLM2-135M over cold weights: format x rows, against the time to read the weights.

    python benchmarks/matmul.py [--json] [--threads N] [--repetitions N] [--formats bfloat16,int4] [--rows 1,8]

Shapes as a decoder runs them: q, k and v merged, gate and up merged, 30 layers and the head, a barrier after each,
the conversion of activations included. Repetitions are interleaved over rows; figures are medians. ``floor`` is a plain
read of the same memory by the same threads. Where all weights of a format fit into the last-level cache they aren't
cold: compare the GB/s.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys

import numpy as np

from sdcp_mono.kernels import native
from sdcp_mono.kernels.native import FORMATS, Buffer, Format, Weight

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # n, k of qkv, o, gate and up, down
SHAPES = LAYER * 30 + ((49152, 576),)
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)


def load(format: Format) -> tuple[Buffer, ctypes.Array[Weight]]:
    """Random weights of every shape, packed one after another."""
    code = FORMATS[format]
    sizes = [native.packed_bytes(format, n, k) for n, k in SHAPES]
    buffer = Buffer(sum(sizes))
    random = np.random.default_rng(0)
    source = (random.random(max(n * k for n, k in SHAPES), dtype=np.float32) - np.float32(0.5)) / 10
    weights = (Weight * len(SHAPES))()
    address = buffer.address
    for i, ((n, k), size) in enumerate(zip(SHAPES, sizes, strict=True)):
        weights[i] = Weight(code, n, k, 0, address)
        native.library().sdcp_pack(code, source.ctypes.data, n, k, address)
        address += size
    return buffer, weights


def measure(format: Format, rows: list[int], repetitions: int) -> dict[str, object]:
    """Medians in milliseconds, after one run that isn't counted."""
    buffer, weights = load(format)
    lib = native.library()
    x = np.random.default_rng(1).standard_normal((max(rows), 1536), dtype=np.float32)
    y = np.zeros((max(rows), 49152), np.float32)
    floor: list[float] = []
    times: dict[int, list[float]] = {count: [] for count in rows}
    for repetition in range(repetitions + 1):
        read = lib.sdcp_measure_read(buffer.address, buffer.size)
        passes = {n: lib.sdcp_measure_pass(weights, len(weights), x.ctypes.data, y.ctypes.data, n) for n in rows}
        if repetition:
            floor.append(read * 1e3)
            for count, seconds in passes.items():
                times[count].append(seconds * 1e3)
    base, least = statistics.median(times[rows[0]]), statistics.median(floor)
    return {
        "format": format,
        "isa": native.isa(format),
        "threads": native.threads(),
        "megabytes": round(buffer.size / 1e6, 1),
        "floor_ms": round(least, 3),
        "gigabytes_per_second": round(buffer.size / least / 1e6, 1),
        "rows": [
            {
                "rows": count,
                "ms": round(median := statistics.median(values), 3),
                "best_ms": round(min(values), 3),
                "to_first": round(median / base, 3),
                "to_floor": round(median / least, 3),
            }
            for count, values in times.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=native.default_threads())
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    options = parser.parse_args()
    if not native.available():
        sys.exit("the kernels aren't compiled: python hatch_build.py")
    native.set_threads(options.threads)
    formats = [format for format in FORMATS if format in options.formats.split(",")]
    for format in formats:
        result = measure(format, [int(count) for count in options.rows.split(",")], options.repetitions)
        if options.json:
            print(json.dumps(result))
            continue
        title = "{format} ({isa}, {threads} threads): {megabytes} MB, floor {floor_ms} ms = {gigabytes_per_second} GB/s"
        print(title.format(**result))
        print("  rows      ms    best  to first  to floor")
        for row in result["rows"]:  # type: ignore[attr-defined]
            print("  {rows:4}  {ms:6.2f}  {best_ms:6.2f}  {to_first:8.2f}  {to_floor:8.2f}".format(**row))


if __name__ == "__main__":
    main()

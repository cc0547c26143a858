"""A target larger than one device: tensor parallelism, one decoder that spans several *ranks* of this host.

Rank 0 is the process that owns the ``ParallelDecoder``. The others are fresh interpreters (never forks) that load their
shard of the same folder, wait for a command, run the same pass as rank 0 and meet it in the collectives that
transformers' tensor-parallel plan puts between the shards: gloo on CPUs, NCCL on GPUs, rank n on GPU n. Each rank keeps
the KV of its own heads (of all heads where the plan doesn't split them, as in Phi-3 and DeepSeek). Ranks on other hosts
are out of scope: commands go over inherited socket pairs.

Laws:
- A rank acts on enumerated commands with fixed-layout integers and raw KV bytes; nothing is unpickled. Collectives use
  the loopback interface only, and the ranks find one another in a folder that only this user may enter.
- Every command is answered by every rank, one command at a time; whoever dies, fails or doesn't answer ends the whole
  decoder with a ``RankFailed`` that names it, within twice ``timeout_seconds`` and ``GRACE_SECONDS`` a rank. Only a GPU
  that stops in the middle of a pass is left to NCCL's watchdog, which ends the process.
- A rank ends with its rank 0, however that ends.

Numerics: partial sums are added across ranks, so that logits differ from one rank's in the last bits. Measured in
float32: 6e-6 of 5.6 on a tiny Llama with 2 ranks, 9e-5 of 36 on SmolLM2-135M with 3, no argmax of 400 changed. Matmuls
are torch's, which don't promise that a row is the same in every batch. In bfloat16 both move logits by 0.1 on average
and by 1 at most (SmolLM2; one rank's torch matmuls do as much), so that greedy output may depend on the batch.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout

from sdcp_mono.core.ports import ModelLost
from sdcp_mono.runners.decoder import RaggedBatch
from sdcp_mono.runners.hf import HfDecoder, read_model

T = TypeVar("T")

TIMEOUT_SECONDS: Final = 60.0  # of one pass; a pass is bounded by the token budget and takes seconds at the worst
LOAD_SECONDS: Final = 3600.0  # large checkpoints on network disks take tens of minutes, and not the same on every rank
GRACE_SECONDS: Final = 5.0  # for a rank to leave by itself, and for the death of one to become visible
ERROR_BYTES: Final = 500  # of what a rank says about its failure


class RankFailed(ModelLost):
    """A rank died, failed or didn't answer; the message names it. The decoder is closed and stays so."""


class Command(IntEnum):
    """What rank 0 tells the others. Up to four integers and a body of bytes follow, see ``_HEADER``."""

    START = 1  # every rank has read its weights: build the decoder
    ALLOCATE = 2  # blocks, block size
    FORWARD = 3  # T, S, B, R; the arrays of a RaggedBatch in order
    READ = 4  # block; answered with its bytes
    WRITE = 5  # block; its bytes
    STOP = 6


OK: Final = 0
FAILED: Final = 1
_HEADER: Final = struct.Struct("<6i")  # a command or an answer's status, four integers, length of the body


class _Line:
    """One end of the socket pair between rank 0 and another rank: a header, then as many bytes as it says."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, what: int, numbers: Sequence[int] = (), body: bytes | memoryview = b"") -> None:
        padded = (*numbers, 0, 0, 0, 0)[:4]
        self.end.sendall(_HEADER.pack(what, *padded, len(body)))
        if len(body):
            self.end.sendall(body)

    def receive(self) -> tuple[int, tuple[int, ...], bytearray]:
        """What, its integers, its body. Raises ``EOFError`` if the other end is gone."""
        what, *numbers, size = _HEADER.unpack(self._exactly(_HEADER.size))
        return what, tuple(numbers), self._exactly(size)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self.end.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return data


@dataclass(frozen=True, slots=True)
class _Group:
    """What all ranks have in common; given to them on the command line as JSON."""

    folder: str
    store: str  # file in which they find one another
    ranks: int
    dtype: str
    device: str  # cpu or cuda
    threads: int  # of each rank
    timeout_seconds: float

    def join(self, rank: int) -> None:
        """Bring torch.distributed up."""
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        # By environment, since transformers makes groups of its own. Neither backend authenticates who connects.
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
        device = None
        if self.device == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(self.threads)
        dist.init_process_group(
            "gloo" if device is None else "nccl",
            init_method=f"file://{self.store}",
            rank=rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=LOAD_SECONDS),
            device_id=device,
        )

    def read(self) -> Any:
        """This rank's shard of the model."""
        return read_model(self.folder, getattr(torch, self.dtype), self.ranks)

    def build(self, model: Any) -> HfDecoder:
        """All ranks at once: the decoder's probe runs the model. From now on collectives have little time."""
        # NCCL's own watchdog ends the process: it comes after what is told in an orderly way.
        seconds = self.timeout_seconds * (2 if self.device == "cuda" else 1)
        _set_pg_timeout(timedelta(seconds=seconds))
        return HfDecoder(model)


class _Rank:
    """Another rank as rank 0 sees it: a process and a line to it."""

    def __init__(self, number: int, group: _Group) -> None:
        self.number = number
        self._failure: str | None = None
        ours, theirs = socket.socketpair()
        self._line = _Line(ours)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # import what this process imports
            "LOCAL_RANK": str(number),  # transformers picks the GPU by it
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(number), json.dumps(asdict(group))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )

    def tell(self, command: Command, numbers: Sequence[int], body: bytes | memoryview, seconds: float) -> None:
        self._line.end.settimeout(seconds)
        self._line.send(command, numbers, body)

    def hear(self, seconds: float) -> bytearray:
        """The body of its answer. Raises ``RankFailed`` with what became of it, also when asked again."""
        if self._failure is None:
            self._line.end.settimeout(seconds)
            try:
                status, _, body = self._line.receive()
            except TimeoutError:
                self._failure = f"rank {self.number} did not answer within {seconds:g} s"
            except (EOFError, OSError):
                self._failure = f"rank {self.number} {self._ending()}"
            else:
                if status == OK:
                    return body
                self._failure = f"rank {self.number}: {body.decode(errors='replace')}"
        raise RankFailed(self._failure)

    def _ending(self) -> str:
        try:
            code = self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its line"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self, seconds: float) -> None:
        """Wait for it to leave, then make it."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._line.end.close()


class ParallelDecoder:
    """A ``Decoder`` over ``ranks`` shards of the model in a Hugging Face folder. Owned by one thread, one a process.

    ``threads`` are divided among the ranks on CPUs. Weights stay in ``dtype`` and aren't packed. Raises ``ValueError``
    for a model that can't be run or not by so many ranks, ``RankFailed`` from then on where a rank does. ``close`` ends
    the other ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        ranks: int,
        dtype: torch.dtype = torch.float32,
        threads: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _refuse(Path(folder), ranks, device)
        self._store = tempfile.TemporaryDirectory(prefix="sdcp-ranks-")  # mode 0700
        self._group = _Group(
            folder=str(folder),
            store=str(Path(self._store.name) / "store"),
            ranks=ranks,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            threads=max(1, threads // ranks),
            timeout_seconds=timeout_seconds,
        )
        self._others: list[_Rank] = []
        self._closed: str | None = None  # why
        try:
            self._local = self._load()
        except RuntimeError as error:
            self._fail(error)
        except BaseException:
            self.close()
            raise
        self.vocab_size, self.context = self._local.vocab_size, self._local.context
        self.kv_dtype = self._local.kv_dtype
        self.kv_layout = f"tp {ranks} {self._local.kv_layout}"
        self.kv_bytes_per_token = ranks * self._local.kv_bytes_per_token

    def _load(self) -> HfDecoder:
        group = self._group
        for number in range(1, group.ranks):
            self._others.append(_Rank(number, group))
        self._hear(LOAD_SECONDS)  # they have imported what they need
        group.join(0)
        model = group.read()
        self._hear(LOAD_SECONDS)  # they have read their weights
        decoder, answers = self._together(Command.START, (), lambda: group.build(model), LOAD_SECONDS)
        if any(bytes(answer) != _describe(decoder) for answer in answers):  # block_bytes counts on it
            raise ValueError("unsupported model: its KV is not divided evenly among the ranks")
        return decoder

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the other ranks."""
        return tuple(rank.process.pid for rank in self._others)

    @property
    def fault(self) -> str:
        """Why it can't be used any more, empty while it can; from any thread, also between two passes."""
        if self._closed is None and (dead := [rank.number for rank in self._others if rank.process.poll() is not None]):
            return f"rank {dead[0]} has ended"
        return self._closed or ""

    @property
    def block_bytes(self) -> int:
        return self._group.ranks * self._local.block_bytes

    def allocate(self, blocks: int, block_size: int) -> None:
        self._run(Command.ALLOCATE, (blocks, block_size), lambda: self._local.allocate(blocks, block_size))

    def read_block(self, index: int) -> memoryview:
        """See ``Decoder``: a copy, rank after rank."""
        own, others = self._run(Command.READ, (index,), lambda: self._local.read_block(index))
        return memoryview(b"".join([own, *others]))

    def write_block(self, index: int, data: memoryview) -> None:
        """See ``Decoder``."""
        if len(data) != self.block_bytes:
            raise ValueError(f"data: a block has {self.block_bytes} bytes, got {len(data)}")
        size = self._local.block_bytes
        shards = [data[start : start + size] for start in range(0, len(data), size)]
        self._run(Command.WRITE, (index,), lambda: self._local.write_block(index, shards[0]), shards[1:])

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See ``Decoder``."""
        numbers, body = _pack(batch)
        bodies = [body] * len(self._others)
        logits, _ = self._run(Command.FORWARD, numbers, lambda: self._local.forward(batch), bodies)
        return logits

    def close(self) -> None:
        """End the other ranks and leave torch.distributed. Again: nothing happens."""
        self._end("it was closed", GRACE_SECONDS)

    def _run(
        self, command: Command, numbers: Sequence[int], own: Callable[[], T], bodies: Iterable[bytes | memoryview] = ()
    ) -> tuple[T, list[bytearray]]:
        """A command on all ranks; a failure ends them."""
        if self._closed is not None:
            raise RankFailed(f"tensor parallelism has ended: {self._closed}")
        try:
            return self._together(command, numbers, own, self._group.timeout_seconds, bodies)
        except Exception as error:
            self._fail(error)
        except BaseException:  # interrupted: the ranks are out of step
            self.close()
            raise

    def _together(
        self,
        command: Command,
        numbers: Sequence[int],
        own: Callable[[], T],
        seconds: float,
        bodies: Iterable[bytes | memoryview] = (),
    ) -> tuple[T, list[bytearray]]:
        for rank, body in zip(self._others, list(bodies) or [b""] * len(self._others), strict=True):
            rank.tell(command, numbers, body, seconds)
        result = own()
        return result, self._hear(seconds)

    def _hear(self, seconds: float) -> list[bytearray]:
        return [rank.hear(seconds) for rank in self._others]

    def _fail(self, error: Exception) -> NoReturn:
        """Say what became of every rank, and end."""
        found = []
        for rank in self._others:
            try:
                rank.hear(min(GRACE_SECONDS, self._group.timeout_seconds))
            except RankFailed as failure:
                found.append(str(failure))
        if not isinstance(error, RankFailed):  # most often only what the others' end did to a collective
            found.append(f"rank 0: {_say(error)}")
        self._end("; ".join(found), 0)
        raise RankFailed(f"tensor parallelism has ended: {self._closed}") from error

    def _end(self, why: str, seconds: float) -> None:
        """Let the other ranks leave within ``seconds``; 0: they are not expected to."""
        if self._closed is not None:
            return
        self._closed = why
        if seconds:
            for rank in self._others:
                with suppress(OSError):  # gone already
                    rank.tell(Command.STOP, (), b"", seconds)
            _leave()  # NCCL's ranks leave together
        for rank in self._others:
            rank.end(seconds)
        if not seconds and dist.is_initialized() and self._group.device == "cuda":
            _abort_process_group()  # kernels that wait for a dead rank would wait for ever
        _leave()
        self._store.cleanup()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse(folder: Path, ranks: int, device: str) -> None:
    """Raise ``ValueError`` for what can be known to fail before anything is started."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if ranks < 2:
        raise ValueError(f"ranks: {ranks} is not several")
    if not config.base_model_tp_plan:
        raise ValueError(f"unsupported model: transformers has no tensor-parallel plan for {config.model_type}")
    if heads % ranks or kv_heads % ranks:
        common = math.gcd(heads, kv_heads)
        fit = ", ".join(str(n) for n in range(2, common + 1) if common % n == 0) or "none"
        raise ValueError(
            f"ranks: {heads} attention heads over {kv_heads} KV heads can't be divided among {ranks} ranks; "
            f"numbers that fit {folder.name}: {fit}"
        )
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"ranks: {ranks} need a GPU each, there are {torch.cuda.device_count()}")
    if dist.is_initialized():
        raise ValueError("ranks: this process has a tensor-parallel model already")


def _pack(batch: RaggedBatch) -> tuple[tuple[int, ...], bytes]:
    """T, S, B, R and the arrays."""
    sizes = (*batch.token_ids.shape, *batch.block_tables.shape, *batch.logit_rows.shape)
    arrays = (
        batch.token_ids, batch.positions, batch.query_starts, batch.context, batch.block_tables, batch.slots,
        batch.logit_rows,
    )  # fmt: skip
    return sizes, b"".join(array.tobytes() for array in arrays)


def _unpack(numbers: Sequence[int], body: bytearray) -> RaggedBatch:
    rows, sequences, blocks, logit_rows = numbers
    lengths = (rows, rows, sequences + 1, sequences, sequences * blocks, rows, logit_rows)
    array = np.frombuffer(body, np.int32)
    assert len(array) == sum(lengths), "a batch of another length than its header says"
    token_ids, positions, starts, context, tables, slots, logits, _ = np.split(array, np.cumsum(lengths))
    return RaggedBatch(token_ids, positions, starts, context, tables.reshape(sequences, blocks), slots, logits)


def _describe(decoder: HfDecoder) -> bytes:
    return f"{decoder.kv_layout} {decoder.vocab_size} {decoder.context}".encode()


def _say(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:ERROR_BYTES]


def _serve(line: _Line, group: _Group, rank: int) -> None:
    """What a rank does until it is told to stop or rank 0 is gone."""
    line.send(OK)
    group.join(rank)
    model = group.read()
    line.send(OK)
    decoder: HfDecoder | None = None
    while True:
        what, numbers, body = line.receive()
        answer: bytes | memoryview = b""
        match Command(what), decoder:
            case Command.STOP, _:
                return
            case Command.START, None:
                decoder = group.build(model)
                answer = _describe(decoder)
            case Command.ALLOCATE, HfDecoder():
                decoder.allocate(*numbers[:2])
            case Command.FORWARD, HfDecoder():
                decoder.forward(_unpack(numbers, body))
            case Command.READ, HfDecoder():
                answer = decoder.read_block(numbers[0])
            case Command.WRITE, HfDecoder():
                decoder.write_block(numbers[0], memoryview(body))
            case command, _:
                raise ValueError(f"{command.name} out of order")
        line.send(OK, body=answer)


def _end_with(end: socket.socket) -> None:
    """End this process when the other end of the pair is closed, whatever its main thread waits for meanwhile."""
    poll = select.poll()
    poll.register(end, 0)  # a hang-up is reported all the same
    poll.poll()
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """A rank: descriptor of its end of the line, its number, and the ``_Group`` as JSON."""
    end = socket.socket(fileno=int(arguments[0]))
    rank, group = int(arguments[1]), _Group(**json.loads(arguments[2]))
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a terminal or a unit: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    line = _Line(end)
    try:
        _serve(line, group, rank)
    except EOFError:
        return 0
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):  # rank 0 is gone too
            line.send(FAILED, body=_say(error).encode())
        return 1
    finally:
        _leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The real model behind the real roles. Weights are fetched once into a cache that CI keeps for one run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from sdcp_mono import compose
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import DraftModel, GenerateRequest, RoundInfo
from sdcp_mono.models import resolve
from sdcp_mono.models.identity import ModelFolder, no_progress
from sdcp_mono.models.tokenizer import Tokenizer
from sdcp_mono.settings import Settings

ROOT = Path(__file__).parent.parent.parent
DATA = Path(os.environ.get("SDCP_TEST_DATA") or ROOT / ".cache" / "sdcp-test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("model")


@dataclass(frozen=True, slots=True)
class Output:
    """What one request got."""

    tokens: tuple[int, ...]
    finish: int | None
    rounds: tuple[RoundInfo, ...]
    error: str = ""


@dataclass(frozen=True)
class Engine:
    """The target and every drafter, loaded once; ``node`` composes them as a test wants."""

    loaded: compose.Loaded
    drafts: dict[str, DraftModel]
    data: Path

    def node(self, draft: str | None = None, *, m: int | None = None, **settings: Any) -> compose.Node:
        """All roles over one of the drafters, or none; ``m`` fixes the number of proposed tokens."""
        chosen = () if draft is None else ((self.drafts[draft], draft == "ngram"),)
        changed = Settings(data_dir=self.data, m_fixed=m, **settings)
        return compose.Node(replace(self.loaded, settings=changed, drafts=chosen), CollectorRegistry())

    def request(self, prompt: Sequence[int], max_new: int = 24, **changes: Any) -> GenerateRequest:
        base = GenerateRequest(
            prompt=tuple(prompt), max_new=max_new, stop=tuple(self.loaded.folder.eos_ids), rule=Rule.GREEDY,
            sampling=Sampling(),
        )  # fmt: skip
        return structs.replace(base, **changes)

    def run(self, node: compose.Node, requests: Sequence[GenerateRequest], together: int = 1) -> list[Output]:
        """All requests, ``together`` at a time: each that ends makes room for the next."""

        async def all_of_them() -> list[Output]:
            slots = asyncio.Semaphore(together)

            async def one(request: GenerateRequest) -> Output:
                async with slots:
                    return await collect(node, request)

            async with node:
                return await asyncio.gather(*(one(request) for request in requests))

        return asyncio.run(all_of_them())


async def collect(node: compose.Node, request: GenerateRequest) -> Output:
    tokens: list[int] = []
    rounds: list[RoundInfo] = []
    generation = await node.serving.generate(request)
    try:
        async for chunk in generation.chunks():
            tokens += chunk.tokens
            rounds += chunk.rounds
        return Output(tuple(tokens), chunk.finish, tuple(rounds), chunk.error)
    finally:
        await generation.close()


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    return resolve(None, DATA)


@pytest.fixture(scope="session")
def smollm2_float32() -> ModelFolder:
    return resolve(None, DATA, dtype="float32")


def load(folder: ModelFolder, data: Path, drafts: Sequence[str], **settings: Any) -> Engine:
    chosen = Settings(model=str(folder.path), data_dir=data, draft=tuple(drafts), **settings)
    loaded = compose.load(chosen, no_progress)
    names = {"model": "self"}
    models = {names.get(model.name.partition(":")[0], model.name): model for model, _ in loaded.drafts}
    return Engine(loaded, models, data)


@pytest.fixture(scope="session")
def engine(smollm2: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """bfloat16, with every drafter: n-gram, the target in int4, and the target as its own draft model."""
    data = tmp_path_factory.mktemp("data")
    return load(smollm2, data, ("ngram", "quantized", f"model:{smollm2.path}"), kv_memory_mb=256)


@pytest.fixture(scope="session")
def prompts(engine: Engine) -> list[list[int]]:
    """At least 64 chat prompts of a dozen kinds, short enough to run many times."""
    kinds = json.loads((ROOT / "benchmarks" / "prompts.json").read_text())
    tokenizer = Tokenizer(engine.loaded.folder.path)
    texts = [entry["text"] for entry in kinds]
    texts += [f"{text.split('.')[0]}." for text in texts] + ["Hi", "1 2 3 4 5 6 7", "a a a a a a", "Ünïcödé 漢字 🎈?"]
    ids = [tokenizer.apply_chat([{"role": "user", "content": text}]) for text in texts]
    chosen = sorted(ids, key=len)[:64]
    assert len(chosen) == 64
    return chosen


@pytest.fixture(scope="session")
def plain(engine: Engine, prompts: list[list[int]]) -> list[Output]:
    """Plain decoding of the same engine, one request at a time: what every drafter has to reproduce."""
    return engine.run(engine.node(), [engine.request(prompt) for prompt in prompts])


@pytest.fixture(autouse=True, scope="session")
def quick_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def load_engine() -> Any:
    return load

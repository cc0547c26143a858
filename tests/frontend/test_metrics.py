"""Labels stay bounded whatever clients send (C-47)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sdcp_mono.frontend.settings import FrontendSettings


def samples(server: Any) -> dict[tuple[str, ...], float]:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        tuple(sample.labels[name] for name in ("route", "model", "status")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == "sdcp_http_requests_total"
    }


def test_c_47_label_cardinality(serve: Callable[..., Any]) -> None:
    rng = random.Random(1)
    with serve(FrontendSettings()) as server:
        server.complete("x")
        samples(server)
        before = samples(server)
        names = [f"model-{rng.random()}" for _ in range(300)] + ['a"b', "a\nb", "x" * 10_000, "\x00", "byte-fixture\n"]
        for name in names:
            assert server.complete("x", model=name).status_code == 404
        for _ in range(100):
            assert server.http.get(f"/v1/{rng.random()}").status_code == 404
            assert server.http.get(f"/v1/models/{rng.random()}").status_code == 404
            word = str(rng.random())
            assert (
                server.http.post(
                    "/v1/completions",
                    json={"prompt": "x", "user": word, "stop": word},
                    headers={"x-request-id": word},
                ).status_code
                == 200
            )
        after = samples(server)
        assert set(after) - set(before) == {
            ("/v1/completions", "other", "404"),
            ("/v1/models/{model:path}", "other", "404"),
            ("other", "", "404"),
        }
        assert after["/v1/completions", "other", "404"] == len(names)
        assert after["/v1/completions", "byte-fixture", "200"] == 101
        assert len(server.http.get("/metrics").content) < 10_000


def test_statuses_are_counted(serve: Callable[..., Any]) -> None:
    with serve(FrontendSettings()) as server:
        server.complete("")
        server.chat("x", model="default")
        server.http.get("/v1/completions")
        server.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert samples(server) == {
            ("/v1/completions", "byte-fixture", "400"): 1,
            ("/v1/chat/completions", "byte-fixture", "200"): 1,
            ("/v1/completions", "", "405"): 1,
            ("/v1/completions", "", "400"): 1,
        }

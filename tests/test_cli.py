"""The command line, in processes of its own, on a tiny real checkpoint whose right answers are known by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORDS = "t10 t11 t3 t20 t21 t22 t23 t24"  # what follows t9 in chainA, up to EOS


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {"SDCP_DATA_DIR": str(tmp_path / "data"), "COLUMNS": "200", **environment}
        command = [sys.executable, "-m", "sdcp_mono", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**os.environ, **settings}
        )

    return call


@pytest.mark.parametrize("draft", ["none", "ngram", "quantized", "model"])
def test_generate_json_names_are_fixed(run: Any, chainA: Path, draft: str) -> None:
    draft = f"model:{chainA}" if draft == "model" else draft
    arguments = ("generate", "t5 t9", "--raw", "--model", str(chainA), "--draft", draft, "--json", "--show-rounds")
    done = run(*arguments, SDCP_M_FIXED="3")  # otherwise drafting has to pay on a model that takes no time
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"] == WORDS
    assert answer["token_ids"] == [10, 11, 3, 20, 21, 22, 23, 24, 2]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    assert set(answer["seconds"]) == {"load", "prefill", "decode"}
    figures = answer["metrics"]["speculative_decoding"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    rounds = answer["rounds"]
    assert [token for info in rounds for token in info["emitted"]] == answer["token_ids"]
    assert any(info["proposed"] for info in rounds) == draft.startswith(("quantized", "model"))


def test_show_rounds_lists_every_round(run: Any, chainA: Path) -> None:
    done = run("generate", "t5 t9", "--raw", "-m", str(chainA), "-d", f"model:{chainA}", "--show-rounds")
    assert WORDS in done.stdout
    assert "proposed and accepted" in done.stdout
    assert "9 tokens in" in done.stderr


def test_settings_come_from_the_environment(run: Any, chainA: Path) -> None:
    done = run("generate", "t5 t9", "--raw", "--json", SDCP_MODEL=str(chainA), SDCP_DRAFT="ngram,none")
    assert json.loads(done.stdout)["text"] == WORDS


def test_model_show_tells_the_identity(run: Any, chainA: Path) -> None:
    done = run("model", "show", str(chainA), "--json")
    facts = json.loads(done.stdout)
    assert (facts["vocab_size"], facts["context"], facts["eos_ids"]) == (64, 512, [2])
    assert len(bytes.fromhex(facts["target"])) == 32
    assert facts == json.loads(run("model", "pull", str(chainA), "--json").stdout)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("generate", "x", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("generate", "t5", "--raw", "--model", "CHAIN", "--draft", "telepathy"), "telepathy"),
        (("generate", "t5", "--raw", "--model", "CHAIN", "--temperature", "-1"), "temperature"),
        (("generate", "t5", "--raw", "--model", "CHAIN", "--max-tokens", "4096"), "512"),
        (("generate", "x", "--dtype", "float8"), "dtype"),
        (("serve", "--port", "70000"), "port"),
    ],
)
def test_bad_input_is_one_line_that_names_it(run: Any, chainA: Path, arguments: tuple[str, ...], names: str) -> None:
    done = run(*(str(chainA) if argument == "CHAIN" else argument for argument in arguments))
    assert done.returncode != 0
    assert names in done.stderr
    assert "Traceback" not in done.stderr


def test_a_drafter_with_another_tokenizer_is_refused_with_the_first_differing_id(
    run: Any, chainA: Path, tmp_path: Path
) -> None:
    """C-36 (a)."""
    other = tmp_path / "other"
    other.mkdir()
    for file in chainA.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"t41"', '"zebra"'))
    done = run("generate", "t5 t9", "--raw", "-m", str(chainA), "-d", f"model:{other}")
    assert done.returncode == 1
    assert "id 41" in done.stderr
    assert "zebra" in done.stderr


def test_help_teaches(run: Any) -> None:
    text = run("--help").stdout
    assert "sdcp-mono serve" in text
    for command in ("serve", "generate", "model"):
        assert command in text

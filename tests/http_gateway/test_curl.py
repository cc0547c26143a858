"""The commands of docs/interop.md, run as they stand there."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cbor2
import pytest

from sdcp_mono.core import cbor

DOCUMENT = Path(__file__).parents[2] / "docs" / "interop.md"


def _curl_speaks_h2() -> bool:
    curl = shutil.which("curl")
    return curl is not None and b"HTTP2" in subprocess.run([curl, "--version"], capture_output=True, check=True).stdout


@pytest.mark.skipif(not _curl_speaks_h2(), reason="there is no curl with HTTP/2 here")
def test_the_documents_commands_open_a_session_and_read_its_output(kit: Any, tmp_path: Path) -> None:
    commands = re.findall(r"^curl (?:.*\\\n)*.*$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(commands) == 3

    async def test(site: Any) -> None:
        async def run(command: str) -> Any:
            """As in the document, but with this gateway's port and certificate folder."""
            command = command.replace("https://127.0.0.1:8443", site.gateway.url).replace("$CERTS", str(kit.directory))
            shell = await asyncio.create_subprocess_shell(
                command.replace("curl ", "curl --silent --show-error --fail ", 1), cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, error = await shell.communicate()
            assert shell.returncode == 0, (command, error)
            return cbor2.loads(out)

        (tmp_path / "session-open.cbor").write_bytes(cbor.encode(kit.opening()))
        card = await run(commands[0])
        assert (card["target"], card["vocab_size"]) == (kit.CARD.target, kit.VOCAB)
        state = await run(commands[1])
        assert (state["session"], state["round"], state["committed"]) == (kit.SESSION, 0, 0)
        output = await run(commands[2])
        assert (output["from"], output["tokens"], output["final"]) == (0, [], False)

    kit.run(test)

"""A network namespace for each role, on one bridge, so that a role can be cut off while it goes on running."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

NETWORK = f"10.231.{os.getpid() % 250}"  # private; two benches at once should not meet


class Namespaces:
    """Use as a context manager; ``why_not`` says what this machine lacks for it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.number = {name: i + 10 for i, name in enumerate(names)}
        self.tag = f"sk{os.getpid()}"  # interface names have 15 characters at most

    def host(self, name: str) -> str:
        return f"{NETWORK}.{self.number[name]}"

    def command(self, name: str) -> tuple[str, ...]:
        """What starts a process in there; it stays the same process."""
        return ("ip", "netns", "exec", self._space(name))

    def cut(self, name: str) -> None:
        """From here on nobody reaches it, nor it anybody; connections stay open on both sides."""
        _ip("link", "set", self._link(name), "down")

    def heal(self, name: str) -> None:
        _ip("link", "set", self._link(name), "up")

    def __enter__(self) -> Namespaces:
        try:
            _ip("link", "add", self.tag, "type", "bridge")
            _ip("address", "add", f"{NETWORK}.1/24", "dev", self.tag)
            _ip("link", "set", self.tag, "up")
            for name in self.number:
                space = self._space(name)
                _ip("netns", "add", space)
                _ip("link", "add", self._link(name), "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", self._link(name), "master", self.tag, "up")
                _ip("-n", space, "address", "add", f"{self.host(name)}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    _ip("-n", space, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.number:
            subprocess.run(["ip", "link", "del", self._link(name)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.tag], capture_output=True)

    def _space(self, name: str) -> str:
        return f"{self.tag}-{self.number[name]}"

    def _link(self, name: str) -> str:
        return f"{self.tag}v{self.number[name]}"


def why_not() -> str:
    """Empty if namespaces can be made and one reaches another's neighbour; else the reason."""
    try:
        with Namespaces(("probe",)) as made:
            answer = subprocess.run(
                [*made.command("probe"), "ip", "route", "get", f"{NETWORK}.1"], capture_output=True, text=True
            )
        return "" if answer.returncode == 0 else answer.stderr.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"no network namespaces here: {told}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

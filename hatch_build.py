"""Build hook: compiles ``sdcp_mono/kernels/csrc/*.c`` into one shared library, for wheels and editable installs.

Any C11 compiler will do (``$CC``, cc, gcc or clang). Without one the install still works and the torch fallback is
used. ``python hatch_build.py`` compiles in place.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = Path("sdcp_mono/kernels/_sdcp_kernels.so")
# Results must not hang on a compiler's choice: no contraction of a * b + c, no reordering. Kernels name their FMAs.
FLAGS = [
    "-O3",
    "-std=c11",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-w",
    "-shared",
]
SECONDS = 300  # compiling takes about 3 s; a compiler that hangs must not hang the install


def compiler() -> list[str] | None:
    """The C compiler's command, or None."""
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"]) or None
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def compile_kernels(root: Path) -> str | None:
    """Compile into ``root / LIBRARY``. Returns what went wrong, or None.

    A compiler that doesn't know the newest instruction sets gets a second try with the portable kernels only. The
    library is replaced in one step: a running process keeps the one it has.
    """
    command = compiler()
    if command is None:
        return "no C compiler found"
    sources = sorted(str(path) for path in (root / "sdcp_mono/kernels/csrc").glob("*.c"))
    problem = "no sources found"
    with tempfile.TemporaryDirectory(dir=root / LIBRARY.parent) as folder:
        built = Path(folder) / LIBRARY.name
        for extra in ([], ["-DSDCP_GENERIC"]) if sources else ():
            try:
                subprocess.run(
                    [*command, *FLAGS, *extra, *sources, "-o", str(built), "-lm"],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                )
            except (OSError, subprocess.SubprocessError) as error:
                problem = f"{error}\n{getattr(error, 'stderr', None) or ''}"
            else:
                os.replace(built, root / LIBRARY)
                return None
    return problem


class KernelBuildHook(BuildHookInterface[Any]):
    """Adds the library to the wheel and makes the wheel platform-specific."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build."""
        if self.target_name != "wheel":
            return
        problem = compile_kernels(Path(self.root))
        if problem is not None:
            self.app.display_warning(f"sdcp-mono: kernels not compiled, torch will be used instead: {problem}")
            return
        build_data["artifacts"].append(f"/{LIBRARY.as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(compile_kernels(Path(__file__).parent))

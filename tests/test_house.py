"""The rules of the house that a machine can check: imports, sizes, names, pins, and what CI may skip."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = ("sdcp_mono", "tests", "benchmarks", "examples", "docs", "deploy", "proto", "fuzz", ".ci")
MAX_LINES = 500
MEANINGLESS = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}
# Somebody's own machine, files beside the repository, and work that was left for later.
UNWANTED = re.compile(r"/(work|home|root|Users)/|\.\./shared\b|\b(TODO|FIXME)\b")
TEXT = {".py", ".pyi", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".html", ".js", ".css", ".c", ".cpp", ".h",
        ".proto", ".cddl", ".sh", ".ini", ""}  # fmt: skip


def files() -> Iterator[Path]:
    """What is ours and text, tracked or not; nothing that a tool made."""
    tops = [path for path in ROOT.iterdir() if path.is_file()]
    inner = [path for folder in OURS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in tops + inner:
        parts = path.relative_to(ROOT).parts
        made = any(part.startswith((".", "__pycache__")) and part != ".ci" for part in parts[:-1])
        if not made and path.suffix in TEXT and path.name != ".git":
            yield path


def modules() -> list[Path]:
    return [path for path in files() if path.suffix == ".py" and "_pb2" not in path.name]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_imports_point_one_way() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("core/__init__.py", "import time", "sdcp_mono.core is not allowed to import time"),
        ("core/__init__.py", "import torch", "sdcp_mono.core is not allowed to import torch"),
        ("core/__init__.py", "import sdcp_mono.cache", "sdcp_mono.core is not allowed to import sdcp_mono.cache"),
        ("cache/__init__.py", "import torch", "sdcp_mono.cache is not allowed to import torch"),
        ("cache/__init__.py", "import sdcp_mono.roles", "sdcp_mono.cache is not allowed to import sdcp_mono.roles"),
        ("roles/__init__.py", "import prometheus_client", "sdcp_mono.roles is not allowed to import prometheus_client"),
        ("runners/__init__.py", "import sdcp_mono.drafters", "runners is not allowed to import sdcp_mono.drafters"),
        ("newcomer/__init__.py", "", "newcomer"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, module: str, line: str, complaint: str) -> None:
    shutil.copy(ROOT / ".importlinter", tmp_path)
    shutil.copytree(ROOT / "sdcp_mono", tmp_path / "sdcp_mono", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    breached = tmp_path / "sdcp_mono" / module
    breached.parent.mkdir(exist_ok=True)
    with breached.open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert complaint in result.stdout


def test_modules_are_short() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_names_say_something() -> None:
    names = [path.relative_to(ROOT) for path in modules()]
    assert [name.as_posix() for name in names if MEANINGLESS & {*name.parts[:-1], name.stem}] == []


def test_text_holds_nothing_private_or_unfinished() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if UNWANTED.search(line)
    ]
    assert found == []


def test_everything_that_is_installed_is_pinned() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert pins[0] == "torch==2.13.0"  # installed first; no local version, so it holds on every platform
    versions = {canonicalize_name(name): version for name, version in (pin.split("==") for pin in pins)}
    assert len(versions) == len(pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, [*wanted, *project["build-system"]["requires"]]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_ci_names_tests_that_were_skipped_for_no_listed_reason(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="ran"/>'
        '<testcase classname="tests.a" name="gpu"><skipped type="pytest.skip" message="needs CUDA"/></testcase>'
        '<testcase classname="tests.a" name="lazy"><skipped type="pytest.skip" message="no time"/></testcase>'
        '<testcase classname="tests.a" name="known"><skipped type="pytest.xfail" message="bug"/></testcase>'
        "</testsuite></testsuites>"
    )
    unexpected = runpy.run_path(str(ROOT / ".ci" / "skips.py"))["unexpected"]
    assert unexpected(report, ROOT / ".ci" / "allowed-skips.txt") == ["tests.a.lazy: no time"]

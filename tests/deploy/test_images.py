"""The images, as far as their files tell: pinned, small, nobody's root, and what the chart expects of them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
FILES = ("Dockerfile", "Dockerfile.cuda")
Instruction = tuple[str, str]
Manifest = dict[str, Any]


@pytest.fixture(params=FILES)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / request.param


@pytest.fixture
def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


@pytest.fixture
def stages(instructions: list[Instruction]) -> list[list[Instruction]]:
    found: list[list[Instruction]] = []
    for instruction in instructions:
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def last(stage: list[Instruction], name: str) -> str:
    return [rest for instruction, rest in stage if instruction == name][-1]


def test_bases_are_pinned(instructions: list[Instruction]) -> None:
    arguments = dict(rest.split("=", 1) for name, rest in instructions if name == "ARG")
    for name, rest in instructions:
        if name == "FROM":
            base = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], rest.split()[0])
            assert re.fullmatch(r"[a-z./-]+:\d+\.\d+\.\d+-[a-z0-9-]+", base), base


def test_the_last_stage_has_no_compiler(stages: list[list[Instruction]]) -> None:
    build, run = stages
    assert any("gcc" in rest for _, rest in build)
    assert not any("apt-get" in rest or "pip" in rest for _, rest in run)
    assert [rest for name, rest in run if name == "COPY"] == ["--from=build /opt/sdcp /opt/sdcp"]


def test_torch_comes_first_and_everything_is_constrained(stages: list[list[Instruction]], path: Path) -> None:
    build = stages[0]
    installs = [rest for name, rest in build if name == "RUN" and "pip install" in rest]
    assert [bool(re.search(r"pip install (--extra-index-url \S+ )?torch ", rest)) for rest in installs] == [True, False]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in last(build, "ENV")
    assert ("download.pytorch.org/whl/cpu" in installs[0]) == (path.name == "Dockerfile")
    extras = re.search(r"\.\[([a-z,]+)\]", installs[1])
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras[1].split(",")) <= known.keys()


def test_c_48_it_is_not_root(stages: list[list[Instruction]], render: Callable[..., tuple[Manifest, ...]]) -> None:
    run = stages[-1]
    user, _, group = last(run, "USER").partition(":")
    assert int(user) >= 10000  # below are the users of nodes
    names = [name for name, _ in run]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    pod = next(m for m in render({}) if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (int(user), int(group))


def test_c_48_it_writes_below_data(
    stages: list[list[Instruction]], render: Callable[..., tuple[Manifest, ...]]
) -> None:
    """The image's folders are those that the chart sets."""
    told = dict(part.split("=", 1) for part in shlex.split(last(stages[-1], "ENV")))
    pod = next(m for m in render({}) if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    chart = {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}
    for name, value in told.items():
        if value.startswith("/data"):
            assert chart[name] == value
    assert {name for name, value in chart.items() if (value or "").startswith("/data")} <= told.keys()
    assert last(stages[-1], "WORKDIR") == pod["containers"][0]["workingDir"] == "/data"


def test_it_starts_the_command(stages: list[list[Instruction]]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (program,) = json.loads(last(stages[-1], "ENTRYPOINT"))  # a list, so that signals reach the process
    assert program in scripts
    assert json.loads(last(stages[-1], "CMD")) == ["serve"]
    assert last(stages[-1], "HEALTHCHECK") == "NONE"
    assert set(last(stages[-1], "EXPOSE").split()) == {"8000", "9090", "9443"}


def test_what_is_copied_is_let_through(stages: list[list[Instruction]], path: Path) -> None:
    """All that a wheel is made of, and nothing else of a checkout."""
    sources = [word for name, rest in stages[0] if name == "COPY" for word in rest.split()[:-1]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"sdcp_mono", "pyproject.toml", "hatch_build.py", project["readme"], *project["license-files"]} <= {
        source.removeprefix("./") for source in sources
    }
    assert all((ROOT / source).exists() for source in sources)
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(sources)
    assert "*" in ignored

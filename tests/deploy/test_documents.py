"""The chart's table and schema are those that deploy/helm/generate.py makes, and pages name what exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcp_mono.cache.inspecting import LOG

ROOT = Path(__file__).parents[2]
RENEW = "run: python deploy/helm/generate.py"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "deploy" / "helm" / "generate.py"))


def test_the_table_is_up_to_date(generate: dict[str, Any], chart_files: dict[str, str]) -> None:
    assert generate["readme"](chart_files["README.md"], chart_files["values.yaml"]) == chart_files["README.md"], RENEW


def test_the_schema_is_up_to_date(generate: dict[str, Any], chart_files: dict[str, str]) -> None:
    values = yaml.safe_load(chart_files["values.yaml"])
    assert generate["schema"](values) == chart_files["values.schema.json"], RENEW


def test_a_value_without_a_comment_is_noticed(generate: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"verifier\.replicas"):
        generate["table"]("verifier:\n  replicas: 1\n")


def test_the_chart_has_the_version_of_the_package(chart_files: dict[str, str]) -> None:
    from sdcp_mono import __version__

    assert yaml.safe_load(chart_files["Chart.yaml"])["appVersion"] == __version__


def test_the_page_names_settings_and_values_that_exist(generate: dict[str, Any], chart_files: dict[str, str]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text() + chart_files["README.md"].partition("## Values")[0]
    paths = set(re.findall(r"^\| `([\w.]+)` \|", generate["table"](chart_files["values.yaml"]), re.MULTILINE))
    sections = {path.rpartition(".")[0] for path in paths} | {path.partition(".")[0] for path in paths}
    settings = {field for kind in generate["ROLES"].values() for field in kind.model_fields}
    quoted = {word.partition(":")[0].partition("=")[0] for word in re.findall(r"`([^`\s]+)[^`\n]*`", text)}
    named = {word for word in quoted if re.fullmatch(r"[a-z][\w.]*", word) and re.search(r"[._]", word)}
    files = {word for word in named if word.endswith((".md", ".yaml", ".json", ".py", ".crt", ".key")) or "/" in word}
    foreign = {"pg_dump", LOG}
    assert named - files - foreign - paths - sections - settings == set()

"""Every expression of the dashboard and the alerts parses, and names metrics and labels that /metrics has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dora.observe.snapshot import Snapshot
from dora.status import metrics
from dora.trainer.metrics import METRICS

FOLDER = Path(__file__).parents[2] / "launch" / "monitoring"
#: Of Prometheus itself: labels of every target, and whether it answers.
TARGET_LABELS = {"instance", "job", "exported_instance"}
TARGET_METRICS = {"up": TARGET_LABELS}


def of_dashboard() -> Iterator[str]:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (annotation["expr"] for annotation in board["annotations"]["list"])


def of_alerts() -> Iterator[str]:
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


EXPRESSIONS = [*of_dashboard(), *of_alerts()]


@pytest.fixture(scope="module")
def shown(calling: Snapshot) -> dict[str, set[str]]:
    """The labels of every metric, by its name."""
    labels: dict[str, set[str]] = dict(TARGET_METRICS)
    whole = replace(calling, by_design={"C1": "2 answers"}, trainer_metrics=dict.fromkeys(METRICS, 0.5))
    for family in text_string_to_metric_families(metrics.render(whole)):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def selectors(node: Any) -> Iterator[Any]:
    """The selectors within an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    else:
        children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr")]
        for child in [*children, *getattr(node, "args", ())]:
            if child is not None:
                yield from selectors(child)


def named(expression: str) -> list[str]:
    return [selector.name for selector in selectors(promql_parser.parse(expression))]


def test_all_expressions_are_found() -> None:
    assert len([*of_alerts()]) == 6
    assert len([*of_dashboard()]) > 30


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_parses_and_names_what_is_there(expression: str, shown: dict[str, set[str]]) -> None:
    found = [*selectors(promql_parser.parse(expression))]
    assert len(found) == len(re.findall(r"\b(?:dora_\w+|up)\b(?!\")", expression)) > 0
    for selector in found:
        assert selector.name in shown
        assert {matcher.name for matcher in selector.matchers.matchers} <= shown[selector.name] | TARGET_LABELS
    labels = set().union(*(shown[selector.name] for selector in found), TARGET_LABELS)
    grouped = re.findall(r"\b(?:by|on|ignoring|without) \(([^)]*)\)", expression)
    assert {label.strip() for part in grouped for label in part.split(",")} <= labels


def test_a_metric_that_is_not_there_would_be_noticed(shown: dict[str, set[str]]) -> None:
    assert [name for name in named("rate(dora_gone_total[5m]) > on (instance) dora_steps") if name not in shown] == [
        "dora_gone_total"
    ]
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("sum by (dora_steps")


def test_a_legend_names_labels_that_are_there(shown: dict[str, set[str]]) -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in shown[named(target["expr"])[0]] | TARGET_LABELS, panel["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml"), ("check", "config", "prometheus.yml")],
)
def test_promtool_accepts_the_files(command: tuple[str, ...]) -> None:
    found = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr

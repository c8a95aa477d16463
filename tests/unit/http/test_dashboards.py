"""Tests that the shipped dashboard and alerts use existing metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polywire.cluster.nodes import NodeState
from polywire.link_orders import LINK_STATES
from polywire.server.standby import METRICS
from polywire.types import PositionKind
from tests.unit.http.site import Site, bucket_view, table_report
from tests.unit.http.test_metrics import fill, reported

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\bpolywire_[a-z_]+")
RULES = (DEPLOY / "prometheus" / "polywire.rules.yaml").read_text("utf-8")
DASHBOARD = json.loads((DEPLOY / "grafana" / "polywire.json").read_text("utf-8"))
RULE_EXPRESSIONS = re.findall(r"^ +expr: (.+)$", RULES, re.MULTILINE)
PANEL_EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def names(site: Site) -> set[str]:
    site.process.view = bucket_view()
    site.process.table_reports["orders"] = table_report("orders")
    fill(site, "orders", 5)
    site.broker.commit_position("orders", 0, PositionKind.GROUP, "billing", 2)
    site.broker.shares.configure("senders", site.broker.topic("orders"), {}, done=lambda _: None)
    standing_by = {family.name for family in text_string_to_metric_families(METRICS % 1)}
    return {name for name, *_ in reported(site)} | standing_by


@pytest.mark.parametrize("expression", [*RULE_EXPRESSIONS, *PANEL_EXPRESSIONS])
def test_expressions_use_existing_metrics(site: Site, expression: str) -> None:
    asked = set(NAME.findall(expression))
    assert asked or expression.startswith("up{")
    assert asked <= names(site)
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_expressions_use_existing_states_of_brokers() -> None:
    expressions = " ".join([*RULE_EXPRESSIONS, *PANEL_EXPRESSIONS])
    states = set(re.findall(r'\bstate="([^"]+)"', expressions))
    assert states
    assert states <= {state.value for state in NodeState} | set(LINK_STATES)


def test_every_rule_and_panel_is_checked() -> None:
    assert len(RULE_EXPRESSIONS) == RULES.count("- alert:") > 0
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["targets"] for panel in DASHBOARD["panels"])


def test_the_reference_page_lists_every_metric(site: Site) -> None:
    page = (DEPLOY.parent / "docs" / "reference" / "metrics.md").read_text("utf-8")
    suffixes = ("_bucket", "_count", "_sum", "_created")
    missing = {
        name for name in names(site) if not name.endswith(suffixes) and name.removeprefix("polywire_") not in page
    }
    assert missing == set()

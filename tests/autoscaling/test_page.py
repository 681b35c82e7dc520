"""The page for people, and the dashboard that shows it."""

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from test_wiring import FAST, ask, handler_of, identifier, publishers_of, slow, wait_for

from beam_llm import progress
from beam_llm.autoscaling import AutoscalingMetricConfig, NumLoadedModelsPublisher
from beam_llm.autoscaling import page as page_module
from beam_llm.autoscaling.page import CapacityCollector, open_page
from beam_llm.autoscaling.publisher import published

__all__ = ["identifier", "slow"]  # fixtures

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana-dashboard.json"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def read(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and by the labels' values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_the_page_has_the_published_value_its_inputs_and_the_figures_of_batches_and_cache(
    slow: dict[str, str], identifier: str
) -> None:
    port = free_port()
    handler = handler_of(slow, identifier)
    handler._autoscaling = msgspec.structs.replace(FAST, page_port=port)
    before = progress.totals()
    model = handler.load_model()
    for _ in range(60):
        ask(handler, model)
        if publishers_of(identifier) and publishers_of(identifier)[0].latest is not None:
            break
    (publisher,) = publishers_of(identifier)
    wait_for(lambda: publisher.signal.latest is not None)
    found = read(port)
    tag = (identifier,)
    assert found["beam_llm_num_loaded_models"][tag] >= 1
    assert found["beam_llm_capacity_estimate"][tag] > 0
    assert found["beam_llm_capacity_polls_total"][("value", identifier)] >= 1
    assert found["beam_llm_server_completed_total"][tag] > 0
    assert found["beam_llm_server_prefix_cache_queries_total"][tag] > 0
    asked = progress.totals() - before
    assert asked["batches"] * 64 == asked["read"] == asked["answered"]
    assert found["beam_llm_batches_total"][()] == progress.totals()["batches"]
    assert found["beam_llm_rows_answered_total"][()] == progress.totals()["answered"]
    assert found["beam_llm_cached_tokens_total"][()] == progress.totals()["cached_tokens"]
    publisher.stop()
    with pytest.raises(OSError, match="refused"):
        read(port)  # it went with the last that wanted it
    del handler, model


def test_one_page_for_all_of_a_process_and_none_for_a_second_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = AutoscalingMetricConfig(page_port=free_port())
    one, two = open_page(config), open_page(config)
    assert one is not None
    assert two is not None
    one()
    assert "beam_llm_batches_total" in read(config.page_port)
    two()
    assert page_module._pages == {}
    assert open_page(AutoscalingMetricConfig()) is None
    with socket.create_server(("127.0.0.1", config.page_port)):  # as another process would
        assert open_page(config) is None
    assert f"no Prometheus page on 127.0.0.1 port {config.page_port}" in caplog.text


def test_it_listens_where_it_is_told_and_on_loopback_else() -> None:
    config = AutoscalingMetricConfig(page_port=free_port())
    let_go = open_page(config)
    server = page_module._pages["127.0.0.1", config.page_port]._server
    assert server.server_address[0] == "127.0.0.1"
    let_go()


def names() -> set[str]:
    """All that the page can show."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CapacityCollector())
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }


def queries(panel: Any) -> list[str]:
    if isinstance(panel, dict):
        own = [panel["expr"]] if "expr" in panel else []
        return own + [q for value in panel.values() for q in queries(value)]
    return [q for value in panel for q in queries(value)] if isinstance(panel, list) else []


def test_the_dashboard_shows_every_metric_of_the_page_and_nothing_else() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    shown = {name for q in queries(dashboard) for name in re.findall(r"beam_llm_\w+", q)}
    assert shown == names()
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for query in queries(dashboard):
        assert query.count("(") == query.count(")"), query
        assert set(re.findall(r"\$(\w+)", query)) <= variables | {"__rate_interval"}, query
    places = [
        (p["gridPos"]["x"], p["gridPos"]["y"], p["gridPos"]["w"], p["gridPos"]["h"])
        for p in dashboard["panels"]
    ]
    taken = [
        (column, row)
        for x, y, w, h in places
        for column in range(x, x + w)
        for row in range(y, y + h)
    ]
    assert len(taken) == len(set(taken)), "panels lie on one another"
    assert max(column for column, _ in taken) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_documentation_lists_every_metric_of_the_page() -> None:
    text = (DOCS / "autoscaling.md").read_text()
    assert set(re.findall(r"^\| `(beam_llm_\w+)`", text, re.MULTILINE)) == names()


def test_a_publisher_without_a_sampled_server_is_shown_too() -> None:
    publisher = NumLoadedModelsPublisher(lambda: 7, "plain-signal", interval_secs=1000).start()
    wait_for(lambda: published("plain-signal"))
    port = free_port()
    let_go = open_page(AutoscalingMetricConfig(page_port=port))
    found = read(port)
    let_go()
    publisher.stop()
    assert found["beam_llm_num_loaded_models"][("plain-signal",)] == 7
    assert ("plain-signal",) not in found.get("beam_llm_server_running", {})

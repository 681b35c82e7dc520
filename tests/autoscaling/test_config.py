"""The knobs: checked when given, and what follows from them."""

import logging
import pickle
from typing import Any

import pytest

from beam_llm.autoscaling import AutoscalingMetricConfig, CompletionRateCapacityEstimator
from beam_llm.config import Autoscaling, CompletionsConfig
from beam_llm.validation import check


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"target_drain_secs": 0}, r"target_drain_secs: 0: Expected `float` > 0"),
        ({"aggregation": "p0"}, "aggregation: 'p0': Expected `str` matching regex"),
        ({"aggregation": "p101"}, "aggregation: 'p101'"),
        ({"aggregation": "median"}, "aggregation: 'median'"),
        ({"interval_secs": "5"}, "interval_secs: '5': Expected `float`, got `str`"),
        ({"window_secs": 3}, "window_secs: 3 is less than 4 times interval_secs, 5"),
        ({"estimator": "magic"}, "estimator: 'magic': Invalid enum value 'magic'"),
        ({"estimator": 5}, "estimator: 5 is neither a name nor a function"),
        (
            {"estimator": "completion_rate", "full_concurrency": 4},
            "full_concurrency: has no effect with estimator: completion_rate",
        ),
        ({"page_host": "10.0.0.5"}, "page_host: has no effect without page_port"),
        ({"page_port": 70_000}, "page_port: 70000: Expected `int` <= 65535"),
        ({"metric_tag": ""}, "metric_tag: '': Expected `str` of length >= 1"),
    ],
)
def test_a_knob_that_cannot_be_used_is_an_error_when_given(
    knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AutoscalingMetricConfig(**knobs)


def test_the_section_and_the_python_class_have_the_same_knobs() -> None:
    section = Autoscaling(target_drain_secs=60, aggregation="p90", metric_tag="t")
    config = AutoscalingMetricConfig.of(section)
    assert config == AutoscalingMetricConfig(
        target_drain_secs=60, aggregation="p90", metric_tag="t"
    )
    knobs = [set(c.__struct_fields__) for c in (AutoscalingMetricConfig, Autoscaling)]
    assert knobs[0] == knobs[1]


def problems(**config: Any) -> list[str]:
    found, _ = check(CompletionsConfig, {"model": "m", "prompt": "{t}", **config})
    return [str(problem) for problem in found]


def test_the_section_is_checked_with_the_rest_of_a_configuration() -> None:
    assert problems(autoscaling={}) == []
    assert problems(autoscaling={"window_secs": 8, "interval_secs": 4}) == [
        "autoscaling.window_secs: 8 is less than 4 times interval_secs, 4"
    ]
    assert problems(autoscaling={"aggregation": "p0"}) == [
        'autoscaling.aggregation: "p0" is not last, lifetime_max, max, mean or a percentile such'
        " as p90"
    ]


def test_an_identifier_is_what_beams_annotations_can_hold() -> None:
    assert problems(model_identifier="ticket é") == [
        'model_identifier: "ticket é" is not printable ASCII text, and not empty'
    ]
    assert problems(model_identifier="") != []
    assert problems(model_identifier="tickets 1/a~b") == []


def test_a_metrics_endpoint_goes_with_an_endpoint() -> None:
    here = "http://127.0.0.1:8000"
    assert problems(server={"metrics_endpoint": f"{here}/metrics"}) == [
        "server.metrics_endpoint: needs server.endpoint"
    ]
    assert problems(server={"endpoint": here}) == []
    assert problems(server={"endpoint": here}, autoscaling={"enabled": False}) == []
    assert problems(server={"endpoint": here}, autoscaling={"aggregation": "max"}) == [
        "autoscaling: has no effect with server.endpoint unless server.metrics_endpoint names its"
        " metrics page"
    ]
    both = {"endpoint": here, "metrics_endpoint": f"{here}/metrics"}
    assert problems(server=both, autoscaling={"aggregation": "max"}) == []
    assert problems(server={**both, "metrics_endpoint": "here"}) == [
        'server.metrics_endpoint: "here" is not an address such as http://127.0.0.1:8000/v1'
    ]


def test_the_tag_is_the_explicit_one_else_the_identifier_else_the_models_name() -> None:
    config = AutoscalingMetricConfig()
    assert AutoscalingMetricConfig(metric_tag="a b").resolve_tag("id", "m") == "a b"
    assert config.resolve_tag("beam-llm-0/é", "m") == "beam-llm-0/é"
    assert config.resolve_tag(None, "org/SmolLM2-135M.Instruct") == "org_SmolLM2_135M_Instruct"


def test_two_models_with_one_tag_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = AutoscalingMetricConfig()
    assert config.resolve_tag(None, "collide/a.b") == config.resolve_tag(None, "collide/a.b")
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert config.resolve_tag(None, "collide/a-b") == "collide_a_b"
    (record,) = caplog.records
    assert "'collide/a.b' and 'collide/a-b' both have the tag 'collide_a_b'" in record.message


def make_mine() -> CompletionRateCapacityEstimator:
    return CompletionRateCapacityEstimator(7, min_completions=3)


def test_an_estimator_is_chosen_by_name_or_given() -> None:
    named = AutoscalingMetricConfig(estimator="completion_rate").make_estimator()
    assert type(named) is CompletionRateCapacityEstimator
    mine = AutoscalingMetricConfig(estimator=make_mine)
    for copy in (mine, pickle.loads(pickle.dumps(mine))):
        assert copy.make_estimator()._multiplier == 7
        assert copy.make_estimator() is not copy.make_estimator()

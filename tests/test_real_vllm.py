"""The row transforms on the real vLLM with a real model: what a stand-in cannot vouch for."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_pipeline
from apache_beam.testing.util import assert_that, equal_to

import beam_llm
from beam_llm.pipelines import PipelineFile
from beam_llm.validation import server_spec
from beam_llm.vllm.server import VLLMServer

ROOT = Path(__file__).parent.parent
RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(real_model: str) -> Iterator[VLLMServer]:
    """Holds the server of the quickstart, for this module."""
    variables = {"model": real_model, "input": "i", "output": "o"}
    ((_, config),) = PipelineFile(ROOT / "yaml_examples/quickstart.yaml", variables).llm_configs()
    with VLLMServer.acquire(server_spec(config)) as held:
        held.wait_ready()
        yield held


@pytest.fixture
def settings(server: VLLMServer) -> dict[str, Any]:
    """Knobs that lead a transform to that server."""
    spec = server.spec
    return {"model": spec.model, "server": {"args": list(spec.args), "env": dict(spec.env)}}


def pipeline() -> beam.Pipeline:
    return test_pipeline.TestPipeline(runner=RUNNER, options=PipelineOptions())


def test_the_quickstart_labels_real_text(
    server: VLLMServer, real_model: str, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    command = [sys.executable, "-m", "beam_llm"]
    subprocess.run([*command, "demo-data", str(questions), "--packages=20"], check=True)
    done = subprocess.run(
        [
            *command,
            "run",
            "yaml_examples/quickstart.yaml",
            f"--var=model={real_model}",
            f"--var=input={questions}",
            f"--var=output={tmp_path}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "60: 60 answered, 0 failed" in said
    (labels,) = tmp_path.glob("labels.json*")
    asked = {
        (row["package"], row["question"]): json.loads(row["choices"])
        for row in map(json.loads, questions.read_text().splitlines())
    }
    answered = {
        (row["package"], row["question"]): row
        for row in map(json.loads, labels.read_text().splitlines())
    }
    assert answered.keys() == asked.keys()
    assert all(row["label"] in asked[key] for key, row in answered.items())
    # Each guide fills a KV block, which all but the first rows of a guide find in the cache.
    assert sum(row["cached_tokens"] == 128 for row in answered.values()) > 40


def test_a_language_model_fills_a_json_schema(server: VLLMServer, real_model: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "beam_llm",
            "run",
            "yaml_examples/json_fields.yaml",
            f"--var=model={real_model}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_the_server_refuses_fails_that_row_with_its_words(settings: dict[str, Any]) -> None:
    texts = ["Say yes.", "x y " * 250_000, "🙂 and é", " "]
    with pipeline() as p:
        out = (
            p
            | beam.Create([beam.Row(id=i, text=text) for i, text in enumerate(texts)])
            | beam_llm.VLLMCompletions(
                **settings,
                prompt="{text}",
                sampling={"max_tokens": 2, "temperature": 0},
                error_handling={"output": "failures"},
            )
        )
        assert_that(out["output"] | beam.Map(lambda row: row.id), equal_to([0, 2, 3]))
        assert_that(
            out["failures"]
            | "Why"
            >> beam.Map(
                lambda row: (row.element.id, "maximum context length is 2048 tokens" in row.msg)
            ),
            equal_to([(1, True)]),
            label="failures",
        )


def test_sampling_reaches_the_server(settings: dict[str, Any]) -> None:
    rows = [
        beam.Row(id=0, regex="[0-9]{3}", n=8, stop=None),
        beam.Row(id=1, regex=None, n=3, stop=None),
        beam.Row(id=2, regex="aaaSTOPbbb", n=12, stop=["STOP"]),
    ]
    with pipeline() as p:
        out = (
            p
            | beam.Create(rows)
            | beam_llm.VLLMChat(
                **settings,
                messages=[{"role": "user", "content": "Write number {id}."}],
                sampling={"temperature": 0, "seed": 1},
                per_row={"regex": "regex", "max_tokens": "n", "stop": "stop"},
            )
        )

        def check(found: list[Any]) -> None:
            by_id = {row.id: row for row in found}
            assert len(by_id[0].reply) == 3
            assert by_id[0].reply.isdigit()
            assert by_id[1].usage.completion_tokens <= 3
            assert by_id[1].finish_reason in ("length", "stop")
            assert by_id[2].reply == "aaa"
            assert by_id[2].finish_reason == "stop"

        assert_that(out, check)


def test_the_handler_gives_answers_with_openais_names(settings: dict[str, Any]) -> None:
    handler = beam_llm.VLLMChatModelHandler(
        settings["model"], server_args=settings["server"]["args"], env=settings["server"]["env"]
    )
    with pipeline() as p:
        out = (
            p
            | beam.Create([[beam_llm.OpenAIChatMessage("user", "Say yes.")]])
            | beam_llm.RunInference(handler, inference_args={"max_tokens": 4})
            | beam.Map(
                lambda r: (
                    r.inference.choices[0].message.role,
                    r.inference.usage.completion_tokens <= 4,
                )
            )
        )
        assert_that(out, equal_to([("assistant", True)]))


def test_three_kills_lose_and_repeat_nothing(settings: dict[str, Any], server: VLLMServer) -> None:
    rows = [beam.Row(id=i, text=f"Number {i} is") for i in range(48)]
    killer = threading.Thread(target=_kill_three_times, args=(server,), daemon=True)
    p = pipeline()
    out = (
        p
        | beam.Create(rows)
        | beam_llm.VLLMCompletions(
            **settings,
            prompt="{text}",
            sampling={"max_tokens": 40, "temperature": 0, "extra_body": '{"ignore_eos": true}'},
            requests={"max_in_flight": 4, "max_retries": 0},
            error_handling={"output": "failures"},
        )
    )
    assert_that(out["output"] | beam.Map(lambda row: row.id), equal_to(list(range(48))))
    assert_that(out["failures"], equal_to([]), label="failures")
    began = server.wait_ready().generation
    killer.start()
    result = p.run()
    killer.join(timeout=300)
    assert not killer.is_alive()
    assert server.wait_ready().generation == began + 3
    (requests,) = [
        counter.result
        for counter in result.metrics().query(MetricsFilter().with_name("requests"))["counters"]
    ]
    # Only what was under way at a kill was sent again.
    assert 48 < requests <= 48 + 3 * 4


def _kill_three_times(server: VLLMServer) -> None:
    """Kills vLLM's API process as soon as it has work, and after each restart again."""
    for _ in range(3):
        endpoint = server.wait_ready()
        while _running(endpoint.url) == 0:
            threading.Event().wait(0.05)
        (api,) = [
            process
            for process in psutil.process_iter(["cmdline"])
            if f"--port={endpoint.url.rpartition(':')[2]}" in (process.info["cmdline"] or [])
        ]
        os.kill(api.pid, signal.SIGKILL)
        server.wait_ready(after_failure_of=endpoint)


def _running(url: str) -> float:
    import urllib.request

    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("vllm:num_requests_running"):
                return float(line.rpartition(" ")[2])
    return 0

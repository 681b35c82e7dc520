"""The model handlers, in Beam's RunInference and in ours, against a stand-in vLLM."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.ml.inference.base import RunInference as BeamRunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_pipeline
from apache_beam.testing.util import assert_that, equal_to

import beam_llm
from beam_llm import (
    OpenAIChatMessage,
    PrefixBatchingConfig,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
)
from beam_llm.vllm.client import RequestError

RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


def pipeline() -> beam.Pipeline:
    return test_pipeline.TestPipeline(runner=RUNNER, options=PipelineOptions())


def text(result: Any) -> tuple[Any, str]:
    return result.example, result.inference.choices[0].text


@pytest.mark.parametrize("run_inference", [BeamRunInference, beam_llm.RunInference])
def test_completions(standin_env: dict[str, str], run_inference: Any) -> None:
    handler = VLLMCompletionsModelHandler("m", {"max_model_len": 64}, env=standin_env)
    with pipeline() as p:
        out = (
            p
            | beam.Create(["a", "b", "c"])
            | run_inference(handler, inference_args={"max_tokens": 5})
            | beam.Map(text)
        )
        assert_that(out, equal_to([("a", "a"), ("b", "b"), ("c", "c")]))


def test_chat_with_dicts_and_beams_messages(standin_env: dict[str, str]) -> None:
    handler = VLLMChatModelHandler("m", env=standin_env)
    chats = [[{"role": "user", "content": "one"}], [OpenAIChatMessage("user", "two")]]
    with pipeline() as p:
        out = (
            p
            | beam.Create(chats)
            | beam_llm.RunInference(handler)
            | beam.Map(lambda r: r.inference.choices[0].message.content)
        )

        def check(replies: list[str]) -> None:
            assert len(replies) == 2
            assert any("one" in reply for reply in replies)
            assert any("two" in reply for reply in replies)

        assert_that(out, check)


def test_a_failed_example_goes_alone_to_the_failures(standin_env: dict[str, str]) -> None:
    handler = VLLMCompletionsModelHandler("m", env=standin_env, min_batch_size=4, max_batch_size=4)
    with pipeline() as p:
        good, failures = (
            p
            | beam.Create(["a", "BAD", "b", "c"])
            | beam_llm.RunInference(handler).with_exception_handling()
        )
        assert_that(good | beam.Map(lambda r: r.example), equal_to(["a", "b", "c"]))
        assert_that(
            failures.failed_inferences
            | "What" >> beam.MapTuple(lambda batch, error: (batch, error[0].__name__)),
            equal_to([(["BAD"], "RequestError")]),
            label="failures",
        )


def test_in_beams_transform_a_failed_example_fails_its_batch_after_the_rest_was_asked(
    standin_env: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    handler = VLLMCompletionsModelHandler("m", env={**standin_env, "STANDIN_LOG": str(log)})
    model = handler.load_model()
    with pytest.raises(RequestError, match="refused, HTTP 400"):
        handler.run_inference(["BAD", "a", "b"], model)
    assert sorted(log.read_text().splitlines()) == ['"a"', '"b"']


def test_prefix_batching_and_keys(standin_env: dict[str, str]) -> None:
    handler = VLLMCompletionsModelHandler(
        "m", env=standin_env, prefix_batching_config=PrefixBatchingConfig(prefix_delimiters=[":"])
    )
    assert handler.batch_elements_kwargs()["key_fn"]("head: tail") == "head"
    with pipeline() as p:
        out = (
            p
            | beam.Create([(i, f"{'ab'[i % 2]}: {i}") for i in range(6)])
            | beam_llm.RunInference(KeyedModelHandler(handler))
            | beam.MapTuple(lambda key, result: (key, result.inference.choices[0].text))
        )
        assert_that(out, equal_to([(i, f"{'ab'[i % 2]}: {i}") for i in range(6)]))


def test_an_example_of_the_wrong_type_fails_alone(standin_env: dict[str, str]) -> None:
    handler = VLLMCompletionsModelHandler("m", env=standin_env)
    model = handler.load_model()
    good, bad = handler.run_inference_each(["a", 5], model)
    assert text(good) == ("a", "a")
    assert str(bad) == "a prompt is a str, not int (refused)"
    chat = VLLMChatModelHandler("m", env=standin_env)
    (bad,) = chat.run_inference_each([["words"]], chat.load_model())
    assert str(bad) == (
        "a message is a mapping or an OpenAIChatMessage with role and content, not str (refused)"
    )


def test_the_identifier_is_stable_and_separates_servers(standin_env: dict[str, str]) -> None:
    def identifier(**more: Any) -> str:
        return VLLMCompletionsModelHandler("m", **more).default_model_identifier()

    assert identifier() == identifier()
    assert identifier() == identifier(min_batch_size=3)
    assert identifier() != identifier(server_args=["--seed=1"])
    assert identifier() != identifier(env_from_worker=["HOME"])
    yaml = beam_llm.VLLMCompletions(model="m", prompt="{text}")
    assert identifier() == yaml.annotations()["model_identifier"]
    assert identifier() != identifier(endpoint="http://127.0.0.1:9/v1")


def test_handlers_with_one_identifier_share_a_server(standin_env: dict[str, str]) -> None:
    one, two = (VLLMCompletionsModelHandler("m", env=standin_env) for _ in range(2))
    assert one.load_model().client() is two.load_model().client()
    other = VLLMCompletionsModelHandler("m", env=standin_env)
    other.set_model_identifier("another")
    assert other.load_model().client() is not one.load_model().client()


def test_a_handler_in_use_pickles_without_its_client(standin_env: dict[str, str]) -> None:
    handler = VLLMCompletionsModelHandler("m", env=standin_env, server_args=["--seed=4"])
    model = handler.load_model()
    copy = pickle.loads(pickle.dumps(handler))
    assert copy._client is None
    del handler
    # The model is shared by threads, its client held by those that use it.
    assert model.client() is None
    (result,) = copy.run_inference(["again"], model)
    assert text(result) == ("again", "again")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"server_args": ["--port=1"]}, r"args\[0\]: '--port=1' is not yours to set"),
        ({"vllm_server_kwargs": {"port": 1}}, r"args\[0\]: '--port=1' is not yours to set"),
        (
            {"endpoint": "http://x/v1", "server_args": ["--a=1"]},
            "endpoint: uses a server that runs",
        ),
        (
            {"prefix_batching_config": PrefixBatchingConfig(), "batch_key_fn": len},
            "batch_key_fn: given beside prefix_batching_config",
        ),
        ({"min_batch_size": 5, "max_batch_size": 2}, "(?i)minimum"),
    ],
)
def test_what_cannot_work_is_an_error_at_construction(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VLLMCompletionsModelHandler("m", **arguments)


def test_a_chat_template_is_read_where_the_handler_is_made(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    handler = VLLMChatModelHandler("m", str(template))
    spec = handler._settings().spec
    assert spec is not None
    assert spec.args == ("--chat-template={{ messages }}",)


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("VLLMChat", ["vllm", "torch", "apache_beam.ml.inference.vllm_inference"]),
        # Beam's own base class of handlers imports torch where it is installed.
        ("VLLMChatModelHandler", ["vllm", "apache_beam.ml.inference.vllm_inference"]),
    ],
)
def test_neither_vllm_nor_beams_handler_is_imported(name: str, unwanted: list[str]) -> None:
    code = f"import sys, beam_llm; beam_llm.{name}; print(sorted({unwanted} & sys.modules.keys()))"
    code = code.replace(f"{unwanted}", f"set({unwanted})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

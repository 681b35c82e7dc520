"""Beam model handlers that ask a vLLM server.

Parameters are named as in Beam's own ``apache_beam.ml.inference.vllm_inference``, which
is not imported: it imports vLLM, which takes seconds that the pipeline process can do
without.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import PredictionResult

from beam_llm.autoscaling import AutoscalingMetricConfig
from beam_llm.autoscaling.sampler import split_url
from beam_llm.config import Requests, default_identifier
from beam_llm.inference import ModelHandler
from beam_llm.metrics import StepMetrics
from beam_llm.prefixes import ChatPrefixKeyFn, PrefixBatchingConfig, PromptPrefixKeyFn
from beam_llm.vllm.capacity import Capacity
from beam_llm.vllm.client import Call, Client, Reply, RequestError, ServerSettings
from beam_llm.vllm.protocol import CHAT_PATH, COMPLETIONS_PATH
from beam_llm.vllm.server import VLLMServerSpec, args_from_vllm_server_kwargs


@dataclasses.dataclass(frozen=True)
class OpenAIChatMessage:
    """One message of a conversation, as in Beam's ``vllm_inference``.

    Attributes:
      role: Who speaks: ``system``, ``user`` or ``assistant``.
      content: What is said.
    """

    role: str
    content: str


class LoadedModel:
    """What ``load_model`` gives: a client that the handlers using it keep, not this object.

    Beam keeps the last model it loaded for as long as the process runs, and a server with
    it would outlive its pipeline.
    """

    def __init__(self, client: Client):
        self.client = weakref.ref(client)


class _VLLMModelHandler(ModelHandler):
    """What the two handlers share."""

    _path: str
    _default_key_fn: Callable[..., Any]

    def __init__(
        self,
        model_name: str,
        vllm_server_kwargs: Mapping[str, Any] | None = None,
        *,
        server_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        env_from_worker: Sequence[str] = (),
        startup_timeout_secs: float = 600.0,
        endpoint: str | None = None,
        api_key_env: str | None = None,
        requests: Requests | None = None,
        prefix_batching_config: PrefixBatchingConfig | None = None,
        enable_autoscaling_metric: bool = True,
        autoscaling_config: AutoscalingMetricConfig | None = None,
        metrics_endpoint: str | None = None,
        **batching: Any,
    ):
        keyed: dict[str, Any] = {}
        if prefix_batching_config is not None:
            for name in ("batch_key_fn", "batch_key_num_shards"):
                if name in batching:
                    raise ValueError(
                        f"{name}: given beside prefix_batching_config, which chooses the key:"
                        " give one of the two"
                    )
            keyed["batch_key_fn"] = prefix_batching_config.resolve(self._default_key_fn)
            keyed["batch_key_num_shards"] = prefix_batching_config.num_shards
        super().__init__(**batching, **keyed)
        if endpoint is not None and (vllm_server_kwargs or server_args or env or env_from_worker):
            raise ValueError(
                "endpoint: uses a server that runs already; vllm_server_kwargs, server_args, env"
                " and env_from_worker have no effect there"
            )
        if metrics_endpoint is not None and endpoint is None:
            raise ValueError("metrics_endpoint: needs endpoint, whose server it belongs to")
        if autoscaling_config is not None and not enable_autoscaling_metric:
            raise ValueError(
                "autoscaling_config: has no effect with enable_autoscaling_metric=False"
            )
        if autoscaling_config is not None and endpoint is not None and metrics_endpoint is None:
            raise ValueError(
                "autoscaling_config: has no effect with endpoint without metrics_endpoint"
            )
        if metrics_endpoint is not None:
            split_url(metrics_endpoint, "metrics_endpoint")
        self._autoscaling = autoscaling_config or AutoscalingMetricConfig()
        self._metrics_endpoint = metrics_endpoint
        #: Whether workers publish their capacity, as Beam's model manager would.
        self.publishes_capacity = (
            enable_autoscaling_metric
            and self._autoscaling.enabled
            and (endpoint is None or metrics_endpoint is not None)
        )
        self._model_name = model_name
        self._server_args = (*args_from_vllm_server_kwargs(vllm_server_kwargs or {}), *server_args)
        self._env = dict(env or {})
        self._env_from_worker = tuple(env_from_worker)
        self._startup_timeout_secs = startup_timeout_secs
        self._endpoint = endpoint
        self._api_key_env = api_key_env
        self._requests = requests or Requests()
        self._identifier: str | None = None
        self._client: Client | None = None
        self._metrics: StepMetrics | None = None
        self._settings()  # an argument that cannot be used is an error here, not on a worker

    def default_model_identifier(self) -> str:
        """A stable hash of the model and the server's settings, as of the YAML transforms."""
        return default_identifier(
            self._model_name,
            self._server_args,
            self._env,
            self._env_from_worker,
            self._endpoint,
        )

    def set_model_identifier(self, identifier: str) -> None:
        """Takes the identifier under which ``RunInference`` loads the model.

        Handlers with one identifier share one server on a worker.
        """
        self._identifier = identifier

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_metrics": None}

    def load_model(self) -> LoadedModel:
        """Opens the client; the server starts in the background."""
        self._client = self._open()
        return LoadedModel(self._client)

    def run_inference(
        self, batch: Sequence[Any], model: LoadedModel, inference_args: dict[str, Any] | None = None
    ) -> Iterable[PredictionResult]:
        """Asks the server about each example.

        Args:
          batch: The examples.
          model: From ``load_model``, of this handler or of its like on another thread.
          inference_args: Further fields of each request, such as ``max_tokens``.

        Returns:
          One result an example, in order; ``inference`` has the attributes of OpenAI's
          ``Completion`` or ``ChatCompletion``.

        Raises:
          RequestError: An example failed; the others were answered all the same, and
            ``beam_llm.RunInference`` keeps their results.
        """
        results = self.run_inference_each(batch, model, inference_args)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise failures[0]
        return [result for result in results if isinstance(result, PredictionResult)]

    def run_inference_each(
        self, batch: Sequence[Any], model: LoadedModel, inference_args: dict[str, Any] | None = None
    ) -> list[PredictionResult | Exception]:
        """Asks the server about each example; a failed one gives its error in its place."""
        if not isinstance(cast(Any, model), LoadedModel):
            raise ValueError(
                f"the model is {type(model).__name__}, and not what load_model gave: with"
                " use_model_manager, models are in another process, where a client cannot go"
            )
        fields = dict(inference_args or {})
        if self._endpoint is not None:  # a server of ours has one model, whatever its name
            fields["model"] = self._model_name
        if self._metrics is None:
            self._metrics = StepMetrics()
        self._metrics.batch(len(batch))
        calls: list[Call] = []
        results: list[PredictionResult | Exception | None] = []
        for example in batch:
            try:
                body = msgspec.json.encode({**self._body(example), **fields})
            except (TypeError, ValueError) as error:
                results.append(RequestError("refused", str(error)))
            else:
                calls.append(Call(self._path, body))
                results.append(None)
        if self._client is None:
            self._client = model.client() or self._open()
        outcomes = iter(self._client.run(calls))
        for i, example in enumerate(batch):
            outcome = results[i] or next(outcomes)
            if isinstance(outcome, RequestError):
                self._metrics.failed(outcome)
                results[i] = outcome
            elif isinstance(outcome, Reply):
                self._metrics.answered(outcome)
                results[i] = PredictionResult(example, outcome.answer, self._model_name)
        return [result for result in results if result is not None]

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Any field of a request is allowed; the server says what it makes of it."""

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        """Bytes of the examples' text, for Beam's metrics."""
        return sum(len(str(example).encode("utf-8", "replace")) for example in batch)

    def share_model_across_processes(self) -> bool:
        """False: what is loaded is a client; its server is shared by processes anyway."""
        return False

    def get_metrics_namespace(self) -> str:
        """Namespace of Beam's own inference metrics."""
        return "BeamML_vLLM"

    def _open(self) -> Client:
        capacity = None
        if self.publishes_capacity:
            tag = self._autoscaling.resolve_tag(self._identifier, self._model_name)
            capacity = Capacity.of(
                self._autoscaling,
                tag,
                self._metrics_endpoint,
                self._requests.max_in_flight,
                self.batch_elements_kwargs().get("max_batch_size"),
            )
        return dataclasses.replace(self._settings(), capacity=capacity).open()

    def _settings(self) -> ServerSettings:
        spec = None
        if self._endpoint is None:
            spec = VLLMServerSpec(
                identifier=self._identifier or self.default_model_identifier(),
                model=self._model_name,
                args=self._server_args,
                env=self._env,
                env_from_worker=self._env_from_worker,
                startup_timeout_secs=self._startup_timeout_secs,
            )
        return ServerSettings(spec, self._endpoint, self._api_key_env, self._requests)

    def _body(self, example: Any) -> dict[str, Any]:
        raise NotImplementedError


class VLLMCompletionsModelHandler(_VLLMModelHandler):
    """Completes prompts with a vLLM server that it starts on each worker.

    Example::

      handler = VLLMCompletionsModelHandler("HuggingFaceTB/SmolLM2-135M-Instruct")
      results = prompts | beam_llm.RunInference(handler, inference_args={"max_tokens": 16})

    Args:
      model_name: Path or hub name of the model.
      vllm_server_kwargs: vLLM's options by name, values of any type, as Beam takes them.
      server_args: vLLM's options as its command line has them.
      env: Variables for the server.
      env_from_worker: Variables that the worker's environment must provide.
      startup_timeout_secs: Longest time the server may take to answer [s].
      endpoint: Base address of a running OpenAI-compatible server, to use instead.
      api_key_env: Variable of the worker's environment that holds the endpoint's API key.
      requests: Concurrency, timeout and retries.
      prefix_batching_config: Batches examples by the start of their prompt.
      enable_autoscaling_metric: Whether workers publish how many examples they can hold, under
        the model identifier that ``RunInference`` reports. With ``endpoint`` that takes
        ``metrics_endpoint``.
      autoscaling_config: How they estimate and publish it.
      metrics_endpoint: Address of the Prometheus page of the server at ``endpoint``; only for
        a server that belongs to one worker.
      **batching: Beam's batching parameters: ``min_batch_size``, ``max_batch_size``,
        ``max_batch_duration_secs``, ``max_batch_weight``, ``element_size_fn``, …
    """

    _path = COMPLETIONS_PATH
    _default_key_fn = PromptPrefixKeyFn

    def _body(self, example: Any) -> dict[str, Any]:
        if not isinstance(example, str):
            raise TypeError(f"a prompt is a str, not {type(example).__name__}")
        return {"prompt": example}


class VLLMChatModelHandler(_VLLMModelHandler):
    """Asks a chat model about conversations, with a vLLM server that it starts on each worker.

    Example::

      handler = VLLMChatModelHandler("HuggingFaceTB/SmolLM2-135M-Instruct")
      chats = pipeline | beam.Create([[OpenAIChatMessage("user", "Hello!")]])
      results = chats | beam_llm.RunInference(handler)

    Args:
      model_name: Path or hub name of the model.
      chat_template_path: Path of a Jinja chat template, in any file system that Beam reads;
        the pipeline's own process reads it, when the handler is made.
      vllm_server_kwargs: vLLM's options by name, values of any type, as Beam takes them.
      **settings: As for ``VLLMCompletionsModelHandler``.
    """

    _path = CHAT_PATH
    _default_key_fn = ChatPrefixKeyFn

    def __init__(
        self,
        model_name: str,
        chat_template_path: str | None = None,
        vllm_server_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        if chat_template_path is not None:
            with FileSystems.open(chat_template_path) as file:
                template = file.read().decode()
            # vLLM takes the text itself where it is given no path.
            settings["server_args"] = (
                *settings.get("server_args", ()),
                f"--chat-template={template}",
            )
        super().__init__(model_name, vllm_server_kwargs, **settings)

    def _body(self, example: Any) -> dict[str, Any]:
        return {"messages": [_message(message) for message in example]}


def _message(message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping):
        return dict(cast("Mapping[str, Any]", message))
    try:
        return {"role": message.role, "content": message.content}
    except AttributeError:
        raise TypeError(
            "a message is a mapping or an OpenAIChatMessage with role and content, not"
            f" {type(message).__name__}"
        ) from None

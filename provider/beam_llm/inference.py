"""RunInference with keyed batching, for any of Beam's model handlers.

Beam's transform does the inference; this one batches before it, tells the handler which model
it serves, and takes single failures out of a batch after it.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import apache_beam as beam
from apache_beam.metrics.metric import Metrics
from apache_beam.ml.inference import base

from beam_llm.batching import BatchElements, KeyFunctionError, validate_keyed_batching
from beam_llm.shards import ShardSpec

__all__ = ["InferenceError", "ModelHandler", "RunInference"]


class InferenceError(RuntimeError):
    """The inference of one example failed; the cause is what the handler reported."""


class ModelHandler(base.ModelHandler):
    """Beam's base class of model handlers, plus keyed batching.

    A handler may also have any of these methods, which `RunInference` looks for:

    * `set_model_identifier(identifier: str)`, called on every worker before `load_model`, with
      the model identifier of the transform, numbered where a keyed handler has several models.
    * `default_model_identifier() -> str`, the identifier when the transform was given none.
      Beam draws a random one, with which no two steps share a model.
    * `run_inference_each(batch, model, inference_args) -> list`, which gives a prediction or
      an exception for each example: a failing example then does not take its batch along.

    Args:
        batch_key_fn: Function from example to key: a batch holds examples of one key only,
            and one key's examples meet on whatever worker they started. It gets the example
            after preprocessing, without the key that a `KeyedModelHandler` puts before it.
        batch_key_num_shards: Random sub-keys per key: an int, a mapping from key to int, or
            a callable. Only with `batch_key_fn`.
        **kwargs: Beam's arguments: `min_batch_size`, `max_batch_size`,
            `max_batch_duration_secs`, `max_batch_weight`, `element_size_fn`, ….

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of bounds, or excludes another one.
    """

    def __init__(
        self,
        *,
        batch_key_fn: Callable[[Any], Any] | None = None,
        batch_key_num_shards: ShardSpec = 1,
        **kwargs: Any,
    ):
        keyed = batch_key_fn is not None
        validate_keyed_batching(
            batch_key_fn,
            batch_key_num_shards,
            length_fn=kwargs.get("batch_length_fn"),
            element_size_fn=kwargs.get("element_size_fn"),
            max_batch_weight=kwargs.get("max_batch_weight"),
            max_batch_duration_secs=kwargs.get("max_batch_duration_secs") if keyed else None,
            prefix="batch_",
        )
        super().__init__(**kwargs)
        if keyed:
            self._batching_kwargs["key_fn"] = batch_key_fn
            self._batching_kwargs["num_shards"] = batch_key_num_shards
        # What else is wrong with the batching shows now, not when a pipeline is built.
        BatchElements(**self._batching_kwargs)


class RunInference(base.RunInference):
    """Beam's `RunInference`, plus batches by key and failures by example.

    Takes Beam's arguments and any of its model handlers, those too that `KeyedModelHandler`,
    `with_preprocess_fn` and the like wrap. Handlers that carry a `batch_key_fn` get batches of
    one key; keying, batching and inference then share the handler's resource hints, since
    steps that ask for different workers would not keep a key where it is.

    With `with_exception_handling()`, an example whose key cannot be computed, and one for
    which the handler's `run_inference_each` gives an exception, goes to `failed_inferences`
    as `([example], (exception type, repr, traceback lines))`, alone; a batch that fails as a
    whole goes there as in Beam. `threshold` bounds failed examples as well. Without, the
    first failure ends the bundle, naming the example.

    Args:
        model_handler: A model handler.
        *args: As in Beam.
        model_identifier: Names the model, in the metrics and among the steps that share it.
            None for the handler's `default_model_identifier()`, else a random one, as in Beam.
        **kwargs: As in Beam.
    """

    def __init__(
        self,
        model_handler: Any,
        *args: Any,
        model_identifier: str | None = None,
        **kwargs: Any,
    ):
        if model_identifier is None:
            for handler in _handlers(model_handler):
                if hasattr(handler, "default_model_identifier"):
                    model_identifier = handler.default_model_identifier()
        elif not (model_identifier.isascii() and model_identifier.isprintable()):
            raise ValueError(
                f"model_identifier: {model_identifier!r} has characters that Beam's annotations"
                " cannot hold; allowed: printable ASCII"
            )
        super().__init__(model_handler, *args, model_identifier=model_identifier, **kwargs)
        if self._use_model_manager and any(
            getattr(handler, "publishes_capacity", False) for handler in _handlers(model_handler)
        ):
            raise ValueError(
                "use_model_manager: True, and the handler publishes its workers' capacity as the"
                " metric by which Beam's model manager counts models: leave it out, or give the"
                " handler enable_autoscaling_metric=False"
            )

    def expand(self, pcoll: Any) -> Any:
        """Runs inference on the examples, or on the batches where batching is off."""
        handler = self._model_handler
        handler.validate_inference_args(self._inference_args)
        examples, failed_before = self._apply_fns(
            pcoll, handler.get_preprocess_fns(), "BeamML_RunInference_Preprocess"
        )
        hints = handler.get_resource_hints()
        infer: Any = _Composite(self._infer).with_resource_hints(**hints)
        results, failed = examples | "BeamML_RunInference_Batched" >> infer
        if self._monitoring_transform is not None:
            with results.pipeline.transform_annotations(model_identifier=""):
                _ = results | "BeamML_RunInference_MonitoringOutlet" >> self._monitoring_transform
        results, failed_after = self._apply_fns(
            results, handler.get_postprocess_fns(), "BeamML_RunInference_Postprocess"
        )
        if not self._with_exception_handling:
            return results
        return results, base.RunInferenceDLQ(failed, list(failed_before), list(failed_after))

    def _infer(self, examples: Any) -> tuple[Any, Any]:
        """From preprocessed examples to predictions and, with exception handling, failures."""
        handler = self._model_handler
        handling: dict[str, Any] = {}
        if self._with_exception_handling:
            handling = {"exc_class": self._exc_class, "threshold": self._threshold}
        batches = examples
        failed: list[Any] = []
        if not handler.should_skip_batching():
            options = _batching_kwargs(handler)
            batch = BatchElements(**options)
            if handling and "key_fn" in options:
                # A key that cannot be computed is caught, whatever else is to be.
                catch = {"exc_class": _and_key_failures(self._exc_class)}
                batches, bad = examples | batch.with_exception_handling(**handling | catch)
                failed.append(bad | "KeyFailures" >> beam.Map(_failure_of_one))
            else:
                batches = examples | batch
        results = self._infer_batches(batches)
        if not handling:
            return results, ()
        results, failed_batches = results
        failed.append(failed_batches)
        if _inference_each(handler) is not None:
            unwrap = beam.Map(_unwrap).with_exception_handling(**handling)
            results, bad = results | "Unwrap" >> unwrap
            failed.append(bad | "ExampleFailures" >> beam.Map(_failure_of_example))
        if len(failed) == 1:
            return results, failed[0]
        return results, tuple(failed) | "Failures" >> beam.Flatten()

    def _infer_batches(self, batches: Any) -> Any:
        """Beam's transform, with a handler that leaves to it the inference alone."""
        handler, monitoring = self._model_handler, self._monitoring_transform
        catch = self._exc_class if self._with_exception_handling else None
        self._model_handler = _InferenceOnly(handler, str(self._model_tag), catch)
        self._monitoring_transform = None
        try:
            result: Any = super().expand(batches)
        finally:
            self._model_handler, self._monitoring_transform = handler, monitoring
        if self._with_exception_handling:
            results, failures = result
            return results, failures.failed_inferences
        return result


class _Composite(beam.PTransform):
    """A function from PCollection to PCollections as a transform, which can carry hints."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self._function = function

    def expand(self, input_or_inputs: Any) -> Any:
        return self._function(input_or_inputs)


class _Failure(NamedTuple):
    """What stands among the predictions for an example that failed."""

    example: Any
    error: Exception
    info: tuple[type, str, list[str]]


def _and_key_failures(exc_class: Any) -> tuple[Any, ...]:
    return (*(exc_class if isinstance(exc_class, tuple) else (exc_class,)), KeyFunctionError)


def _unwrap(prediction: Any) -> Any:
    if isinstance(prediction, _Failure):
        raise prediction.error
    return prediction


def _failure_of_one(failure: tuple[Any, Any]) -> tuple[list[Any], Any]:
    example, info = failure
    return [example], info


def _failure_of_example(failure: tuple[_Failure, Any]) -> tuple[list[Any], Any]:
    # The handler's own traceback, not that of the unwrapping.
    return [failure[0].example], failure[0].info


def _delegated(name: str) -> Any:
    def call(self: "_InferenceOnly", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.handler, name)(*args, **kwargs)

    return call


class _InferenceOnly(base.ModelHandler):
    """A handler without its batching, pre- and postprocessing, which are done around it.

    Args:
        handler: The handler as the user gave it.
        identifier: The model identifier that it is told.
        catch: Exceptions of single examples that become `_Failure`s, or None.
    """

    def __init__(self, handler: Any, identifier: str, catch: Any):
        super().__init__()
        self.handler = handler
        self._identifier = identifier
        self._catch = catch
        self._failed_examples = Metrics.counter("beam_llm", "failed_examples")

    def set_environment_vars(self) -> None:
        # Beam calls this in each worker's set-up, before anything else.
        handlers = [h for h in _handlers(self.handler) if hasattr(h, "set_model_identifier")]
        for number, handler in enumerate(handlers, start=1):
            # Several models behind one keyed handler are not one model.
            one_of_many = len(handlers) > 1
            handler.set_model_identifier(
                f"{self._identifier}-{number}" if one_of_many else self._identifier
            )
        self.handler.set_environment_vars()

    def run_inference(
        self,
        batch: Sequence[Any],
        model: Any,
        inference_args: dict[str, Any] | None = None,
    ) -> Iterable[Any]:
        each = _inference_each(self.handler)
        if each is None:
            return self.handler.run_inference(batch, model, inference_args)
        results = list(each(batch, model, inference_args))
        if len(results) != len(batch):
            raise ValueError(
                f"run_inference_each of {type(self.handler).__qualname__} gave {len(results)} "
                f"results for {len(batch)} examples"
            )
        return [
            self._failed(example, result) if isinstance(result, Exception) else result
            for example, result in zip(batch, results, strict=True)
        ]

    def _failed(self, example: Any, error: Exception) -> _Failure:
        self._failed_examples.inc()
        if self._catch is None or not isinstance(error, self._catch):
            shown = repr(example)
            shown = shown if len(shown) <= 200 else shown[:199] + "…"
            raise InferenceError(
                f"inference failed: {type(error).__name__}: {error}; example: {shown}"
            ) from error
        return _Failure(
            example, error, (type(error), repr(error), traceback.format_exception(error))
        )

    def get_preprocess_fns(self) -> list[Any]:
        return []

    def get_postprocess_fns(self) -> list[Any]:
        return []

    def get_resource_hints(self) -> dict[str, Any]:
        return {}

    def should_skip_batching(self) -> bool:
        return True

    load_model = _delegated("load_model")
    get_num_bytes = _delegated("get_num_bytes")
    get_metrics_namespace = _delegated("get_metrics_namespace")
    validate_inference_args = _delegated("validate_inference_args")
    update_model_path = _delegated("update_model_path")
    update_model_paths = _delegated("update_model_paths")
    share_model_across_processes = _delegated("share_model_across_processes")
    model_copies = _delegated("model_copies")
    override_metrics = _delegated("override_metrics")
    should_garbage_collect_on_timeout = _delegated("should_garbage_collect_on_timeout")


_WRAPPERS: tuple[type, ...] = (
    base._PreProcessingModelHandler,  # pyright: ignore[reportPrivateUsage]
    base._PostProcessingModelHandler,  # pyright: ignore[reportPrivateUsage]
    base._PrebatchedModelHandler,  # pyright: ignore[reportPrivateUsage]
)
_KEYED = (base.KeyedModelHandler, base.MaybeKeyedModelHandler)


def _wrapped(handler: Any) -> Any:
    """The one handler inside one of Beam's wrappers, or None."""
    if isinstance(handler, _WRAPPERS):
        return handler._base
    if isinstance(handler, _KEYED):
        return getattr(handler, "_unkeyed", None)
    return None


def _handlers(handler: Any) -> Iterator[Any]:
    """A handler, and those inside it."""
    yield handler
    inner = _wrapped(handler)
    if inner is not None:
        yield from _handlers(inner)
    elif isinstance(handler, base.KeyedModelHandler):
        for one in cast("Any", handler)._id_to_mh_map.values():
            yield from _handlers(one)


def _batching_kwargs(handler: Any) -> dict[str, Any]:
    """The arguments for `BatchElements`, with functions of examples even where keys precede.

    Beam's keyed handlers hand the functions of the handler inside on as they are.
    """
    inner = _wrapped(handler)
    if inner is None or "batch_elements_kwargs" in _own_methods(handler):
        return dict(cast("Mapping[str, Any]", handler.batch_elements_kwargs()))
    options = _batching_kwargs(inner)
    if isinstance(handler, _KEYED):
        always = isinstance(handler, base.KeyedModelHandler)
        for name in ("key_fn", "element_size_fn", "length_fn"):
            if options.get(name) is not None:
                options[name] = _OfExample(options[name], always)
    return options


def _own_methods(handler: Any) -> set[str]:
    """Methods that a user's subclass of one of Beam's wrappers overrides."""
    own: set[str] = set()
    for cls in type(handler).__mro__:
        if cls.__module__ == base.__name__:
            break
        own.update(vars(cls))
    return own


class _OfExample:
    """A function of examples as one of `(key, example)` pairs.

    Args:
        function: The function.
        always: Whether every element is a pair; else tuples are, as a
            `MaybeKeyedModelHandler` takes them.
    """

    def __init__(self, function: Callable[[Any], Any], always: bool):
        self._function = function
        self._always = always
        self.__qualname__ = getattr(function, "__qualname__", repr(function))

    def __call__(self, element: Any) -> Any:
        if self._always or isinstance(element, tuple):
            element = element[1]
        return self._function(element)


def _inference_each(handler: Any) -> Callable[..., Sequence[Any]] | None:
    """The handler's `run_inference_each`, for what the wrappers around it take and give."""
    own = getattr(handler, "run_inference_each", None)
    inner = _wrapped(handler)
    if own is not None or inner is None or "run_inference" in _own_methods(handler):
        return own
    each = _inference_each(inner)
    if each is None or not isinstance(handler, _KEYED):
        return each
    always = isinstance(handler, base.KeyedModelHandler)

    def each_keyed(batch: Sequence[Any], model: Any, inference_args: Any) -> Sequence[Any]:
        if not always and not isinstance(batch[0], tuple):
            return each(batch, model, inference_args)
        results = each([example for _, example in batch], model, inference_args)
        return [
            result if isinstance(result, Exception) else (key, result)
            for (key, _), result in zip(batch, results, strict=True)
        ]

    return each_keyed

"""RunInference with keyed batches, for handlers of Beam's, of others and of ours."""

import collections
import pickle

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.ml.inference import base
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from running import FN_API_RUNNER, Collect, counter_values
from sklearn.linear_model import LinearRegression

from beam_llm.batching import KeyFunctionError
from beam_llm.inference import InferenceError, ModelHandler, RunInference


class Model:
    """What a handler loads; must be weakly referable."""


def parity(example):
    if example == 7:
        raise LookupError("no key for seven")
    return example % 2


class Handler(ModelHandler):
    """Predicts (size of the batch, keys in the batch, model identifier)."""

    def __init__(self, **kwargs):
        super().__init__(batch_key_fn=parity, min_batch_size=4, max_batch_size=4, **kwargs)
        self.identifier = None

    def set_model_identifier(self, identifier):
        self.identifier = identifier

    def load_model(self):
        if self.identifier is None:
            raise RuntimeError("loaded before it knew its identifier")
        return Model()

    def run_inference(self, batch, model, inference_args=None):
        keys = {example % 2 for example in batch}
        for example in batch:
            yield base.PredictionResult(example, (len(batch), keys, self.identifier))


class EachHandler(Handler):
    """Fails on 5, alone."""

    def run_inference(self, batch, model, inference_args=None):
        raise NotImplementedError

    def run_inference_each(self, batch, model, inference_args=None):
        return [
            ValueError("five") if example == 5 else base.PredictionResult(example, example * 10)
            for example in batch
        ]

    def default_model_identifier(self):
        return "derived"


def infer(examples, transform, *, pipeline=None):
    collect = Collect()
    with pipeline or beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        _ = pipeline | beam.Create(examples) | transform | "Collect" >> beam.ParDo(collect)
    return [output.value for output in collect.outputs]


def infer_with_failures(examples, handler, **kwargs):
    good, failed = Collect(), Collect()
    with beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        results, failures = (
            pipeline
            | beam.Create(examples)
            | RunInference(handler).with_exception_handling(**kwargs)
        )
        _ = results | "Good" >> beam.ParDo(good)
        _ = failures.failed_inferences | "Failed" >> beam.ParDo(failed)
    return [out.value for out in good.outputs], [out.value for out in failed.outputs]


EXAMPLES = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]  # six even, four odd


def test_batches_of_one_key():
    results = infer(EXAMPLES, RunInference(Handler(), model_identifier="m"))
    assert {result.example for result in results} == set(EXAMPLES)
    sizes = collections.Counter(result.inference[0] for result in results)
    assert sizes == {4: 8, 2: 2}
    assert all(result.inference[1] == {result.example % 2} for result in results)
    assert {result.inference[2] for result in results} == {"m"}


@pytest.mark.parametrize(
    ("wrap", "to_element", "to_result"),
    [
        (base.KeyedModelHandler, lambda x: ("id", x), lambda pair: pair[1]),
        (base.MaybeKeyedModelHandler, lambda x: ("id", x), lambda pair: pair[1]),
        (base.MaybeKeyedModelHandler, lambda x: x, lambda x: x),
        (lambda h: h.with_preprocess_fn(lambda text: int(text)), str, lambda x: x),
        (lambda h: h.with_postprocess_fn(lambda result: [result]), lambda x: x, lambda x: x[0]),
        (
            lambda h: base.KeyedModelHandler(h).with_preprocess_fn(lambda x: ("id", int(x))),
            str,
            lambda pair: pair[1],
        ),
    ],
    ids=["keyed", "maybe keyed", "not keyed", "preprocess", "postprocess", "keyed preprocess"],
)
def test_key_function_gets_the_example_through_beams_wrappers(wrap, to_element, to_result):
    transform = RunInference(wrap(Handler()), model_identifier="m")
    results = [to_result(r) for r in infer([to_element(x) for x in EXAMPLES], transform)]
    assert {result.example for result in results} == set(EXAMPLES)
    assert all(result.inference[1] == {result.example % 2} for result in results)
    assert max(result.inference[0] for result in results) == 4
    assert {result.inference[2] for result in results} == {"m"}


def test_weights_get_the_example_too():
    class Weighing(Handler):
        def __init__(self):
            super().__init__(max_batch_weight=9, element_size_fn=lambda example: example)

    results = infer(
        [("id", x) for x in (2, 4, 6, 8)], RunInference(base.KeyedModelHandler(Weighing()))
    )
    sizes = {result.example: result.inference[0] for _, result in results}
    assert sizes == {2: 2, 4: 2, 6: 1, 8: 1}


def test_no_batching_is_still_no_batching():
    results = infer([[1, 2, 3]], RunInference(Handler().with_no_batching(), model_identifier="m"))
    assert [result.inference[:2] for result in results] == [(3, {0, 1})] * 3


def test_failing_examples_go_alone_to_the_failures():
    good, failed = infer_with_failures([*EXAMPLES, 7], EachHandler())
    assert sorted(result.example for result in good) == sorted({*EXAMPLES} - {5})
    (example, (error, message, trace)), key_failure = sorted(failed, key=lambda f: f[0][0])
    assert (example, error, message) == ([5], ValueError, "ValueError('five')")
    assert trace == ["ValueError: five\n"]
    assert key_failure[0] == [7]
    assert key_failure[1][0] is KeyFunctionError


def test_failing_examples_keep_their_key():
    good, failed = infer_with_failures(
        [("id", x) for x in EXAMPLES], base.KeyedModelHandler(EachHandler())
    )
    assert [element for element, _ in failed] == [[("id", 5)]]
    assert ("id", base.PredictionResult(3, 30)) in good


def test_key_failures_are_caught_whatever_else_is():
    good, failed = infer_with_failures([1, 7], EachHandler(), exc_class=ArithmeticError)
    assert [result.example for result in good] == [1]
    assert [element for element, _ in failed] == [[7]]


def test_postprocessing_and_monitoring_see_no_failures():
    seen = Collect()
    good, failed = Collect(), Collect()
    handler = EachHandler().with_postprocess_fn(lambda result: result.inference)
    with beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        results, failures = (
            pipeline
            | beam.Create([1, 5, 9])
            | RunInference(handler)
            .with_monitoring_transform(beam.ParDo(seen))
            .with_exception_handling()
        )
        _ = results | "Good" >> beam.ParDo(good)
        _ = failures.failed_inferences | "Failed" >> beam.ParDo(failed)
        assert failures.failed_preprocessing == []
        assert len(failures.failed_postprocessing) == 1
    assert sorted(output.value for output in good.outputs) == [10, 90]
    assert sorted(output.value.example for output in seen.outputs) == [1, 9]
    assert [output.value[0] for output in failed.outputs] == [[5]]


def test_too_many_failures_end_the_pipeline():
    with pytest.raises(ValueError, match="exceeded threshold"):
        infer_with_failures([5, 5, 5, 1], EachHandler(), threshold=0.5)


def test_without_exception_handling_the_failure_names_the_example():
    with pytest.raises(InferenceError, match="ValueError: five; example: 5"):
        infer(EXAMPLES, RunInference(EachHandler()))
    with pytest.raises(KeyFunctionError, match=r"key_fn parity failed: LookupError.* element: 7"):
        infer([7], RunInference(Handler()))


def test_one_result_per_example():
    class Short(EachHandler):
        def run_inference_each(self, batch, model, inference_args=None):
            return []

    with pytest.raises(ValueError, match="gave 0 results for 1 examples"):
        infer([1], RunInference(Short()))


def test_failed_examples_are_counted():
    pipeline = beam.Pipeline(runner=FN_API_RUNNER)
    _ = pipeline | beam.Create(EXAMPLES) | RunInference(EachHandler()).with_exception_handling()
    result = pipeline.run()
    result.wait_until_finish()
    counters = counter_values(result)
    assert counters["failed_examples"] == 1
    assert counters["batches"] == 3


def test_identifier_comes_from_the_handler_or_is_random():
    def identifier(handler, **kwargs):
        return RunInference(handler, **kwargs).annotations()["model_identifier"]

    assert identifier(EachHandler()) == "derived"
    assert identifier(base.KeyedModelHandler(EachHandler())) == "derived"
    assert identifier(EachHandler(), model_identifier="given") == "given"
    assert identifier(Handler()) != identifier(Handler())


def test_annotations_are_those_of_the_users_handler():
    transform = RunInference(Handler())
    before = transform.annotations()
    assert before["model_handler_type"].endswith("test_inference.Handler")
    _ = beam.Pipeline(runner=FN_API_RUNNER) | beam.Create([1]) | transform
    assert transform.annotations() == before


def test_resource_hints_cover_keying_and_batching():
    class Hinting(Handler):
        def get_resource_hints(self):
            return {"min_ram": "1GB"}

    pipeline = beam.Pipeline(runner=FN_API_RUNNER)
    _ = pipeline | beam.Create([1]) | RunInference(Hinting())
    proto = pipeline.to_runner_api()
    hints = {
        name.unique_name: dict(proto.components.environments[name.environment_id].resource_hints)
        for name in proto.components.transforms.values()
        if name.environment_id
    }
    own = {name: hint for name, hint in hints.items() if "BeamML_RunInference_Batched/" in name}
    assert any(name.endswith("/Key") for name in own)
    assert any(name.endswith("/BeamML_RunInference") for name in own)
    assert all(hint == {"beam:resources:min_ram_bytes:v1": b"1000000000"} for hint in own.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Beam's file
def test_scikit_learns_handler(tmp_path):
    model = LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0])
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    handler = SklearnModelHandlerNumpy(str(path))
    examples = [np.array([float(x)]) for x in range(6)]
    ours = infer(examples, RunInference(handler))
    theirs = infer(examples, base.RunInference(handler))
    assert [r.inference for r in ours] == [r.inference for r in theirs]
    assert [round(r.inference) for r in ours] == [0, 2, 4, 6, 8, 10]

    good, failed = infer_with_failures([*examples, "text"], handler)
    # A batch of a handler without run_inference_each fails as a whole, as in Beam.
    (batch, (error, _, _)) = failed[-1]
    assert "text" in batch
    assert error is not KeyFunctionError
    assert len(good) + sum(len(batch) for batch, _ in failed) == 7


def test_handlers_of_others_can_carry_keys():
    class Keyed(SklearnModelHandlerNumpy):
        def batch_elements_kwargs(self):
            return {"key_fn": lambda x: float(x[0]) % 2, "min_batch_size": 9, "max_batch_size": 9}

        def load_model(self):
            return LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0])

        def run_inference(self, batch, model, inference_args=None):
            return [sorted(float(x[0]) for x in batch)] * len(batch)

    results = infer([np.array([float(x)]) for x in range(5)], RunInference(Keyed("unused")))
    assert sorted(results) == [[0, 2, 4]] * 3 + [[1, 3]] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"batch_key_num_shards": 2}, ValueError, "batch_key_num_shards: 2 needs batch_key_fn"),
        ({"batch_key_fn": 1}, TypeError, "batch_key_fn: 1 is not callable"),
        (
            {"batch_key_fn": len, "batch_key_num_shards": {"a": 0}},
            ValueError,
            r"batch_key_num_shards\['a'\]: 0 is less than the minimum of 1",
        ),
        ({"batch_key_fn": len, "batch_length_fn": len}, ValueError, "together with batch_key_fn"),
        ({"batch_key_fn": len, "max_batch_weight": 3}, ValueError, "needs element_size_fn"),
        ({"batch_key_fn": len, "min_batch_size": 0}, ValueError, "min_batch_size: 0"),
        ({"min_batch_size": 3, "max_batch_size": 2}, ValueError, "Minimum"),
    ],
)
def test_wrong_combinations_are_rejected_by_the_handler(arguments, error, said):
    with pytest.raises(error, match=said):
        ModelHandler(**arguments)


def test_models_behind_one_keyed_handler_have_identifiers_of_their_own():
    handler = base.KeyedModelHandler(
        [base.KeyModelMapping(["a"], Handler()), base.KeyModelMapping(["b"], Handler())]
    )
    collect = Collect()
    with beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        _ = (
            pipeline
            | beam.Create([("a", 1), ("b", 1)])
            | RunInference(handler, model_identifier="m")
            | beam.MapTuple(lambda key, result: (key, result.inference[2]))
            | "Collect" >> beam.ParDo(collect)
        )
    assert sorted(output.value for output in collect.outputs) == [("a", "m-1"), ("b", "m-2")]


def test_an_identifier_that_beam_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="model_identifier: 'modèle' has characters"):
        RunInference(Handler(), model_identifier="modèle")

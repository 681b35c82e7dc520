"""BatchElements and BatchByKey on bounded input and in state, on Beam's direct runners."""

import collections
import inspect
import math
import pickle

import apache_beam as beam
import pytest
from apache_beam.transforms import window
from apache_beam.utils.timestamp import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import BUNDLE_RUNNER, FN_API_RUNNER, Collect, Unbounded, batches_of, counter_values

from beam_llm.batching import (
    BatchByKey,
    BatchElements,
    BatchLatencies,
    KeyFunctionError,
    WithBatchKey,
    validate_keyed_batching,
    validate_shards,
)
from beam_llm.shards import shard_counter

MODES = pytest.mark.parametrize("unbounded", [False, True], ids=["grouped", "in state"])


def fixed(size, **kwargs):
    return BatchElements(size, size, **kwargs)


def values(outputs):
    return sorted(output.value for output in outputs)


def at_zero(elements):
    return [(element, 0) for element in elements]


# What a batch holds


@MODES
@pytest.mark.parametrize("runner", [FN_API_RUNNER, BUNDLE_RUNNER])
def test_a_batch_holds_one_key(unbounded, runner):
    outputs = batches_of(
        at_zero(range(10)), fixed(3, key_fn=lambda x: x % 2), unbounded=unbounded, runner=runner
    )
    assert sorted(len(batch) for batch in values(outputs)) == [2, 2, 3, 3]
    assert all(len({x % 2 for x in output.value}) == 1 for output in outputs)
    assert sorted(x for output in outputs for x in output.value) == list(range(10))


@MODES
def test_equal_keys_of_different_types_meet(unbounded):
    outputs = batches_of(
        at_zero([1, 1.0, True, None, float("nan"), float("nan")]),
        fixed(10, key_fn=lambda x: x),
        unbounded=unbounded,
    )
    assert sorted(len(output.value) for output in outputs) == [1, 2, 3]


@MODES
@pytest.mark.parametrize("key", [["a"], {"a": 1}, {"a"}, None, ("ü", None, 1.5), float("nan")])
def test_keys_of_any_kind(unbounded, key):
    outputs = batches_of(at_zero("xy"), fixed(10, key_fn=lambda x: key), unbounded=unbounded)
    assert [sorted(output.value) for output in outputs] == [["x", "y"]]


@MODES
def test_batches_stay_in_their_window_and_carry_its_end(unbounded):
    outputs = batches_of(
        [(f"a{at}", at) for at in (1, 12, 3, 14, 5)],
        fixed(10, key_fn=lambda x: x[0]),
        windows=window.FixedWindows(10),
        unbounded=unbounded,
    )
    assert sorted((sorted(value), at) for value, at, _ in outputs) == [
        (["a1", "a3", "a5"], Timestamp(9.999999)),
        (["a12", "a14"], Timestamp(19.999999)),
    ]


@MODES
def test_weight_bounds_a_batch(unbounded):
    outputs = batches_of(
        at_zero([4, 5, 1, 3, 99, 2, 2, 2]),
        fixed(3, key_fn=lambda x: 0, element_size_fn=lambda x: x, max_batch_weight=9),
        unbounded=unbounded,
    )
    # 9 is full; 99 goes alone; three elements are full.
    assert values(outputs) == [[1, 3], [2, 2, 2], [4, 5], [99]]


@MODES
def test_an_infinite_weight_goes_alone(unbounded):
    outputs = batches_of(
        at_zero([1, math.inf, 2]),
        fixed(9, key_fn=lambda x: 0, element_size_fn=lambda x: x, max_batch_weight=5),
        unbounded=unbounded,
    )
    assert [math.inf] in [output.value for output in outputs]
    assert sorted(x for output in outputs for x in output.value) == [1, 2, math.inf]


@MODES
def test_element_size_counts_towards_the_batch_size_without_a_weight(unbounded):
    outputs = batches_of(
        at_zero([4, 5, 1, 3, 99, 2]),
        fixed(9, key_fn=lambda x: 0, element_size_fn=lambda x: x),
        unbounded=unbounded,
    )
    assert values(outputs) == [[1, 3], [2], [4, 5], [99]]


@pytest.mark.parametrize("seconds", [None, 1])
def test_weight_without_a_key(seconds):
    outputs = batches_of(
        at_zero([4, 5, 1, 3, 99, 2, 2, 2]),
        fixed(
            3,
            element_size_fn=lambda x: x,
            max_batch_weight=9,
            max_batch_duration_secs=seconds,
        ),
    )
    assert values(outputs) == [[1, 3], [2, 2, 2], [4, 5], [99]]


@MODES
def test_shards_part_a_key(unbounded):
    outputs = batches_of(
        at_zero(range(200)),
        fixed(200, key_fn=lambda x: x < 100, num_shards={True: 4}),
        unbounded=unbounded,
    )
    assert len([batch for batch in values(outputs) if batch[0] < 100]) == 4
    assert [len(batch) for batch in values(outputs) if batch[0] >= 100] == [100]


@MODES
def test_batch_size_grows_per_key_with_the_measured_time(unbounded):
    # Downstream time is mostly fixed cost, so that larger batches pay.
    now = [0.0]

    def process(batch):
        now[0] += 1.0 + 0.001 * len(batch)
        return batch

    outputs = batches_of(
        at_zero(("a", i) for i in range(500)),
        _Then(
            BatchElements(
                1, 64, key_fn=lambda pair: pair[0], clock=lambda: now[0], record_metrics=False
            ),
            process,
        ),
        unbounded=unbounded,
    )
    sizes = [len(output.value) for output in outputs]
    assert sizes[0] == 1
    assert max(sizes) == 64


class _Then(beam.PTransform):
    def __init__(self, batching, function):
        super().__init__()
        self.batching, self.function = batching, function

    def expand(self, pcoll):
        return pcoll | self.batching | beam.Map(self.function)


@MODES
@pytest.mark.parametrize("trigger_early", [False, True])
def test_triggers_of_the_input_do_not_part_or_repeat_batches(unbounded, trigger_early):
    trigger = beam.transforms.trigger.Repeatedly(beam.transforms.trigger.AfterCount(1))
    windows = beam.WindowInto(
        window.FixedWindows(10),
        trigger=trigger if trigger_early else None,
        accumulation_mode=beam.transforms.trigger.AccumulationMode.ACCUMULATING
        if trigger_early
        else None,
    )
    collect = Collect()
    with beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        elements = pipeline | beam.Create(range(6)) | windows
        if unbounded:
            elements |= Unbounded()
        batches = elements | fixed(4, key_fn=lambda x: 0)
        assert batches.windowing == elements.windowing
        _ = batches | "Collect" >> beam.ParDo(collect)
    assert sorted(len(output.value) for output in collect.outputs) == [2, 4]


@MODES
def test_merging_windows_are_kept_as_they_are(unbounded, caplog):
    outputs = batches_of(
        [("a", 1), ("b", 2), ("c", 2)],
        fixed(10, key_fn=lambda x: 0),
        windows=window.Sessions(10),
        unbounded=unbounded,
    )
    assert values(outputs) == [["a"], ["b", "c"]]
    assert outputs[0].window.end - outputs[0].window.start == 10
    assert "merges windows" in caplog.text


# Rows with their own timestamps


@MODES
def test_rows_keep_timestamp_and_window(unbounded):
    outputs = batches_of(
        [(("k", f"r{at}"), at) for at in (3, 1, 12, 5)],
        BatchByKey(max_batch_size=10),
        windows=window.FixedWindows(10),
        unbounded=unbounded,
    )
    batches = sorted((value[0], sorted(value[1]), at, win.start) for value, at, win in outputs)
    assert batches == [
        ("k", [("r1", 1), ("r3", 3), ("r5", 5)], Timestamp(1), Timestamp(0)),
        ("k", [("r12", 12)], Timestamp(12), Timestamp(10)),
    ]


def test_bounded_groups_are_split_only_above_a_batch():
    outputs = batches_of(
        at_zero([("a", i) for i in range(6)] + [("b", i) for i in range(9)]),
        BatchByKey(max_batch_size=6, num_shards=8),
    )
    sizes = sorted((key, len(rows)) for (key, rows), _, _ in outputs)
    assert sizes == [("a", 6), ("b", 3), ("b", 6)]


def test_weight_of_rows():
    outputs = batches_of(
        at_zero([("a", text) for text in ("xx", "xxx", "x", "xxxxxxxxxx")]),
        BatchByKey(max_batch_size=6, max_batch_weight=5, element_size_fn=len, reshuffle=False),
    )
    assert sorted([text for text, _ in rows] for (_, rows), _, _ in outputs) == [
        ["x"],
        ["xx", "xxx"],
        ["xxxxxxxxxx"],
    ]


# Properties

WINDOWS = st.sampled_from(
    [window.GlobalWindows(), window.FixedWindows(10), window.SlidingWindows(10, 5)]
)
ELEMENTS = st.lists(
    st.tuples(
        st.tuples(st.sampled_from(["a", 1, True, None, (1, "b")]), st.integers(0, 9)),
        st.integers(0, 29),
    ),
    max_size=25,
)
slow = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def _in_windows(elements, windows):
    """Each element once per window it is in."""
    context = window.WindowFn.AssignContext
    return collections.Counter(
        (value, win) for value, at in elements for win in windows.assign(context(Timestamp(at)))
    )


@MODES
@slow
@given(
    elements=ELEMENTS,
    windows=WINDOWS,
    shards=st.sampled_from([1, 3, {"a": 2, "(1, 'b')": 5}]),
    sizes=st.tuples(st.integers(1, 6), st.integers(0, 6)),
    max_weight=st.none() | st.integers(1, 20),
)
def test_batches_are_a_partition(unbounded, elements, windows, shards, sizes, max_weight):
    least, most = sizes[0], sum(sizes)
    outputs = batches_of(
        elements,
        BatchElements(
            least,
            most,
            key_fn=lambda pair: pair[0],
            num_shards=shards,
            max_batch_weight=max_weight,
            **({} if max_weight is None else {"element_size_fn": lambda pair: pair[1]}),
        ),
        windows=windows,
        unbounded=unbounded,
    )
    got = collections.Counter(
        (element, output.window) for output in outputs for element in output.value
    )
    assert got == _in_windows(elements, windows)
    for batch, at, win in outputs:
        assert len({pair[0] for pair in batch}) == 1
        assert 1 <= len(batch) <= most
        assert at == win.max_timestamp()
        weight = sum(pair[1] for pair in batch)
        assert max_weight is None or weight <= max_weight or len(batch) == 1


@MODES
@slow
@given(
    elements=ELEMENTS,
    windows=WINDOWS,
    size=st.integers(1, 6),
    max_weight=st.none() | st.integers(1, 20),
)
def test_batches_of_rows_are_a_partition(unbounded, elements, windows, size, max_weight):
    outputs = batches_of(
        [((pair[0], (*pair, at)), at) for pair, at in elements],
        BatchByKey(
            max_batch_size=size,
            num_shards=2,
            max_batch_weight=max_weight,
            element_size_fn=None if max_weight is None else (lambda row: row[1]),
        ),
        windows=windows,
        unbounded=unbounded,
    )
    got = collections.Counter(
        ((row[:2], row[2]), output.window) for output in outputs for row, _ in output.value[1]
    )
    given_rows = [((pair, at), at) for pair, at in elements]
    assert got == _in_windows(given_rows, windows)
    for (key, rows), at, _ in outputs:
        assert {row[0] for row, _ in rows} == {key}
        assert all(row[2] == stamp for row, stamp in rows)
        assert at == min(stamp for _, stamp in rows)
        assert len(rows) <= size
        weight = sum(row[1] for row, _ in rows)
        assert max_weight is None or weight <= max_weight or len(rows) == 1


# Metrics


def test_metrics_say_why_batches_left():
    pipeline = beam.Pipeline(runner=FN_API_RUNNER)
    _ = pipeline | beam.Create([1] * 7 + [8, 9]) | BatchElements(
        5, 5, key_fn=lambda x: 0, element_size_fn=lambda x: x, max_batch_weight=9
    )  # fmt: skip
    result = pipeline.run()
    result.wait_until_finish()
    counters = {name: value for name, value in counter_values(result).items() if value}
    # Five ones; two ones, which 8 would make too heavy; 8, and 9 as heavy as allowed.
    assert counters == {"batches": 4, "flush_full": 1, "flush_weight": 3}
    (distribution,) = [
        metric.committed
        for metric in result.metrics().query()["distributions"]
        if metric.key.metric.name == "elements_per_key"
    ]
    assert (distribution.count, distribution.sum) == (1, 9)


# What fails


def _key_but_not_of_three(x):
    if x == 3:
        raise LookupError("no key for three")
    return 0


def test_a_failing_key_function_names_element_and_function():
    with pytest.raises(
        KeyFunctionError,
        match=r"key_fn _key_but_not_of_three failed: LookupError: no key for three; element: 3",
    ):
        batches_of(at_zero(range(5)), fixed(2, key_fn=_key_but_not_of_three))


def test_a_long_element_is_shortened_in_the_message():
    with pytest.raises(KeyFunctionError) as error:
        WithBatchKey(len).process(_Unsized("x" * 10_000))
    assert len(str(error.value)) < 500


class _Unsized(str):
    def __len__(self):
        raise ValueError("no length")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"key_fn": lambda x: object()}, "a batch key cannot be a builtins.object"),
        ({"key_fn": str, "num_shards": lambda key: 0}, "num_shards .* '1': 0 is less than"),
        ({"key_fn": str, "num_shards": lambda key: True}, "True is a bool"),
        (
            {"key_fn": str, "element_size_fn": lambda x: "heavy", "max_batch_weight": 1},
            "element_size_fn .* gave 'heavy'",
        ),
        (
            {"key_fn": str, "element_size_fn": lambda x: -1, "max_batch_weight": 1},
            "element_size_fn .* gave -1",
        ),
        (
            {"key_fn": str, "element_size_fn": lambda x: 1 / 0, "max_batch_weight": 1},
            "element_size_fn .* failed: ZeroDivisionError",
        ),
    ],
)
def test_failing_functions_are_named(arguments, said):
    with pytest.raises(KeyFunctionError, match=said):
        batches_of([(1, 0)], BatchElements(**arguments))


@MODES
def test_an_element_that_fails_goes_alone_to_the_error_output(unbounded):
    collect, failed = Collect(), Collect()
    with beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        elements = pipeline | beam.Create(range(5))
        if unbounded:
            elements |= Unbounded()
        batches, bad = elements | fixed(10, key_fn=_key_but_not_of_three).with_exception_handling()
        _ = batches | "Collect" >> beam.ParDo(collect)
        _ = bad | "CollectBad" >> beam.ParDo(failed)
    assert values(collect.outputs) == [[0, 1, 2, 4]]
    ((element, (error, message, trace)),) = [output.value for output in failed.outputs]
    assert (element, error) == (3, KeyFunctionError)
    assert "no key for three" in message
    assert any("LookupError" in line for line in trace)


# What is rejected at construction


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"num_shards": 2}, ValueError, "num_shards: 2 needs key_fn; allowed without it: 1"),
        ({"num_shards": {}}, ValueError, "num_shards: {} needs key_fn"),
        ({"key_fn": "x"}, TypeError, "key_fn: 'x' is not callable"),
        ({"key_fn": len, "length_fn": len}, ValueError, "cannot go together with key_fn"),
        ({"key_fn": len, "num_shards": 0}, ValueError, "num_shards: 0 is less than the minimum"),
        ({"key_fn": len, "num_shards": -1}, ValueError, "num_shards: -1 is less than"),
        ({"key_fn": len, "num_shards": True}, TypeError, "num_shards: True is a bool"),
        ({"key_fn": len, "num_shards": 2.0}, TypeError, "num_shards: 2.0 is a float; allowed: an"),
        ({"key_fn": len, "num_shards": "2"}, TypeError, "num_shards: '2' is a str"),
        ({"key_fn": len, "num_shards": None}, TypeError, "num_shards: None is a NoneType"),
        ({"key_fn": len, "num_shards": {"a": 0}}, ValueError, r"num_shards\['a'\]: 0 is less"),
        ({"key_fn": len, "max_batch_weight": 5}, ValueError, "5 needs element_size_fn"),
        (
            {"key_fn": len, "max_batch_weight": 0, "element_size_fn": len},
            ValueError,
            "max_batch_weight: 0 is out of bounds; allowed: a number above 0",
        ),
        ({"key_fn": len, "max_batch_duration_secs": -1}, ValueError, "-1 is out of bounds"),
        ({"key_fn": len, "max_batch_duration_secs": "1"}, TypeError, "'1' is a str"),
        ({"key_fn": len, "max_batch_duration_secs": float("nan")}, ValueError, "nan is out"),
        ({"key_fn": len, "min_batch_size": 0}, ValueError, "min_batch_size: 0 is less than"),
        ({"key_fn": len, "max_batch_size": 2.5}, TypeError, "max_batch_size: 2.5 is a float"),
        ({"key_fn": len, "min_batch_size": 5, "max_batch_size": 4}, ValueError, "Minimum"),
    ],
)
def test_wrong_arguments_are_rejected_at_construction(arguments, error, said):
    with pytest.raises(error, match=said):
        BatchElements(**arguments)


def test_exception_handling_without_anything_of_ours_is_rejected():
    with pytest.raises(ValueError, match="with_exception_handling"):
        BatchElements().with_exception_handling()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"max_batch_size": 0}, ValueError, "max_batch_size: 0"),
        ({"max_batch_size": 1, "num_shards": 0}, ValueError, "num_shards: 0"),
        ({"max_batch_size": 1, "num_shards": 10**30}, ValueError, "greater than the maximum"),
        ({"max_batch_size": 1, "element_size_fn": len}, ValueError, "needs max_batch_weight"),
        ({"max_batch_size": 1, "max_batch_weight": 2}, ValueError, "needs element_size_fn"),
        ({"max_batch_size": 9, "latencies": BatchLatencies()}, ValueError, "needs min_batch_size"),
        (
            {"max_batch_size": 2, "min_batch_size": 9, "latencies": BatchLatencies()},
            ValueError,
            "Minimum",
        ),
    ],
)
def test_wrong_arguments_of_batch_by_key_are_rejected(arguments, error, said):
    with pytest.raises(error, match=said):
        BatchByKey(**arguments)


def test_handlers_have_their_own_names_in_messages():
    with pytest.raises(ValueError, match="batch_key_num_shards: 2 needs batch_key_fn"):
        validate_keyed_batching(None, 2, prefix="batch_")
    with pytest.raises(ValueError, match="shards_per_prefix: 0"):
        validate_shards(0, "shards_per_prefix")


# Shards


@pytest.mark.parametrize(
    ("num_shards", "key", "count"),
    [
        (3, "a", 3),
        ({"a": 2}, "a", 2),
        ({"a": 2}, "b", 1),
        ({"['a']": 2}, ["a"], 2),
        ({}, ["a"], 1),
        (len, "abc", 3),
    ],
)
def test_shards_of_a_key(num_shards, key, count):
    assert shard_counter(num_shards)(key) == count


def test_batch_keys_differ_in_the_shard_alone():
    keyed = WithBatchKey(lambda x: "k", 4)
    got = {key for _ in range(200) for key, _ in keyed.process("x")}
    assert len(got) == 4
    assert {key[8:] for key in got} == {b"sk"}


# The same as Beam's without key_fn


def test_parameters_are_a_superset_of_beams():
    theirs = inspect.signature(beam.BatchElements.__init__).parameters
    ours = inspect.signature(BatchElements.__init__).parameters
    assert isinstance(BatchElements(), beam.BatchElements)
    for name, parameter in theirs.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(ours).index(name) == list(theirs).index(name)
            assert ours[name].default == parameter.default
        elif name != "self":
            BatchElements(**{name: parameter.default})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"min_batch_size": 3, "max_batch_size": 3},
        {"min_batch_size": 9, "max_batch_size": 9, "element_size_fn": lambda x: x},
        {"min_batch_size": 3, "max_batch_size": 3, "max_batch_duration_secs": 0},
    ],
)
def test_without_key_it_is_beams(arguments):
    elements = at_zero(range(10))
    ours = batches_of(elements, BatchElements(**arguments))
    theirs = batches_of(elements, beam.BatchElements(**arguments))
    assert ours == theirs


def test_elements_need_only_their_coder():
    collect = Collect()
    with beam.Pipeline(runner=FN_API_RUNNER) as pipeline:
        _ = (
            pipeline
            | beam.Create([1, 2])
            | beam.Map(_Unpicklable).with_output_types(_Unpicklable)
            | fixed(2, key_fn=lambda x: 0)
            | beam.Map(lambda batch: [element.number for element in batch])
            | "Collect" >> beam.ParDo(collect)
        )
    assert values(collect.outputs) == [[1, 2]]


class _Unpicklable:
    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        raise pickle.PicklingError("no")


class _UnpicklableCoder(beam.coders.Coder):
    def encode(self, value):
        return b"%d" % value.number

    def decode(self, encoded):
        return _Unpicklable(int(encoded))

    def is_deterministic(self):
        return True


beam.coders.registry.register_coder(_Unpicklable, _UnpicklableCoder)

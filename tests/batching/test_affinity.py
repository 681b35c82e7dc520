"""Where keys meet when there are several worker processes."""

import collections
import itertools
import json
import os
import pathlib
import time

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from running import FN_API_RUNNER, Unbounded

from beam_llm.batching import BatchByKey, BatchElements

pytestmark = [
    # Beam leaves the pipes of its worker processes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Record(beam.DoFn):
    """Writes for each batch its key, its elements, its process and when it was there."""

    def __init__(self, folder, key_of):
        self.folder, self.key_of = str(folder), key_of

    def process(self, batch):
        start = time.time()
        time.sleep(0.02)
        line = json.dumps([self.key_of(batch), os.getpid(), start, time.time(), repr(batch)])
        with (pathlib.Path(self.folder) / str(os.getpid())).open("a") as lines:
            lines.write(line + "\n")


def key_of_first(batch):
    return batch[0][0]


def key_of_pair(batch):
    return batch[0]


def run(tmp_path, monkeypatch, elements, transform, key_of=key_of_first, unbounded=False):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    options = PipelineOptions(direct_running_mode="multi_processing", direct_num_workers=2)
    with beam.Pipeline(runner=FN_API_RUNNER, options=options) as pipeline:
        source = pipeline | beam.Create(elements)
        if unbounded:
            source |= Unbounded()
        _ = source | transform | beam.ParDo(Record(tmp_path, key_of))
    by_key = collections.defaultdict(list)
    for path in tmp_path.iterdir():
        for line in path.read_text().splitlines():
            key, *rest = json.loads(line)
            by_key[key].append(rest)
    return by_key


def processes(records):
    return {pid for pid, *_ in records}


def assert_one_process_at_a_time(records):
    intervals = sorted((start, end, pid) for pid, start, end, _ in records)
    for (_, end, pid), (start, _, next_pid) in itertools.pairwise(intervals):
        assert pid == next_pid or end <= start


def test_a_key_is_in_one_process_at_a_time_and_shards_spread_a_hot_one(tmp_path, monkeypatch):
    elements = [(f"k{i % 12}", i) for i in range(240)] + [("hot", i) for i in range(160)]
    batching = BatchElements(5, 5, key_fn=key_of_pair, num_shards={"hot": 8})
    by_key = run(tmp_path, monkeypatch, elements, batching)
    assert len(processes(by_key.pop("hot"))) == 2
    assert len(by_key) == 12
    assert len(set().union(*map(processes, by_key.values()))) == 2
    for records in by_key.values():
        assert len(records) == 4
        assert_one_process_at_a_time(records)


def test_a_key_in_state_is_in_one_process_at_a_time(tmp_path, monkeypatch):
    # The direct runner keeps a stateful step in one process altogether.
    elements = [(f"k{i % 12}", i) for i in range(240)]
    batching = BatchElements(5, 5, key_fn=key_of_pair)
    by_key = run(tmp_path, monkeypatch, elements, batching, unbounded=True)
    assert len(by_key) == 12
    for records in by_key.values():
        assert len(records) == 4
        assert_one_process_at_a_time(records)


def test_batches_of_rows_of_a_hot_key_spread(tmp_path, monkeypatch):
    elements = [("hot", i) for i in range(160)]
    by_key = run(tmp_path, monkeypatch, elements, BatchByKey(max_batch_size=5), key_of_pair)
    assert len(by_key["hot"]) == 32
    assert len(processes(by_key["hot"])) == 2

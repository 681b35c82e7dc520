"""What the stateful DoFn leaves behind, seen at the level of its state and timers."""

import pickle

from apache_beam import coders
from apache_beam.transforms import window
from apache_beam.utils.timestamp import Timestamp

from beam_llm import runs
from beam_llm.batch_sizes import Estimator

GLOBAL = window.GlobalWindow()


class Bag(list):
    def read(self):
        return list(self)

    def add(self, value):
        self.append(pickle.loads(pickle.dumps(value)))


class Timer:
    """Remembers when it is set for, and at which element's timestamp, as Beam's does."""

    def __init__(self):
        self.at = self.hold = None
        self.now = None

    def set(self, at):
        self.at, self.hold = at, self.now

    def clear(self):
        self.at = self.hold = None


class Cell:
    """The stateful DoFn with the state of one key and window."""

    def __init__(self, size=3, **rules):
        self.clock = 100.0
        estimator = Estimator(size, size, record_metrics=False)
        rules = runs.Rules(estimator=estimator, clock=lambda: self.clock, **rules)
        self.fn = runs.buffering(rules, 1.0, coders.FastPrimitivesCoder())
        self.fn.setup()
        self.runs, self.held, self.window_timer, self.due = Bag(), Bag(), Timer(), Timer()

    def add(self, *values, at=0, weights=None):
        stamp = Timestamp(at)
        self.window_timer.now = self.due.now = stamp
        run = (None, list(values), None, weights)
        outputs = self.fn.process(
            (b"\0" * 8 + b"k", run),
            stamp,
            GLOBAL,
            self.runs,
            self.held,
            self.window_timer,
            self.due,
        )
        return [output.value for output in outputs]

    def fire(self):
        outputs = self.fn.when_due(
            b"\0" * 8 + b"k", GLOBAL, self.runs, self.held, self.window_timer
        )
        self.due.clear()
        return [output.value for output in outputs]

    def is_empty(self):
        return (
            not self.runs and not self.held and self.due.at is None and self.window_timer.at is None
        )


def test_nothing_is_left_after_a_full_batch():
    cell = Cell()
    assert cell.add("a", "b", "c") == [["a", "b", "c"]]
    assert cell.is_empty()
    assert cell.add("a", "b") == []
    assert not cell.is_empty()
    assert cell.add("c", "d", "e", "f") == [["a", "b", "c"], ["d", "e", "f"]]
    assert cell.is_empty()


def test_nothing_is_left_after_a_flush():
    cell = Cell()
    cell.add("a")
    assert cell.due.at == 101.0
    assert cell.window_timer.at == GLOBAL.max_timestamp()
    assert cell.fire() == [["a"]]
    assert cell.is_empty()
    assert cell.fire() == []


def test_the_earliest_waiting_element_holds_the_watermark_until_it_leaves():
    cell = Cell()
    cell.add("a", at=5)
    cell.clock = 100.5
    cell.add("b", at=2)
    assert (cell.due.at, cell.due.hold) == (101.0, Timestamp(2))
    assert cell.add("c", "d", at=7) == [["a", "b", "c"]]
    assert (cell.due.at, cell.due.hold) == (101.5, Timestamp(7))


def test_long_waits_do_not_grow_the_bookkeeping():
    cell = Cell(size=1000)
    for i in range(500):
        cell.add(i, at=500 - i)
    assert len(cell.held) <= runs._MAX_HELD_ENTRIES
    assert cell.due.hold == Timestamp(1)
    assert cell.fire() == [list(range(500))]


def test_weights_add_up_over_runs():
    cell = Cell(size=100, weigh=len, max_weight=10)
    assert cell.add("a", "b", weights=[4, 4]) == []
    assert cell.add("c", "d", weights=[4, 11]) == [["a", "b"], ["c"], ["d"]]
    assert cell.is_empty()


def test_a_size_that_shrank_meanwhile_loses_nothing():
    cell = Cell(size=10)
    cell.add(*range(8))
    cell.fn._sizes.of(b"k")._next = 4
    assert cell.add(8, 9) == [list(range(8))]
    assert cell.held[-1][0] == 2

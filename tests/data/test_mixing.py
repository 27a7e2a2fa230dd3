import random
from collections import Counter
from itertools import islice

import pytest

from titanlite.data.mixing import Turns, mixed_rows
from titanlite.data.packing import Documents, split_rows
from titanlite.data.tokenizer import ByteTokenizer

WEIGHTS = [[1.0], [1, 1], [0.7, 0.3], [5, 1, 1], [0.1, 0.2, 0.7], [0.4, 0.3, 0.29, 0.01], [1e-3, 1], [3.3] * 7, [2.0**-i for i in range(12)]]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_any_window_holds_each_source_by_its_weight(weights):
    turns, total = Turns(weights), sum(weights)
    ahead = [[0.0] * len(weights)]  # of its share, after each row
    for n in range(4000):
        source = turns(n)
        ahead.append([a + (i == source) - w / total for i, (a, w) in enumerate(zip(ahead[-1], weights, strict=True))])
    for of_source in zip(*ahead, strict=True):
        assert max(map(abs, of_source)) < 2
        assert max(of_source) - min(of_source) < 4


def test_turns_stay_exact_however_far_a_run_has_got():
    turns, far = Turns([0.1, 0.9]), 10**15
    assert Counter(turns(far + n) for n in range(1000)) == {0: 100, 1: 900}


def test_turns_never_change_between_versions():
    assert [Turns([0.5, 0.3, 0.2])(n) for n in range(10)] == FIRST_TURNS


FIRST_TURNS = [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]

N_ROWS, SEQ_LEN = 6, 16
BYTES = ByteTokenizer()


@pytest.fixture
def mix(source_of):
    """Rows of a mixture of three sources whose documents are told by their characters."""
    draw = random.Random(1)
    sources = [source_of([letter * draw.randint(1, 40) for _ in range(50)]) for letter in "abc"]

    def rows(row, start=None):
        start = start or [row, 0, 0] * 3 + [0]
        documents = [Documents(source, BYTES, seed) for seed, source in enumerate(sources)]
        streams = [split_rows(d, SEQ_LEN, start=tuple(start[3 * i : 3 * i + 3]), stride=N_ROWS) for i, d in enumerate(documents)]
        return mixed_rows(streams, Turns([0.5, 0.3, 0.2]), row, N_ROWS, 0, start)

    return rows


def test_a_row_holds_documents_of_one_source_and_steps_hold_sources_by_their_weight(mix):
    steps = list(islice(zip(*(mix(row) for row in range(N_ROWS)), strict=True), 100))
    found = [Counter(chr(max(t for t in row.fields[0] if t < 256)) for row, _ in step) for step in steps]
    assert sum(found, Counter()) == {"a": 300, "b": 180, "c": 120}
    for step in steps:
        for row, _ in step:
            assert len(set(row.fields[0]) - {BYTES.end_id}) == 1
    for step, n in enumerate(found, 1):
        assert sum(n.values()) == N_ROWS and abs(sum(found[:step], Counter())["b"] - 0.3 * N_ROWS * step) < 2


def test_every_row_gets_every_source(mix):
    """Dealt in turn, sources of equal weight would each keep to the same rows for ever, and leave documents of the others unread."""
    for row in range(N_ROWS):
        letters = Counter(chr(max(t for t in found.fields[0] if t < 256)) for found, _ in islice(mix(row), 200))
        assert letters["a"] > 70 and letters["b"] > 35 and letters["c"] > 20  # 100, 60, 40 expected: more than 4 standard deviations off


def test_a_mixture_goes_on_from_the_state_after_any_row(mix):
    undisturbed = list(islice(mix(2), 60))
    for stop in range(0, 57, 3):
        for (expected, state), (row, after) in zip(undisturbed[stop + 1 : stop + 4], mix(2, list(undisturbed[stop][1])), strict=False):
            assert (row.fields == expected.fields).all() and after == state

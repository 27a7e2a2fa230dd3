from collections import Counter
from itertools import islice

import numpy as np
import pytest

from titanlite.batch import IGNORE
from titanlite.data.order import shuffled_index
from titanlite.data.packing import packed_rows
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.utils import ConfigError

SEQ_LEN = 32
BYTES = ByteTokenizer()
END = BYTES.end_id


class BareTokenizer(ByteTokenizer):
    """No marks, so that documents may have no tokens at all."""

    def encode_document(self, text):
        return np.frombuffer(text.encode(), np.uint8)


def pairs_of(text):
    ids = [END, *text.encode(), END]
    return list(zip(ids, ids[1:], strict=False))


def stream_pairs(texts, stream, stride, seed):
    """(token, label, first of its document) of a stream without end, by the definition."""
    counter = stream
    while True:
        epoch, i = divmod(counter, len(texts))
        text = texts[shuffled_index(i, len(texts), seed=seed, epoch=epoch)]
        for j, (token, label) in enumerate(pairs_of(text)):
            yield token, label, j == 0
        counter += stride


def reference_row(pairs):
    """One row of `SEQ_LEN` pairs, element by element."""
    rows = []
    for token, label, first in islice(pairs, SEQ_LEN):
        if not rows:
            position, document = 0, 0
        elif first:
            position, document = 0, rows[-1][3] + 1
        else:
            position, document = rows[-1][2] + 1, rows[-1][3]
        rows.append((token, label, position, document))
    return np.array(rows).T


@pytest.mark.parametrize("stream", range(3))
def test_rows_are_what_the_definition_says(source, texts, stream):
    pairs = stream_pairs(texts, stream, 3, seed=5)
    for row in islice(packed_rows(source, BYTES, SEQ_LEN, start=(stream, 0), stride=3, seed=5), 60):
        np.testing.assert_array_equal(row.fields, reference_row(pairs))


def test_the_streams_of_an_epoch_hold_every_pair_of_every_document_once(source, texts):
    n_streams, n = 4, len(texts)
    seen, left = Counter(), Counter()
    for stream in range(n_streams):
        for row in packed_rows(source, BYTES, SEQ_LEN, start=(stream, 0), stride=n_streams, seed=1):
            counter, used = row.after
            seen.update(zip(*row.fields[:2].tolist(), strict=True))
            if counter >= n:  # of the second epoch the row holds the documents before `counter`, and some of its pairs
                second = [c for c in range(n, counter + 1) if c % n_streams == stream]
                for c in second:
                    pairs = pairs_of(texts[shuffled_index(c - n, n, seed=1, epoch=1)])
                    left.update(pairs[:used] if c == counter else pairs)
                break
    assert seen - left == Counter(pair for text in texts for pair in pairs_of(text))


def test_a_label_is_the_next_token_and_never_crosses_documents(source):
    for row in islice(packed_rows(source, BYTES, SEQ_LEN, seed=0), 50):
        tokens, labels, positions, documents = row.fields
        inside = documents[1:] == documents[:-1]
        assert (labels[:-1] == tokens[1:])[inside].all()
        assert (labels[:-1] == END)[~inside].all()  # the last label of a document is its end
        assert (tokens[1:] == END)[~inside].all()  # and the first token of the next its begin
        assert (positions[1:][inside] == positions[:-1][inside] + 1).all()
        assert positions[0] == 0 and (positions[1:][~inside] == 0).all()
        assert set(np.diff(documents)) <= {0, 1}


def test_a_document_longer_than_a_row_goes_on_in_the_next_as_a_new_segment(source_of):
    text = "x" * 70
    first, second, third = islice(packed_rows(source_of([text]), BYTES, SEQ_LEN, seed=0), 3)
    assert first.after == (0, 32) and second.after == (0, 64)
    assert first.fields[0].tolist() == [END] + [ord("x")] * 31
    assert second.fields[2].tolist() == list(range(32)) and not second.fields[3].any()
    assert third.fields[1].tolist()[:7] == [ord("x")] * 6 + [END]
    assert third.fields[3].tolist() == [0] * 7 + [1] * 25


def test_a_stream_goes_on_from_the_state_after_any_row(source):
    undisturbed = list(islice(packed_rows(source, BYTES, SEQ_LEN, start=(1, 0), stride=3, seed=2), 80))
    assert undisturbed[-1].after[0] > 2 * len(source)  # that is over two ends of an epoch
    for stop in range(80):
        resumed = packed_rows(source, BYTES, SEQ_LEN, start=undisturbed[stop].after, stride=3, seed=2)
        for expected, row in zip(undisturbed[stop + 1 : stop + 4], resumed, strict=False):
            np.testing.assert_array_equal(row.fields, expected.fields)
            assert row.after == expected.after


def test_without_a_seed_there_is_one_pass_in_the_natural_order_and_padding_at_its_end(source, texts):
    rows = [row.fields for row in packed_rows(source, BYTES, SEQ_LEN)]
    tokens, labels, positions, documents = np.concatenate(rows, axis=1)
    expected = [pair for text in texts for pair in pairs_of(text)]
    real, padded = len(expected), len(tokens) - len(expected)
    assert 0 < padded < SEQ_LEN
    assert list(zip(tokens[:real].tolist(), labels[:real].tolist(), strict=True)) == expected
    assert (labels[:real] != IGNORE).all() and (labels[real:] == IGNORE).all() and (tokens[real:] == END).all()
    assert positions[real:].tolist() == list(range(padded))
    assert (documents[real:] == documents[real - 1] + 1).all()


def test_data_that_fill_their_rows_exactly_need_no_padding(source_of):
    (row,) = packed_rows(source_of(["x" * 15, "y" * 15]), BYTES, SEQ_LEN)
    assert (row.fields[1] != IGNORE).all()


def test_documents_without_a_pair_are_passed_over(source_of):
    bare = BareTokenizer()
    rows = list(packed_rows(source_of(["", "abc", "x", "", "de", ""]), bare, 4))
    assert [row.fields[0].tolist() for row in rows] == [[97, 98, 100, END]]
    assert rows[0].fields[1].tolist() == [98, 99, 101, IGNORE]


@pytest.mark.parametrize("seed", [None, 0])
def test_data_without_any_pair_are_refused(source_of, seed):
    with pytest.raises(ConfigError, match="none of the data's 3 documents has two tokens"):
        next(packed_rows(source_of(["", "x", ""]), BareTokenizer(), 4, seed=seed))


def test_an_error_of_reading_names_the_document(source_of):
    rows = packed_rows(source_of(["fine", OSError("the disk is gone")]), BYTES, SEQ_LEN)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(rows)
    assert caught.value.__notes__ == ["while reading document 1, text 1 of the list"]

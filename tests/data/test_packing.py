from collections import Counter
from itertools import islice

import numpy as np
import pytest

from titanlite.batch import IGNORE
from titanlite.data.order import shuffled_index
from titanlite.data.packing import WINDOW, Documents, best_fit_rows, split_rows
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.utils import ConfigError

SEQ_LEN = 32
PACKINGS = pytest.mark.parametrize("pack", [split_rows, best_fit_rows])
BYTES = ByteTokenizer()
END = BYTES.end_id


def packed_rows(source, tokenizer, seq_len, *, start=(0, 0), stride=1, seed=None, epochs=None, pack=split_rows):
    return pack(Documents(source, tokenizer, seed, epochs), seq_len, start=(*start, 0)[:3], stride=stride)


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
            counter, used, _ = row.after
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
    assert first.after == (0, 32, 0) and second.after == (0, 64, 0)
    assert first.fields[0].tolist() == [END] + [ord("x")] * 31
    assert second.fields[2].tolist() == list(range(32)) and not second.fields[3].any()
    assert third.fields[1].tolist()[:7] == [ord("x")] * 6 + [END]
    assert third.fields[3].tolist() == [0] * 7 + [1] * 25


@PACKINGS
def test_a_stream_goes_on_from_the_state_after_any_row(source, pack):
    undisturbed = list(islice(packed_rows(source, BYTES, SEQ_LEN, start=(1, 0), stride=3, seed=2, pack=pack), 80))
    assert undisturbed[-1].after[0] > 2 * len(source)  # that is over two ends of an epoch
    assert pack is split_rows or any(row.after[2] for row in undisturbed)
    for stop in range(80):
        resumed = packed_rows(source, BYTES, SEQ_LEN, start=undisturbed[stop].after, stride=3, seed=2, pack=pack)
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


@PACKINGS
@pytest.mark.parametrize("seed", [None, 0])
def test_data_without_any_pair_are_refused(source_of, seed, pack):
    with pytest.raises(ConfigError, match="none of the data's 3 documents has two tokens"):
        next(packed_rows(source_of(["", "x", ""]), BareTokenizer(), 4, seed=seed, pack=pack))


@PACKINGS
@pytest.mark.parametrize("stride", [1, 3, 64])
def test_documents_that_end_give_every_pair_once_and_leave_each_stream_at_their_end(source, texts, stride, pack):
    epochs, seen = 2, Counter()
    for stream in range(stride):
        rows = list(packed_rows(source, BYTES, SEQ_LEN, start=(stream, 0), stride=stride, seed=1, epochs=epochs, pack=pack))
        for fields, _ in rows:
            trained = fields[1] != IGNORE
            assert trained.any()
            seen.update(zip(*fields[:2, trained].tolist(), strict=True))
        after = rows[-1].after
        assert after[0] >= epochs * len(texts) > after[0] - stride and after[1:] == (0, 0)
    assert seen == Counter(pair for text in texts for pair in pairs_of(text) for _ in range(epochs))


@PACKINGS
def test_a_document_without_a_pair_at_the_end_makes_no_row(source_of, pack):
    (row,) = packed_rows(source_of(["abc", "", "x"]), BareTokenizer(), 4, pack=pack)
    assert row.after == (3, 0, 0)


def test_best_fit_cuts_no_document_that_fits_a_row(source, texts):
    whole = Counter(tuple(pairs_of(text)) for text in texts if len(pairs_of(text)) <= SEQ_LEN)
    found = Counter()
    for fields, _ in packed_rows(source, BYTES, SEQ_LEN, seed=3, epochs=1, pack=best_fit_rows):
        for segment in range(fields[3].max() + 1):
            tokens, labels, positions, _ = fields[:, (fields[3] == segment) & (fields[1] != IGNORE)]
            assert positions.tolist() == list(range(len(tokens)))
            found[tuple(zip(tokens.tolist(), labels.tolist(), strict=True))] += 1
    assert all(found[pairs] >= n for pairs, n in whole.items()) and whole


def test_best_fit_takes_the_oldest_document_then_the_longest_that_fits(source_of):
    lengths = [20, 30, 9, 11, 10, 4]  # characters; a document has one pair more
    rows = list(packed_rows(source_of(["x" * n for n in lengths]), BYTES, SEQ_LEN, pack=best_fit_rows))
    cut = [[int((row.fields[3] == i).sum()) for i in range(row.fields[3].max() + 1)] for row in rows]
    assert cut == [[21, 11], [31, 1], [10, 12, 5, 5]]  # the last of each of the last two is padding
    assert [row.after for row in rows] == [(1, 0, 0b1000), (2, 0, 0b100), (6, 0, 0)]


def test_best_fit_wastes_little_of_a_row():
    class Lengths:
        def __len__(self):
            return 3000

        def __getitem__(self, i):
            return np.zeros(20 + i * i * 7919 % 1400, np.uint16)

    rows = list(islice(packed_rows(Lengths(), BYTES, 2048, seed=0, pack=best_fit_rows), 200))
    assert np.mean([(row.fields[1] == IGNORE).mean() for row in rows]) < 0.03


def test_best_fit_leaves_no_document_waiting_longer_than_its_window(source, texts):
    counters = [row.after for row in islice(packed_rows(source, BYTES, SEQ_LEN, seed=2, pack=best_fit_rows), 300)]
    for (before, *_), (after, _, mask) in zip(counters, counters[1:], strict=False):
        assert before <= after and mask < 1 << WINDOW

def test_an_error_of_reading_names_the_document(source_of):
    rows = packed_rows(source_of(["fine", OSError("the disk is gone")]), BYTES, SEQ_LEN)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(rows)
    assert caught.value.__notes__ == ["while reading document 1, text 1 of the list"]

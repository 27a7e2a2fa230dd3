"""From documents to rows of training pairs: no slot is wasted and no label crosses documents."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from titanlite.batch import IGNORE
from titanlite.data.order import shuffled_index
from titanlite.data.sources import Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import ConfigError


class Row(NamedTuple):
    """One row, and where its stream stands after it."""

    fields: np.ndarray  # [4, S] int64: tokens, labels, positions, documents as in `Batch`
    after: tuple[int, int]  # document counter, pairs of that document already used


def packed_rows(
    source: Source,
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    start: tuple[int, int] = (0, 0),
    stride: int = 1,
    seed: int | None = None,
) -> Iterator[Row]:
    """Rows of one stream, which reads the documents numbered c, c + stride, c + 2 * stride, ... from start = (c, pairs used).

    A document of n tokens makes n - 1 pairs (token, next token), so no label crosses documents and no slot is wasted; one
    that does not fit goes on in the next row as a new segment. With a seed, number c is the c % n-th document of epoch
    c // n, without end. Without one it is document c, the stream ends after the last, and the last row is padded: a
    segment of its own, labels IGNORE. Raises ConfigError when no document has a pair.
    """
    n = len(source)
    counter, used = start
    ids = None  # of document number `counter`, once it is read
    barren = 0  # documents without a pair, in a row
    count = np.arange(seq_len)
    while True:
        fields = np.empty((4, seq_len), np.int64)
        filled = segment = 0
        while filled < seq_len and (seed is not None or counter < n):
            if ids is None:
                ids = _read(source, tokenizer, counter, seed)
            pairs = min(len(ids) - 1 - used, seq_len - filled)
            if pairs > 0:
                part = fields[:, filled : filled + pairs]
                part[0] = ids[used : used + pairs]
                part[1] = ids[used + 1 : used + 1 + pairs]
                part[2] = count[:pairs]
                part[3] = segment
                filled, used, segment = filled + pairs, used + pairs, segment + 1
            barren = 0 if pairs > 0 else barren + 1
            if barren >= n:
                raise ConfigError(f"none of the data's {n} documents has two tokens: there is nothing to predict")
            if used >= len(ids) - 1:
                counter, used, ids = counter + stride, 0, None
        if filled == 0:
            return
        fields[:, filled:] = padding(seq_len - filled, tokenizer.end_id, segment)
        yield Row(fields, (counter, used))


def padding(n: int, end_id: int, segment: int = 0) -> np.ndarray:
    """[4, n] int64: a segment that is not trained on."""
    columns = np.broadcast_arrays(end_id, IGNORE, np.arange(n), segment)
    return np.stack(columns).astype(np.int64)


def _read(source: Source, tokenizer: Tokenizer, counter: int, seed: int | None) -> np.ndarray:
    epoch, i = divmod(counter, len(source))
    document = i if seed is None else shuffled_index(i, len(source), seed=seed, epoch=epoch)
    try:
        return tokenizer.encode_document(source[document])
    except Exception as error:
        error.add_note(f"while reading document {document}, {source.name(document)}")
        raise

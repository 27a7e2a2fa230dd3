"""From documents to rows of training pairs: no label crosses documents, and no attention either."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titanlite.batch import IGNORE
from titanlite.data.order import shuffled_index
from titanlite.data.sources import Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import ConfigError

State = tuple[int, int, int]  # a stream's frontier: number of its first unfinished document, pairs of that used, mask of later ones used
STATE = 3  # integers
WINDOW = 63  # documents that best fit chooses among; their mask is one int64


class Row(NamedTuple):
    """One row, and where its stream stands after it."""

    fields: np.ndarray  # [4, S] int64: tokens, labels, positions, documents as in `Batch`
    after: State


@dataclass(frozen=True)
class Documents:
    """A source's documents as tokens. With a seed, number c is the c % n-th document of epoch c // n, up to `epochs` epochs;
    without one it is document c, and there is one pass.
    """

    source: Source
    tokenizer: Tokenizer
    seed: int | None = None
    epochs: int | None = None

    @property
    def end(self) -> float:
        """Numbers are below it."""
        epochs = self.epochs or (1 if self.seed is None else math.inf)
        return epochs * len(self.source)

    def read(self, c: int) -> np.ndarray:
        """[n] ids."""
        epoch, i = divmod(c, len(self.source))
        in_order = self.seed is None or getattr(self.source, "in_order", False)
        document = i if in_order else shuffled_index(i, len(self.source), seed=self.seed, epoch=epoch)
        try:
            found = self.source[document]
            return found if isinstance(found, np.ndarray) else self.tokenizer.encode_document(found)
        except Exception as error:
            error.add_note(f"while reading document {document}, {self.source.name(document)}")
            raise


def split_rows(documents: Documents, seq_len: int, *, start: State = (0, 0, 0), stride: int = 1) -> Iterator[Row]:
    """Rows of one stream, which reads the documents numbered c, c + stride, c + 2 * stride, ... from start = (c, pairs used, 0).

    A document of n tokens makes n - 1 pairs (token, next token), so no label crosses documents and no slot is wasted; one
    that does not fit goes on in the next row as a new segment. The last row of documents that end is padded: a segment of
    its own, labels IGNORE; the state after it is at their end. Raises ConfigError when no document has a pair.
    """
    counter, used, _ = start
    counter, ids = _next_with_pairs(documents, counter, stride)
    while ids is not None:
        fields = np.empty((4, seq_len), np.int64)
        filled = segment = 0
        while filled < seq_len and ids is not None:
            part = ids[used : used + seq_len - filled + 1]
            _place(fields, filled, part, segment)
            filled, used, segment = filled + len(part) - 1, used + len(part) - 1, segment + 1
            if used >= len(ids) - 1:
                counter, ids = _next_with_pairs(documents, counter + stride, stride)
                used = 0
        fields[:, filled:] = padding(seq_len - filled, documents.tokenizer.end_id, segment)
        yield Row(fields, (counter, used, 0))


def best_fit_rows(documents: Documents, seq_len: int, *, start: State = (0, 0, 0), stride: int = 1) -> Iterator[Row]:
    """As `split_rows`, but only documents with more than seq_len pairs are cut, and rows may end in padding.

    A row begins with the stream's oldest document, so that none waits for ever; then comes the longest of the next ones
    that fits, and so on (best fit over a window). Bit i of the state's mask says that document c + i * stride is used.
    """
    window = _Window(documents, start, stride)
    while window.ids:
        fields = np.empty((4, seq_len), np.int64)
        filled = segment = 0
        chosen: int | None = 0
        while chosen is not None:
            ids = window.take(chosen, seq_len - filled)
            _place(fields, filled, ids, segment)
            filled, segment = filled + len(ids) - 1, segment + 1
            chosen = window.longest(seq_len - filled)
        fields[:, filled:] = padding(seq_len - filled, documents.tokenizer.end_id, segment)
        window.refill()
        yield Row(fields, window.state())


class _Window:
    """The next documents of a stream that are not used yet, as far as best fit looks ahead."""

    def __init__(self, documents: Documents, start: State, stride: int):
        self.documents, self.stride = documents, stride
        self.counter, self.used, self.mask = start
        self.ids: deque[np.ndarray | None] = deque()  # of documents counter, counter + stride, ...; None: used, or without a pair
        self.barren = 0  # documents without a pair, in a row
        self.refill()

    def refill(self) -> None:
        """Afterwards the first document is one to use, or there is none left."""
        while True:
            while self.ids and self.ids[0] is None:
                self.ids.popleft()
                self.counter, self.used = self.counter + self.stride, 0
                self.mask >>= 1
            number = self.counter + len(self.ids) * self.stride
            if len(self.ids) == WINDOW or number >= self.documents.end:
                return
            self.ids.append(None if self.mask >> len(self.ids) & 1 else self._read(number))

    def _read(self, number: int) -> np.ndarray | None:
        ids = self.documents.read(number)
        if len(ids) > 1:
            self.barren = 0
            return ids
        self.barren += 1
        _check_barren(self.barren, self.documents)
        return None

    def take(self, i: int, pairs: int) -> np.ndarray:
        """The ids of document i, or, of the first, those of its next `pairs` pairs."""
        ids = self.ids[i]
        if i == 0:
            ids = ids[self.used : self.used + pairs + 1]
            self.used += len(ids) - 1
        if i > 0 or self.used == len(self.ids[0]) - 1:
            self.ids[i] = None
        return ids

    def longest(self, pairs: int) -> int | None:
        """The document with most pairs that has no more than these; the first is never meant: it was taken from."""
        fitting = (i for i, ids in enumerate(self.ids) if i and ids is not None and len(ids) - 1 <= pairs)
        return max(fitting, key=lambda i: len(self.ids[i]), default=None)

    def state(self) -> State:
        return self.counter, self.used, sum(1 << i for i, ids in enumerate(self.ids) if ids is None)


PACKINGS: dict[str, Callable[..., Iterator[Row]]] = {"split": split_rows, "best_fit": best_fit_rows}


def padding(n: int, end_id: int, segment: int = 0) -> np.ndarray:
    """[4, n] int64: a segment that is not trained on."""
    columns = np.broadcast_arrays(end_id, IGNORE, np.arange(n), segment)
    return np.stack(columns).astype(np.int64)


def _place(fields: np.ndarray, filled: int, ids: np.ndarray, segment: int) -> None:
    """The pairs of `ids` as a segment of a row."""
    part = fields[:, filled : filled + len(ids) - 1]
    part[0] = ids[:-1]
    part[1] = ids[1:]
    part[2] = np.arange(len(ids) - 1)
    part[3] = segment


def _next_with_pairs(documents: Documents, counter: int, stride: int) -> tuple[int, np.ndarray | None]:
    """(number, ids) of the first document from `counter` on that has a pair; (a number beyond the end, None) after the last."""
    barren = 0
    while counter < documents.end:
        ids = documents.read(counter)
        if len(ids) > 1:
            return counter, ids
        counter, barren = counter + stride, barren + 1
        _check_barren(barren, documents)
    return counter, None


def _check_barren(in_a_row: int, documents: Documents) -> None:
    if in_a_row >= len(documents.source):
        raise ConfigError(f"none of the data's {in_a_row} documents has two tokens: there is nothing to predict")

"""Hugging Face datasets: memory-mapped ones with random access, and streams, which are read in their own order."""

import copy
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from titanlite.config import DataSource
from titanlite.data.records import checked_text, without_progress_bars
from titanlite.data.sources import BadRecord, fingerprint_of, patiently, sample_of
from titanlite.utils import ConfigError, logger, nearest

BATCH = 10_000  # records looked at together for what is missing
DISK = ("dataset_info.json", "dataset_dict.json")  # either is in a folder that `save_to_disk` wrote


class HubSource:
    """The texts of a memory-mapped dataset."""

    def __init__(self, data: "datasets.Dataset", text_key: str, *, skip: bool):  # noqa: F821
        """Records without a text are left out, and counted where `skip` is set; else raises BadRecord."""
        self.text_key = text_key
        self.data = data.select_columns([text_key]).with_format(None)
        files = [file["filename"] for file in data.cache_files]
        self.fingerprint = fingerprint_of(len(data), text_key, skip, [sample_of(file, pages=4) for file in files])
        there, full = _looked_at(self.data, text_key)
        self.skipped = int((~there).sum())
        self.first_skipped = f"record {there.argmin()}: the value of {text_key!r} must be a string, not null" if self.skipped else ""
        if self.skipped and not skip:
            raise BadRecord(self.first_skipped)
        self.rows = None if full.all() else np.flatnonzero(full)

    def __len__(self) -> int:
        return len(self.data) if self.rows is None else len(self.rows)

    def __getitem__(self, i: int) -> str:
        return self.data[i if self.rows is None else int(self.rows[i])][self.text_key]

    def name(self, i: int) -> str:
        return f"record {i if self.rows is None else self.rows[i]}"


def _looked_at(data: "datasets.Dataset", text_key: str) -> tuple[np.ndarray, np.ndarray]:  # noqa: F821
    """(whether each record has a text, whether one that is not empty)."""
    import pyarrow.compute as pc

    there, full = [np.empty(0, bool)], [np.empty(0, bool)]
    for batch in data.with_format("arrow").iter(BATCH):
        lengths = pc.binary_length(batch[text_key])
        there.append(pc.is_valid(lengths).to_numpy())
        full.append(pc.fill_null(pc.greater(lengths, 0), False).to_numpy())
    return np.concatenate(there), np.concatenate(full)


class StreamSource:
    """The texts of a stream, pass after pass. There is no going back in one, and no end to be known of, so document c is the c-th
    that comes, and a resumed run reads again, and passes over, what was used. Every rank reads all of it.
    """

    skipped = 0
    in_order = True

    def __init__(self, data: "datasets.IterableDataset", label: str, text_key: str, *, skip: bool):  # noqa: F821
        self.data, self.label, self.text_key, self.skip = data, label, text_key, skip
        self.rows, self.stride = frozenset([0]), 1
        self._restart(0)
        first = self[0]
        self.fingerprint = fingerprint_of(label, text_key, skip, first if isinstance(first, str) else "")
        self._restart(0)

    def for_rows(self, rows: Collection[int], stride: int, first: int) -> "StreamSource":
        """One that will be asked for documents from number `first` on whose numbers, modulo `stride`, are among `rows`."""
        mine = copy.copy(self)
        mine.rows, mine.stride = frozenset(rows), stride
        mine._restart(first)
        return mine

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, c: int) -> str | np.ndarray:
        while self._next <= c:
            record = next(self._records)
            if self._next >= self._first and self._next % self.stride in self.rows:
                self._waiting[self._next] = self._text(record)  # rows do not get on equally fast
            self._next += 1
        return self._waiting.pop(c)

    def name(self, c: int) -> str:
        return f"{self.label}, record {c} of its stream"

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_records": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._restart(state["_first"])

    def _restart(self, first: int) -> None:
        self._first, self._next, self._waiting = first, 0, {}
        self._records = self._passes()

    def _passes(self) -> Iterator[dict]:
        while True:
            n = self._next
            for batch in self.data.iter(100):  # iterating over it record by record would give a worker only some of the files
                yield from (dict(zip(batch, record, strict=True)) for record in zip(*batch.values(), strict=True))
            if self._next == n:
                raise ConfigError(f"{self.label}: the stream has no records", "training.dataset_path", "data.sources")

    def _text(self, record: dict) -> str | np.ndarray:
        try:
            return checked_text(record, self.text_key)
        except ValueError as error:
            message = f"{self.name(self._next)}: {error}"
            if not self.skip:
                raise ConfigError(
                    f"{message}; set training.skip_bad_records=true to leave such records out", "training.skip_bad_records", "training.text_key"
                ) from None
            self.skipped += 1
            logger.warning(f"skipped_records={self.skipped} last={message!r}")
            return np.empty(0, np.int32)  # no pairs


def build_hub(source: DataSource, path: str, skip: bool) -> HubSource:
    """A dataset that `save_to_disk` wrote into the folder `path`, or what `load_dataset` makes of a folder of data files."""
    from datasets import Dataset, load_from_disk

    if not os.path.isdir(path):
        raise FileNotFoundError(2, "No such folder", path)
    with without_progress_bars(), _as_bad_record():
        data = load_from_disk(path) if is_saved(path) else loaded(source, path)
    if not isinstance(data, Dataset):
        if source.split not in data:
            raise BadRecord(f"no split {source.split!r} among {sorted(data)}{nearest(source.split, data)}")
        data = data[source.split]
    _check_column(data, source.text_key)
    return HubSource(data, source.text_key, skip=skip)


def build_stream(source: DataSource, path: str, skip: bool) -> StreamSource:
    with _as_bad_record():
        open_stream = partial(loaded, source, path, streaming=True)
        data = open_stream() if os.path.exists(path) else patiently(open_stream)
    return StreamSource(data, f"{path} {source.split}", source.text_key, skip=skip)


def loaded(source: DataSource, path: str, *, streaming: bool = False) -> "datasets.Dataset | datasets.IterableDataset":  # noqa: F821
    from datasets import load_dataset

    return load_dataset(path, source.subset, split=source.split, streaming=streaming)


@contextmanager
def _as_bad_record() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many libraries
        raise BadRecord(f"cannot be read as a Hugging Face dataset: {error!r}") from error


def is_saved(path: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in DISK)


def _check_column(data: "datasets.Dataset", text_key: str) -> None:  # noqa: F821
    names = data.column_names
    if text_key not in names:
        raise BadRecord(f"no column {text_key!r} among {names}{nearest(text_key, names)}")
    kind = getattr(data.features[text_key], "dtype", "no single value")
    if kind not in ("string", "large_string"):
        raise BadRecord(f"the column {text_key!r} must hold strings, not {kind}")

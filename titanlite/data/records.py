"""JSONL and parquet records, checked once and kept as a memory-mapped Arrow file."""

import json
import os
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from titanlite.data.sources import BadRecord, fingerprint_of
from titanlite.utils import nearest

CACHE_FORMAT = 1  # of what `_records` yields: a new number keeps old caches from being read


class RecordSource:
    """Records in a memory-mapped Arrow file."""

    def __init__(self, data: "datasets.Dataset", fingerprint: str, *, skipped: int):  # noqa: F821
        self.data = data
        self.fingerprint = fingerprint
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> str:
        return self.data.data.column("text")[i].as_py()  # `self.data[i]` formats a whole record: many times slower

    def name(self, i: int) -> str:
        return f"record {i} of {len(self)} good ones"


def build_records(format: str, files: list[str], text_key: str, skip: bool) -> tuple[RecordSource, str]:
    """The source, and where its first bad record lies. Raises BadRecord unless `skip`."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    states = [os.stat(f) for f in files]
    fingerprint = fingerprint_of([os.path.basename(f) for f in files], [s.st_size for s in states], text_key, skip)
    version = fingerprint_of(list(map(os.path.abspath, files)), [(s.st_size, s.st_mtime_ns) for s in states], format, text_key, skip)
    try:
        with without_progress_bars():
            data = Dataset.from_generator(
                _records,
                features=Features({"text": Value("large_string")}),  # `string` ends at 2 GiB an Arrow chunk
                gen_kwargs={"format": format, "files": tuple(files), "text_key": text_key, "skip": skip},
                fingerprint=f"titanlite-{CACHE_FORMAT}-{version}",  # so the cache is never that of other files
                writer_batch_size=100,  # records held in memory, which may be long
            )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    skipped, first_skipped = json.loads(data[-1]["text"])
    return RecordSource(data.select(range(len(data) - 1)), fingerprint, skipped=skipped), first_skipped


def _records(format: str, files: tuple[str, ...], text_key: str, skip: bool) -> Iterator[dict[str, str]]:
    """Every text, without empty ones as without empty files; then how many records were skipped and the first of them."""
    skipped, first = 0, ""
    for file in files:
        for record in _jsonl_texts(file, text_key) if format == "jsonl" else _parquet_texts(file, text_key):
            if isinstance(record, BadRecord):
                if not skip:
                    raise record
                skipped, first = skipped + 1, first or str(record)
            elif record:
                yield {"text": record}
    yield {"text": json.dumps([skipped, first])}


def _parquet_texts(file: str, text_key: str) -> Iterator[str | BadRecord]:
    """Row group by row group, so that memory holds one; one that cannot be read counts as one record."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file, memory_map=True)
    except pa.ArrowException as error:
        yield BadRecord(f"{file}: not parquet: {error}")
        return
    names = table.schema_arrow.names
    if text_key not in names:
        yield BadRecord(f"{file}: no column {text_key!r} among {reprlib.repr(names)}{nearest(text_key, names)}")
        return
    kind = table.schema_arrow.field(text_key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        yield BadRecord(f"{file}: the column {text_key!r} must hold strings, not {kind}")
        return
    record = 0
    for group in range(table.num_row_groups):
        last = record + table.metadata.row_group(group).num_rows
        try:
            for batch in table.iter_batches(1000, [group], [text_key], use_threads=False):
                for text in batch.column(0).to_pylist():
                    yield text if text is not None else BadRecord(f"{file}:{record}: the value of {text_key!r} must be a string, not null")
                    record += 1
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            yield BadRecord(f"{file}:{record}: records {record} to {last - 1} (row group {group}) cannot be read: {error}")
        record = last


def _jsonl_texts(file: str, text_key: str) -> Iterator[str | BadRecord]:
    for number, line in lines(file):
        try:
            yield checked_text(read_record(line), text_key)
        except ValueError as error:
            yield BadRecord(f"{file}:{number}: {error}")


def lines(file: str) -> Iterator[tuple[int, bytes]]:
    """(number, line), without the blank lines that end a file; one between records is a record that got lost."""
    blank = []
    with open(file, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.isspace():
                blank.append(number)
                continue
            yield from ((n, b"") for n in blank)
            blank.clear()
            yield number, line


def read_record(line: bytes) -> object:
    """One JSONL record. Raises ValueError that says what is wrong with it."""
    if not line:
        raise ValueError("a blank line between records")
    try:
        return json.loads(line.decode("utf-8-sig"), strict=False)  # a byte order mark and raw control characters pass
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} (0x{error.object[error.start]:02x}) of the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}: {reprlib.repr(error.doc)}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None


def checked_text(record: object, text_key: str) -> str:
    """The text of a record. Raises ValueError that says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be an object, not {reprlib.repr(record)}")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r} among {reprlib.repr(list(record))}{nearest(text_key, record)}")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {text_key!r} must be a string, not {reprlib.repr(text)}")
    text.encode()  # half a surrogate pair, as "\ud800", is legal JSON but no Unicode text
    return text


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps the bars of `datasets` out of a log that is no terminal."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quieted = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quieted:
        disable_progress_bars()
    try:
        yield
    finally:
        if quieted:
            enable_progress_bars()

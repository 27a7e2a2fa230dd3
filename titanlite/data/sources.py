"""Where documents come from: Python's own library, text files or JSONL records, all with random access."""

import glob
import hashlib
import json
import os
import reprlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Protocol
from zlib import crc32

import numpy as np

from titanlite.utils import ConfigError, logger, nearest

# A text file is cut into documents of at least this size, so that every row of a step has documents of its own. A small
# corpus is cut finer, into about 256 documents, but never below 4 KiB, to keep the context that a model can learn from.
DOCUMENT_BYTES = 64 * 1024
SMALLEST_DOCUMENT_BYTES = 4 * 1024
STDLIB_DOCUMENT_BYTES = 2 * 1024
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
CACHE_FORMAT = 1  # of what `_records` yields: a new number keeps old caches from being read


class Source(Protocol):
    """Documents in a fixed order. Goes to worker processes, so it holds no open file."""

    fingerprint: str  # of names, sizes and options: tells at a resume that the data are others
    skipped: int  # bad records left out

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> str: ...

    def name(self, i: int) -> str:
        """Where document i lies, for messages."""


class _BadRecord(ValueError):
    """`file:line: what is wrong`."""


def build_source(
    name: str, path: str | None, *, text_key: str = "text", skip_bad_records: bool = False, section: str = "training"
) -> Source:
    """The data set `name` of config section `section`: stdlib, stdlib_heldout, text or jsonl.

    Raises ConfigError where files are missing, unreadable, empty or hold bad records; with `skip_bad_records` those
    are left out, counted, and told of in one log line.
    """
    key = f"{section}.dataset_path"
    if name.startswith("stdlib"):
        if path is not None:
            raise ConfigError(f"{key}={path} is not read with {section}.dataset={name}: use text or jsonl", key)
        return _build_stdlib(heldout=name == "stdlib_heldout")
    if path is None:
        raise ConfigError(f"{section}.dataset={name} needs {key}, a file, folder or glob", key, f"{section}.dataset")
    suffix = ".txt" if name == "text" else ".jsonl"
    try:
        files = _find_files(os.path.expanduser(path), suffix)
        if not files:
            raise ConfigError(f"{key}={path}: no file found (of a folder, all *{suffix} are read)", key)
        if name == "text":
            source, first_skipped = _build_text(files, skip_bad_records)
        else:
            source, first_skipped = _build_jsonl(files, text_key, skip_bad_records)
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"{key}={path}: {error.filename or path}: {error.strerror}", key) from error
    except _BadRecord as error:
        fix = "convert the file to UTF-8" if name == "text" else f"see training.text_key={text_key!r}"
        message = f"{key}={path}: {error}; {fix}, or set training.skip_bad_records=true to leave such records out"
        raise ConfigError(message, key, "training.text_key", "training.skip_bad_records") from None
    if source.skipped:
        logger.warning(f"{key}={path} skipped_records={source.skipped} first={first_skipped!r}")
    if len(source) == 0:
        raise ConfigError(f"{key}={path}: no documents: {len(files)} empty files, {source.skipped} bad records", key)
    return source


class FileSource:
    """Documents that are pieces of files, read when asked for."""

    def __init__(self, files: list[str], pieces: list[tuple[int, int, int]], *, skipped: int = 0):
        self.files = files
        # Index of the file, first byte, bytes. An array, because a list this long would be copied to every worker.
        self.pieces = np.array(pieces, np.int64).reshape(-1, 3)
        self.skipped = skipped
        self.fingerprint = _hash([os.path.basename(f) for f in files], pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> str:
        file, start, size = self.pieces[i].tolist()
        with open(self.files[file], "rb") as handle:
            handle.seek(start)
            data = handle.read(size)
        if len(data) < size:
            raise OSError(f"{self.files[file]} is shorter than when the run started")
        return data.decode(errors="replace")  # checked already; a file that changes while a run reads it does not end it

    def name(self, i: int) -> str:
        file, start, size = self.pieces[i].tolist()
        return f"{self.files[file]}, {size} bytes from byte {start}"


def _build_stdlib(heldout: bool) -> FileSource:
    """Its files in small documents, so that a small batch is a mix of many; one file in 20, chosen by its name, is held out."""
    root = sysconfig.get_path("stdlib")
    files = _walk(root, ".py", NOT_LIBRARY)
    files = [f for f in files if heldout == (crc32(PurePath(f).relative_to(root).as_posix().encode()) % 20 == 0)]
    source, _ = _build_text(files, skip=True, document_bytes=STDLIB_DOCUMENT_BYTES)
    if len(source) == 0:
        raise ConfigError(f"Python's standard library has no source files in {root}: use dataset text or jsonl")
    return source


def _build_text(files: list[str], skip: bool, document_bytes: int | None = None) -> tuple[FileSource, str]:
    if document_bytes is None:
        document_bytes = sum(map(os.path.getsize, files)) // 256
        document_bytes = min(max(document_bytes, SMALLEST_DOCUMENT_BYTES), DOCUMENT_BYTES)
    pieces, skipped = [], []
    for i, file in enumerate(files):
        try:
            pieces += [(i, start, size) for start, size in _cut(file, document_bytes)]
        except _BadRecord as error:
            if not skip:
                raise
            skipped.append(str(error))
    return FileSource(files, pieces, skipped=len(skipped)), "".join(skipped[:1])


def _cut(file: str, document_bytes: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of a file's documents, cut at line ends. Raises _BadRecord where it is not UTF-8."""
    pieces, start, line = [], 0, 1
    with open(file, "rb") as handle:
        while piece := handle.read(document_bytes) + handle.readline():
            try:
                piece.decode()
            except UnicodeDecodeError as error:
                line += piece.count(b"\n", 0, error.start)
                byte = piece[error.start]
                raise _BadRecord(f"{file}:{line}: byte {start + error.start} (0x{byte:02x}) is not UTF-8") from None
            pieces.append((start, len(piece)))
            start += len(piece)
            line += piece.count(b"\n")
    return pieces


class JsonlSource:
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


def _build_jsonl(files: list[str], text_key: str, skip: bool) -> tuple[JsonlSource, str]:
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    states = [os.stat(f) for f in files]
    fingerprint = _hash([os.path.basename(f) for f in files], [s.st_size for s in states], text_key, skip)
    version = _hash(list(map(os.path.abspath, files)), [(s.st_size, s.st_mtime_ns) for s in states], text_key, skip)
    try:
        with _without_progress_bars():
            data = Dataset.from_generator(
                _records,
                features=Features({"text": Value("large_string")}),  # `string` ends at 2 GiB an Arrow chunk
                gen_kwargs={"files": tuple(files), "text_key": text_key, "skip": skip},
                fingerprint=f"titanlite-{CACHE_FORMAT}-{version}",  # so the cache is never that of other files
                writer_batch_size=100,  # records held in memory, which may be long
            )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    skipped, first_skipped = json.loads(data[-1]["text"])
    return JsonlSource(data.select(range(len(data) - 1)), fingerprint, skipped=skipped), first_skipped


def _records(files: tuple[str, ...], text_key: str, skip: bool) -> Iterator[dict[str, str]]:
    """Every text, without empty ones as without empty files; then how many records were skipped and the first of them."""
    skipped, first = 0, ""
    for file in files:
        for number, line in _lines(file):
            try:
                text = _read_record(line, text_key)
            except ValueError as error:
                bad = _BadRecord(f"{file}:{number}: {error}")
                if not skip:
                    raise bad from None
                skipped, first = skipped + 1, first or str(bad)
                continue
            if text:
                yield {"text": text}
    yield {"text": json.dumps([skipped, first])}


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
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


def _read_record(line: bytes, text_key: str) -> str:
    """The text of one JSONL record. Raises ValueError that says what is wrong with it."""
    if not line:
        raise ValueError("a blank line between records")
    try:
        record = json.loads(line.decode("utf-8-sig"), strict=False)  # a byte order mark and raw control characters pass
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} (0x{error.object[error.start]:02x}) of the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}: {reprlib.repr(error.doc)}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
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
def _without_progress_bars() -> Iterator[None]:
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


def _find_files(path: str, suffix: str) -> list[str]:
    """A file, all files of a folder with this suffix, or those that a glob matches, sorted."""
    if os.path.isdir(path):
        return _walk(path, suffix)
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    return sorted(f for f in glob.glob(path, recursive=True) if not os.path.isdir(f))


def _walk(folder: str, suffix: str, without: frozenset[str] = frozenset()) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [f for f in folders if f not in without]
        found += [os.path.join(parent, name) for name in names if name.endswith(suffix)]
    return sorted(found)


def _hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

"""Text files as documents that are pieces of them, Python's own library among them."""

import glob
import os
import sysconfig
from pathlib import PurePath
from zlib import crc32

import numpy as np

from titanlite.data.sources import BadRecord, fingerprint_of
from titanlite.utils import ConfigError

SUFFIX = {"text": (".txt",), "jsonl": (".jsonl", ".json"), "parquet": (".parquet",)}  # of what is read in a folder

# A text file is cut into documents of at least this size, so that every row of a step has documents of its own. A small
# corpus is cut finer, into about 256 documents, but never below 4 KiB, to keep the context that a model can learn from.
DOCUMENT_BYTES = 64 * 1024
SMALLEST_DOCUMENT_BYTES = 4 * 1024
STDLIB_DOCUMENT_BYTES = 2 * 1024
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class FileSource:
    """Documents that are pieces of files, read when asked for."""

    def __init__(self, files: list[str], pieces: list[tuple[int, int, int]], *, skipped: int = 0):
        self.files = files
        # Index of the file, first byte, bytes. An array, because a list this long would be copied to every worker.
        self.pieces = np.array(pieces, np.int64).reshape(-1, 3)
        self.skipped = skipped
        self.fingerprint = fingerprint_of([os.path.basename(f) for f in files], pieces)

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


def build_stdlib(heldout: bool) -> FileSource:
    """Its files in small documents, so that a small batch is a mix of many; one file in 20, chosen by its name, is held out."""
    root = sysconfig.get_path("stdlib")
    files = walk(root, ".py", NOT_LIBRARY)
    files = [f for f in files if heldout == (crc32(PurePath(f).relative_to(root).as_posix().encode()) % 20 == 0)]
    source, _ = build_text(files, skip=True, document_bytes=STDLIB_DOCUMENT_BYTES)
    if len(source) == 0:
        raise ConfigError(f"Python's standard library has no source files in {root}: use dataset text or jsonl")
    return source


def build_text(files: list[str], skip: bool, document_bytes: int | None = None) -> tuple[FileSource, str]:
    if document_bytes is None:
        document_bytes = sum(map(os.path.getsize, files)) // 256
        document_bytes = min(max(document_bytes, SMALLEST_DOCUMENT_BYTES), DOCUMENT_BYTES)
    pieces, skipped = [], []
    for i, file in enumerate(files):
        try:
            pieces += [(i, start, size) for start, size in _cut(file, document_bytes)]
        except BadRecord as error:
            if not skip:
                raise
            skipped.append(str(error))
    return FileSource(files, pieces, skipped=len(skipped)), "".join(skipped[:1])


def _cut(file: str, document_bytes: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of a file's documents, cut at line ends. Raises BadRecord where it is not UTF-8."""
    pieces, start, line = [], 0, 1
    with open(file, "rb") as handle:
        while piece := handle.read(document_bytes) + handle.readline():
            try:
                piece.decode()
            except UnicodeDecodeError as error:
                line += piece.count(b"\n", 0, error.start)
                byte = piece[error.start]
                raise BadRecord(f"{file}:{line}: byte {start + error.start} (0x{byte:02x}) is not UTF-8") from None
            pieces.append((start, len(piece)))
            start += len(piece)
            line += piece.count(b"\n")
    return pieces


def find_files(path: str, suffix: tuple[str, ...]) -> list[str]:
    """A file, all files of a folder with such a suffix, or those that a glob matches, sorted."""
    if os.path.isdir(path):
        return walk(path, suffix)
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    return sorted(f for f in glob.glob(path, recursive=True) if not os.path.isdir(f))


def walk(folder: str, suffix: str | tuple[str, ...], without: frozenset[str] = frozenset()) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [f for f in folders if f not in without]
        found += [os.path.join(parent, name) for name in names if name.endswith(suffix)]
    return sorted(found)

"""DCP's reader and writer of a step's folder, the latter with a checksum of each file made while it is written."""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

METADATA = ".metadata"  # DCP's index: which bytes of which file hold which part of a tensor


def step_reader(path: Path) -> Any:
    """DCP's reader; `path` may be universal_pathlib's of a remote store."""
    from torch.distributed import checkpoint as dcp

    if isinstance(path, Path):
        return dcp.FileSystemReader(path)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(str(path), **path.storage_options)


def checksumming_writer(path: Path, **options: Any) -> tuple[Any, dict[str, str]]:
    """DCP's writer, and a dict that takes in the checksum of each file it has written."""
    from torch.distributed import checkpoint as dcp

    if isinstance(path, Path):
        writer = dcp.FileSystemWriter(path, **options)
    else:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(str(path), **options, **path.storage_options)
    checksums: dict[str, str] = {}
    writer.fs.create_stream = partial(_checksummed, writer.fs.create_stream, checksums)
    return writer, checksums


@contextmanager
def _checksummed(create_stream: Callable, checksums: dict[str, str], path: Path | str, mode: str) -> Iterator[Any]:
    with create_stream(path, mode) as stream:
        if "w" not in mode:
            yield stream
            return
        with ThreadPoolExecutor(1) as pool:
            checksummed = _Checksummed(stream, pool)
            yield checksummed
        checksums[Path(path).name.removesuffix(".tmp")] = f"{checksummed.crc:08x}"


class _Checksummed:
    def __init__(self, stream: Any, pool: ThreadPoolExecutor):
        self.stream, self.pool, self.crc = stream, pool, 0

    def write(self, data: Any) -> int:
        if len(data) < 2**16:  # not worth a thread
            self.crc = zlib.crc32(data, self.crc)
            return self.stream.write(data)
        crc = self.pool.submit(zlib.crc32, data, self.crc)
        written = self.stream.write(data)
        self.crc = crc.result()
        return written

    def __getattr__(self, name: str) -> Any:
        assert name not in ("seek", "truncate"), "the checksum is of what is written in order"
        return getattr(self.stream, name)

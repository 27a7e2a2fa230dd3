"""DCP's file writer, with a checksum of each file made while it is written."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def checksumming_writer(path: Path, **options: Any) -> tuple[Any, dict[str, str]]:
    """DCP's writer, and a dict that takes in the checksum of each file it has written."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystem

    checksums: dict[str, str] = {}

    class ChecksummedFiles(FileSystem):
        @contextmanager
        def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                if "w" not in mode:
                    yield stream
                    return
                checksummed = _Checksummed(stream)
                yield checksummed
                checksums[Path(path).name.removesuffix(".tmp")] = f"{checksummed.crc:08x}"

    writer = dcp.FileSystemWriter(path, **options)
    writer.fs = ChecksummedFiles()
    return writer, checksums


class _Checksummed:
    def __init__(self, stream: Any):
        self.stream, self.crc = stream, 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        assert name not in ("seek", "truncate"), "the checksum is of what is written in order"
        return getattr(self.stream, name)

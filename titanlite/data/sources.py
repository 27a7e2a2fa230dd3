"""What every source of documents has in common."""

import hashlib
import json
import os
from typing import Protocol

import numpy as np


class Source(Protocol):
    """Documents in a fixed order. Goes to worker processes, so it holds no open file."""

    fingerprint: str  # of names, sizes and options: tells at a resume that the data are others
    skipped: int  # bad records left out

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> str | np.ndarray:
        """Text, or token ids [n]."""

    def name(self, i: int) -> str:
        """Where document i lies, for messages."""


class BadRecord(ValueError):
    """`file:line: what is wrong`."""


def fingerprint_of(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def sample_of(file: str, *, pages: int = 64) -> str:
    """A fingerprint of a file's size and of pages spread over it, first and last among them."""
    size, page_bytes = os.path.getsize(file), 4096
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as handle:
        for at in np.linspace(0, max(size - page_bytes, 0), pages).astype(np.int64).tolist():
            handle.seek(at)
            digest.update(handle.read(page_bytes))
    return digest.hexdigest()

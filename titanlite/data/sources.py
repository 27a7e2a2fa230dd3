"""What every source of documents has in common."""

import hashlib
import json
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

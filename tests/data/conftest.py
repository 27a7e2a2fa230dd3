"""Documents in a list, for tests that need no files."""

import hashlib
import random

import pytest


class ListSource:
    skipped = 0

    def __init__(self, texts):
        self.texts = texts
        self.fingerprint = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        if isinstance(self.texts[i], Exception):
            raise self.texts[i]
        return self.texts[i]

    def name(self, i):
        return f"text {i} of the list"


@pytest.fixture
def texts():
    """40 documents, each recognised by its content, of 1 to 99 characters."""
    draw = random.Random(0)
    return [f"{i}:" + "".join(draw.choices("abcdefgé", k=draw.randint(0, 90))) for i in range(40)]


@pytest.fixture
def source(texts):
    return ListSource(texts)


@pytest.fixture
def source_of():
    return ListSource

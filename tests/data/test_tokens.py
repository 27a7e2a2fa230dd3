import pickle
import struct
from itertools import islice

import numpy as np
import pytest

from titanlite.config import DataSource
from titanlite.data.build import build_source
from titanlite.data.packing import Documents, split_rows
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.tokens import index_bytes
from titanlite.utils import ConfigError

DOCUMENTS = [[5, 6, 7], [1], [], [100, 2, 3, 4, 255], [9, 8]]


@pytest.fixture
def write(tmp_path):
    """Writes documents as Megatron does, byte by byte as its format is told, and returns the prefix."""

    def of(documents=DOCUMENTS, code=8, kind="H", version=1, magic=b"MMIDIDX\0\0", boundaries="default", extra=b""):
        size = struct.calcsize(kind)
        with open(tmp_path / "corpus.bin", "wb") as data:
            for ids in documents:
                data.write(struct.pack(f"<{len(ids)}{kind}", *ids))
        firsts = np.cumsum([0] + [len(ids) * size for ids in documents])[:-1].tolist()
        index = magic + struct.pack("<QBQ", version, code, len(documents))
        if boundaries == "default":
            boundaries = list(range(len(documents) + 1))
        if boundaries is not None:
            index += struct.pack("<Q", len(boundaries))
        index += struct.pack(f"<{len(documents)}i", *map(len, documents)) + struct.pack(f"<{len(documents)}q", *firsts)
        if boundaries is not None:
            index += struct.pack(f"<{len(boundaries)}q", *boundaries)
        (tmp_path / "corpus.idx").write_bytes(index + extra)
        return str(tmp_path / "corpus")

    return of


def megatron(path, **options):
    return build_source(DataSource("megatron", path), **options)


def documents(source):
    return [source[i].tolist() for i in range(len(source))]


def refused(path, **options):
    with pytest.raises(ConfigError) as caught:
        megatron(path, **options)
    assert str(caught.value).startswith(f"training.dataset_path={path}: ")
    return str(caught.value)


@pytest.mark.parametrize("code, kind", [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
@pytest.mark.parametrize("boundaries", ["default", None], ids=["with documents", "fairseq"])
def test_megatrons_files_are_read_in_place_whatever_their_type_and_version(write, code, kind, boundaries):
    prefix = write(code=code, kind=kind, boundaries=boundaries)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        source = megatron(path)
        assert documents(source) == DOCUMENTS
        assert not source[3].flags.owndata and source[3].dtype.itemsize == struct.calcsize(kind)


def test_a_document_of_several_sequences_is_one(write):
    assert documents(megatron(write(boundaries=[0, 2, 2, 4, 5]))) == [[5, 6, 7, 1], [], [100, 2, 3, 4, 255], [9, 8]]


def test_rows_are_made_of_the_ids_as_they_are(write):
    (row,) = split_rows(Documents(megatron(write()), ByteTokenizer()), 8)
    assert row.fields[:2].tolist() == [[5, 6, 100, 2, 3, 4, 9, 256], [6, 7, 2, 3, 4, 255, 8, -100]]


def test_an_index_that_titanlite_writes_is_megatrons(write, tmp_path):
    write()
    ours = index_bytes(np.dtype(np.uint16), np.array([len(ids) for ids in DOCUMENTS], np.int32))
    assert ours == (tmp_path / "corpus.idx").read_bytes()


def test_tokens_go_to_worker_processes_by_name(write):
    source = megatron(write([[1, 2, 3]] * 10_000))
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000 and documents(pickle.loads(pickled)) == [[1, 2, 3]] * 10_000


def test_the_fingerprint_tells_other_tokens_of_the_same_size(write):
    first = megatron(write([[1, 2, 3]] * 100)).fingerprint
    assert megatron(write([[1, 2, 3]] * 100)).fingerprint == first
    assert megatron(write([[1, 2, 3]] * 50 + [[3, 2, 1]] + [[1, 2, 3]] * 49)).fingerprint != first
    assert megatron(write([[1, 2], [3]] * 100)).fingerprint != first


@pytest.mark.parametrize("kind, code, bad", [("H", 8, 300), ("i", 4, 300), ("i", 4, -1)])
def test_a_token_beyond_the_vocabulary_is_named_before_a_device_would_fail(write, kind, code, bad):
    source = megatron(write([[1, 2], [3, bad, 4]], code, kind), vocab_size=300)
    assert source[0].tolist() == [1, 2]
    with pytest.raises(ConfigError, match=rf"corpus.bin, 3 tokens from byte \d+: token {bad} is not below model.vocab_size=300"):
        next(islice(split_rows(Documents(source, ByteTokenizer()), 2), 2, None))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"magic": b"TNTIDX\0\0\0"}, "corpus.idx: not an index of Megatron's: it does not begin with MMIDIDX"),
        ({"version": 2}, "corpus.idx: version 2 of the index, 1 is known"),
        ({"code": 7}, "corpus.idx: tokens of type 7 (float32): expected one of 1 (uint8), 2 (int8), 3 (int16), 4 (int32), 5 (int64), 8 (uint16)"),
        ({"extra": b"\0" * 5}, "corpus.idx: sequences have modes: multimodal data are not supported"),
        ({"extra": b"\0"}, "corpus.idx has 143 bytes, and should have 142 for 5 sequences in 5 documents"),
        ({"boundaries": [0, 3, 2, 5]}, "corpus.idx: its documents are not its sequences, one after another"),
        ({"code": 4}, "corpus.bin has 22 bytes, which are no whole number of int32 tokens"),
        ({"documents": [[1], [], [2]]}, "corpus.idx: none of the 3 documents has two tokens: there is nothing to predict"),
        ({"documents": []}, "no documents: all is empty, 0 bad records"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_they_should_be_are_refused(write, options, message):
    assert message in refused(write(**options))


def test_a_truncated_bin_and_one_of_another_index_are_refused(write, tmp_path):
    prefix, data = write(), tmp_path / "corpus.bin"
    whole = data.read_bytes()
    data.write_bytes(whole[:-6])
    assert "corpus.bin has 16 bytes, and " in (message := refused(prefix))
    assert "places document 3 at bytes 8 to 18: the data are cut short, or the two do not belong together" in message
    data.write_bytes(whole + b"\0\0")
    assert "corpus.bin has 24 bytes, " in (message := refused(prefix)) and "tells of 22: the two do not belong together" in message
    data.unlink()
    assert f"{data}: No such file or directory" in refused(prefix)


def test_a_truncated_index_is_refused(write, tmp_path):
    prefix, index = write(), tmp_path / "corpus.idx"
    whole = index.read_bytes()
    for n in (0, 5, 17, 30, 60, len(whole) - 1):
        index.write_bytes(whole[:n])
        assert "corpus.idx" in refused(prefix)

import os

import datasets
import fsspec
import pytest

from titanlite.config import Config, DataSource, override
from titanlite.data import huggingface, remote
from titanlite.data.build import build_sources
from titanlite.data.remote import with_local_data
from titanlite.utils import ConfigError


@pytest.fixture
def memory(monkeypatch):
    """A remote file system, with files in it."""
    monkeypatch.setattr(remote.time, "sleep", lambda s: waits.append(s))
    waits = []
    store = fsspec.filesystem("memory")
    store.store.clear()
    for name, text in [("corpus/b.txt", "second"), ("corpus/deep/c.txt", "third"), ("corpus/a.txt", "first"), ("corpus/x.md", "no")]:
        store.pipe_file(f"/{name}", text.encode())
    store.waits = waits
    yield store
    store.store.clear()


@pytest.fixture
def fetch(tmp_path):
    def of(path, format="text", **options):
        values = {"job.dump_folder": str(tmp_path), "data.sources": (DataSource(format, path, **options),)}
        return with_local_data(override(Config(), values))

    return of


def texts(cfg):
    (source,) = build_sources(cfg)
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize(
    "path, found",
    [
        ("memory://corpus", ["first", "second", "third"]),
        ("memory://corpus/a.txt", ["first"]),
        ("memory://corpus/*.txt", ["first", "second"]),
        ("memory://corpus/**/*.txt", ["first", "second", "third"]),
        ("memory://corpus/*.md", ["no"]),
    ],
)
def test_files_behind_a_url_are_read_from_a_copy_in_their_order(memory, fetch, path, found):
    assert texts(fetch(path)) == found


def test_local_paths_stay_as_they_are(tmp_path):
    values = {"training.dataset": "text", "training.dataset_path": "~/x", "validation.dataset_path": str(tmp_path)}
    cfg = override(Config(), values)
    assert with_local_data(cfg) == cfg


def test_a_copy_is_made_once_and_anew_where_the_files_changed(memory, fetch, tmp_path, monkeypatch):
    first = fetch("memory://corpus")
    get = type(memory).get_file
    monkeypatch.setattr(type(memory), "get_file", None)
    assert fetch("memory://corpus") == first
    monkeypatch.setattr(type(memory), "get_file", get)
    memory.pipe_file("/corpus/a.txt", b"FIRST")
    assert texts(fetch("memory://corpus")) == ["FIRST", "second", "third"]
    assert texts(first) == ["first", "second", "third"] and len(os.listdir(tmp_path / "data")) == 2


def test_megatrons_files_are_fetched_by_their_prefix(memory, fetch):
    memory.pipe_file("/corpus/m.bin", b"\1\0\2\0")
    index = b"MMIDIDX\0\0" + b"".join(n.to_bytes(8, "little") for n in (1,)) + b"\x08" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    memory.pipe_file("/corpus/m.idx", index + (2).to_bytes(4, "little") + bytes(8) + bytes(8) + (1).to_bytes(8, "little"))
    assert [ids.tolist() for ids in texts(fetch("memory://corpus/m", "megatron"))] == [[1, 2]]


def test_a_store_that_fails_for_a_while_is_asked_again_ever_later(memory, fetch, monkeypatch):
    get, failures = type(memory).get_file, iter(range(3))

    def get_file(self, *args, **options):
        if next(failures, None) is not None:
            raise ConnectionError("not now")
        return get(self, *args, **options)

    monkeypatch.setattr(type(memory), "get_file", get_file)
    assert texts(fetch("memory://corpus")) == ["first", "second", "third"]
    assert memory.waits == [1, 2, 4]


def test_a_store_that_fails_for_ever_and_files_that_are_not_there_are_mistakes_and_leave_nothing(memory, fetch, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"data.sources\[0\].path=memory://nope cannot be fetched: no file found"):
        fetch("memory://nope")
    assert memory.waits == []

    def get_file(*_, **__):
        raise ConnectionError("never")

    monkeypatch.setattr(type(memory), "get_file", get_file)
    with pytest.raises(ConfigError, match="path=memory://corpus cannot be fetched: never"):
        fetch("memory://corpus")
    assert memory.waits == [1, 2, 4, 8, 16] and os.listdir(tmp_path / "data") == []


def test_a_name_on_the_hub_is_fetched_once_and_kept(fetch, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(remote.time, "sleep", asked.append)

    def load_dataset(path, subset, *, split, streaming):
        if not asked:
            raise ConnectionError("not now")
        asked.append((path, subset, split, streaming))
        return datasets.Dataset.from_dict({"text": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    cfg = fetch("someone/corpus", "hf", subset="en", split="test")
    assert asked == [1, ("someone/corpus", "en", "test", False)]
    monkeypatch.setattr(huggingface, "loaded", None)
    assert texts(cfg) == ["a", "b"]


def test_without_a_network_a_name_on_the_hub_is_a_mistake_in_one_message(fetch, monkeypatch):
    monkeypatch.setattr(remote, "DELAYS_S", ())

    def load_dataset(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'someone/corpus' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=r"data.sources\[0\].path=someone/corpus cannot be fetched: .*doesn't exist on the Hub"):
        fetch("someone/corpus", "hf")

import itertools
import json
import pickle

import datasets
import pytest
from datasets import Dataset, DatasetDict

from titanlite.config import Data, DataSource, Training, Validation
from titanlite.data.build import build_source
from titanlite.data.loader import build_train_loader, validation_batches
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.utils import ConfigError

TEXTS = [f"{i}:" + "x" * (i * 37 % 90) for i in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def saved(tmp_path):
    def of(data=None, name="saved"):
        (data or Dataset.from_dict({"text": TEXTS, "id": list(range(60))})).save_to_disk(str(tmp_path / name))
        return str(tmp_path / name)

    return of


@pytest.fixture
def folder(tmp_path):
    """A folder of data files, as `load_dataset` reads it."""

    def of(records=tuple({"text": text} for text in TEXTS)):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / "files")

    return of


def build(path, format="hf", skip=False, **options):
    return build_source(DataSource(format, path, **options), skip_bad_records=skip)


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        build(*args, **options)
    return str(caught.value)


def documents(source):
    return [source[i] for i in range(len(source))]


def test_a_saved_dataset_is_read_in_place(saved):
    source = build(saved())
    assert documents(source) == TEXTS and source.skipped == 0
    assert documents(pickle.loads(pickle.dumps(source))) == TEXTS


def test_a_split_is_chosen_by_name(saved):
    path = saved(DatasetDict(train=Dataset.from_dict({"text": ["a"]}), test=Dataset.from_dict({"text": ["b"]})))
    assert documents(build(path)) == ["a"] and documents(build(path, split="test")) == ["b"]
    assert "no split 'tests' among ['test', 'train']; did you mean 'test'?" in refused(path, split="tests")


def test_a_folder_of_files_is_a_dataset_too(folder):
    assert documents(build(folder(), split="train[10:20]")) == TEXTS[10:20]
    assert "Unknown split" in refused(folder(), split="nope")


def test_records_without_a_text_are_refused_with_their_number_or_counted(saved):
    path = saved(Dataset.from_dict({"text": ["a", "", None, "b", None]}))
    assert f"training.dataset_path={path}: record 2: the value of 'text' must be a string, not null; see text_key" in refused(path)
    source = build(path, skip=True)
    assert documents(source) == ["a", "b"] and source.skipped == 2 and source.name(1) == "record 3"


def test_a_column_that_is_not_there_or_holds_no_strings_is_refused(saved):
    assert "no column 'txt' among ['text', 'id']; did you mean 'text'?" in refused(saved(), text_key="txt")
    assert "the column 'id' must hold strings, not int64" in refused(saved(name="b"), text_key="id")


def test_a_folder_that_is_not_there_or_no_dataset_is_refused(tmp_path):
    assert "No such folder" in refused(str(tmp_path / "nope"))
    (tmp_path / "empty").mkdir()
    assert "cannot be read as a Hugging Face dataset" in refused(str(tmp_path / "empty"))


def test_the_fingerprint_tells_other_texts_but_not_another_place(saved):
    first = build(saved()).fingerprint
    assert build(saved(name="elsewhere")).fingerprint == first
    assert build(saved(Dataset.from_dict({"text": [*TEXTS[:-1], TEXTS[-1].upper()]}), "c")).fingerprint != first


# Streams


def rows_of(source, steps, dp_degree=1, workers=0, positions=None):
    """[each step's rows], and the gathered positions after them."""
    import torch

    loaders = []
    for rank in range(dp_degree):
        cfg = Training(local_batch_size=1, seq_len=32)
        cfg = type(cfg)(**vars(cfg) | {"dataloader": type(cfg.dataloader)(num_workers=workers)})
        ranks = {"dp_rank": rank, "dp_degree": dp_degree, "global_batch_size": 4}
        loaders.append(build_train_loader(cfg, Data(), [source], ByteTokenizer(), seed=3, positions=positions, **ranks))
    rows = [[batch.tokens.tolist() for loader in loaders for batch in next(loader)] for _ in range(steps)]
    gathered = torch.cat([loader.positions for loader in loaders])
    for loader in loaders:
        loader.close()
    return rows, gathered


def test_a_stream_gives_its_records_in_their_order_pass_after_pass(folder):
    source = build(folder(), "hf_stream")
    assert [source[i] for i in range(150)] == list(itertools.islice(itertools.cycle(TEXTS), 150))


def test_a_stream_goes_on_exactly_on_other_ranks_and_workers_also_in_a_later_pass(folder):
    source = build(folder(), "hf_stream")
    source = pickle.loads(pickle.dumps(source))  # as other ranks and workers get it
    undisturbed, _ = rows_of(source, 40)  # 160 rows of 32 are two passes and more over 60 documents of 47 on average
    first, halfway = rows_of(source, 25, dp_degree=2)
    assert halfway[:, 0].min() > 60
    rest, _ = rows_of(source, 15, dp_degree=1, workers=2, positions=halfway)
    assert first + rest == undisturbed


def test_validation_reads_a_stream_from_its_start_each_time(folder):
    source = build(folder(), "hf_stream")
    cfg = Validation(local_batch_size=2, seq_len=32, steps=3)
    first, again = ([batch.tokens.tolist() for batch in validation_batches(cfg, source, ByteTokenizer(), dp_rank=0, dp_degree=1)] for _ in range(2))
    assert first == again and len(first) == 3


def test_bad_records_of_a_stream_are_named_or_left_out(folder):
    records = [{"text": "first"}, {"text": None}, {"text": "x" * 40}]
    path = folder(records)
    with pytest.raises(ConfigError, match=f"{path} train, record 1 of its stream: the value of 'text' must be a string, not None; set training.skip"):
        rows_of(build(path, "hf_stream"), 3)
    source = build(path, "hf_stream", skip=True)
    first, left_out, last, again = (source[i] for i in range(4))
    assert (first, len(left_out), last, again, source.skipped) == ("first", 0, "x" * 40, "first", 1)
    assert "110" not in str(rows_of(source, 3)[0])  # the n of None


def test_a_stream_without_records_or_without_the_key_is_refused(folder):
    assert "no key 'txt' among ['text']; did you mean 'text'?" in refused(folder(), "hf_stream", text_key="txt")
    assert f"training.dataset_path={folder([])}: cannot be read as a Hugging Face dataset" in refused(folder([]), "hf_stream")


def test_a_stream_that_changed_is_told(folder):
    first = build(folder(), "hf_stream").fingerprint
    assert build(folder(), "hf_stream").fingerprint == first
    assert build(folder([{"text": "other"}]), "hf_stream").fingerprint != first

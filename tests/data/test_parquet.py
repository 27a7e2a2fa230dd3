import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titanlite.config import DataSource
from titanlite.data.build import build_source
from titanlite.utils import ConfigError

TEXTS = [f"text {i} é\r\n\0" for i in range(250)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def write(tmp_path):
    def of(texts=TEXTS, name="a.parquet", key="text", kind=None, **options):
        table = pa.table({"id": list(range(len(texts))), key: pa.array(texts, kind)})
        pq.write_table(table, tmp_path / name, row_group_size=100, **options)
        return str(tmp_path / name)

    return of


def build(path, text_key="text", **options):
    return build_source(DataSource("parquet", path, text_key=text_key), **options)


def refused(path, **options):
    with pytest.raises(ConfigError) as caught:
        build(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_texts_of_parquet_come_back_exactly(write, kind, compression):
    source = build(write(kind=kind, compression=compression))
    assert [source[i] for i in range(len(source))] == TEXTS
    assert pickle.loads(pickle.dumps(source))[249] == TEXTS[249] and len(pickle.dumps(source)) < 20_000


def test_a_folder_of_parquet_files_is_read_in_order_without_empty_texts(write, tmp_path):
    write(["c", ""], "b.parquet"), write(["a", "", "b"], "a.parquet")
    source = build(str(tmp_path))
    assert [source[i] for i in range(len(source))] == ["a", "b", "c"] and source.skipped == 0


def test_a_missing_text_is_named_with_its_record_or_counted(write):
    path = write([*TEXTS[:120], None, *TEXTS[121:200], None])
    message = refused(path)
    assert message.startswith(f"training.dataset_path={path}: {path}:120: the value of 'text' must be a string, not null; see text_key='text', or set")
    source = build(path, skip_bad_records=True)
    assert (len(source), source.skipped, source[120]) == (199, 2, TEXTS[121])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"key": "txt"}, "no column 'text' among ['id', 'txt']; did you mean 'txt'?"),
        ({"texts": [1, 2]}, "the column 'text' must hold strings, not int64"),
        ({"texts": [["a"]]}, "the column 'text' must hold strings, not list<"),
    ],
)
def test_another_column_is_refused(write, options, message):
    path = write(**options)
    assert f"{path}: {message}" in refused(path)


def test_a_broken_parquet_file_is_named_and_left_out_where_that_is_asked(write, tmp_path, caplog):
    good, bad = write(), write(name="b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    for broken, problem in [(b"", "not parquet"), (whole[:-10], "not parquet"), (b"text", "not parquet")]:
        (tmp_path / "b.parquet").write_bytes(broken)
        assert f"{bad}: {problem}: " in refused(str(tmp_path))
        source = build(str(tmp_path), skip_bad_records=True)
        assert (len(source), source.skipped) == (len(TEXTS), 1) and source[0] == TEXTS[0] and good


def test_a_row_group_that_cannot_be_read_is_named_and_the_others_are_read_where_that_is_asked(write, tmp_path):
    path = write(compression="zstd", use_dictionary=False)
    where = pq.ParquetFile(path).metadata.row_group(1).column(1)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[where.data_page_offset + 30 : where.data_page_offset + where.total_compressed_size] = b"\xff" * (where.total_compressed_size - 30)
    (tmp_path / "a.parquet").write_bytes(content)
    assert f"{path}:100: records 100 to 199 (row group 1) cannot be read: " in refused(path)
    source = build(path, skip_bad_records=True)
    assert source.skipped == 1 and [source[i] for i in range(len(source))] == TEXTS[:100] + TEXTS[200:]


def test_parquet_that_changed_is_told(write):
    first = build(write()).fingerprint
    assert build(write()).fingerprint == first != build(write([*TEXTS, "more"])).fingerprint

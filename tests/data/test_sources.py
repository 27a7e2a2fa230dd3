import json
import logging
import multiprocessing
import os
import pickle
import random
import re
from pathlib import Path

import pytest

from titanlite.config import DataSource
from titanlite.data import build, files, records
from titanlite.utils import ConfigError


@pytest.fixture(autouse=True)
def cache(request, tmp_path_factory, monkeypatch):
    """`datasets` keeps what it converted here, not in the user's own cache."""
    if "jsonl" in request.node.name:
        import datasets

        folder = tmp_path_factory.mktemp("cache")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
        return folder


@pytest.fixture
def jsonl(tmp_path):
    """A JSONL file of records, or of raw lines."""

    def write(*lines, name="data.jsonl"):
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in raw))
        return str(tmp_path / name)

    return write


def build_source(name, path, *, text_key="text", **options):
    return build.build_source(DataSource(name, path, text_key=text_key), **options)


def documents(source):
    return [source[i] for i in range(len(source))]


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        build_source(*args, **options)
    return str(caught.value)


# The standard library


def test_the_standard_library_is_split_into_two_parts_without_tests_and_installed_packages():
    train, heldout = build_source("stdlib", None), build_source("stdlib_heldout", None)
    assert not set(train.files) & set(heldout.files)
    share = len(heldout) / (len(train) + len(heldout))
    assert 0.02 < share < 0.1  # one in 20, chosen by name
    for file in train.files + heldout.files:
        assert file.endswith(".py")
        assert not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(file.split(os.sep))
    assert any(file.endswith(os.path.join("json", "decoder.py")) for file in train.files + heldout.files)


def test_documents_of_the_standard_library_are_small_and_together_are_its_files():
    source = build_source("stdlib_heldout", None)
    texts = [source[i] for i in range(len(source))]
    assert all(texts) and sum(len(t.encode()) >= files.STDLIB_DOCUMENT_BYTES for t in texts) > len(texts) / 2
    whole = sorted(Path(f).read_bytes().decode() for f in source.files if Path(f).stat().st_size)
    by_file = [[t for t, (f, _, _) in zip(texts, source.pieces.tolist()) if f == i] for i in range(len(source.files))]
    assert sorted("".join(pieces) for pieces in by_file if pieces) == whole


def test_the_standard_library_comes_in_the_same_order_each_time():
    source = build_source("stdlib", None)
    assert source.files == sorted(source.files)
    assert source.fingerprint == build_source("stdlib", None).fingerprint
    assert source.fingerprint != build_source("stdlib_heldout", None).fingerprint


def test_a_path_that_would_not_be_read_is_refused():
    assert refused("stdlib", "x.txt") == (
        "training.dataset_path=x.txt is not read with training.dataset=stdlib: use text or jsonl"
    )


# Text


def test_text_is_cut_at_line_ends_into_documents_that_give_it_back(tmp_path):
    draw = random.Random(0)
    lines = [
        "".join(draw.choices("aé€😀 \t\0", k=draw.randint(0, 200))) + draw.choice(["\n", "\r\n"]) for _ in range(3000)
    ]
    text = "".join(lines) + "no line end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    source = build_source("text", str(tmp_path / "a.txt"))
    assert "".join(documents(source)) == text
    assert all(document.endswith("\n") for document in documents(source)[:-1])
    sizes = [len(document.encode()) for document in documents(source)]
    assert all(4096 <= size < 4096 + 1000 for size in sizes[:-1])


def test_a_small_text_gives_documents_enough_for_the_rows_of_a_step_and_a_large_one_long_documents(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789abcde\n" * 12_500)
    assert len(build_source("text", str(file))) == 49  # 200 kB in 4 KiB
    file.write_bytes(b"0123456789abcde\n" * 1_500_000)
    assert len(build_source("text", str(file))) == 367  # 24 MB in 64 KiB


def test_a_line_longer_than_a_document_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 300_000 + "\nshort\n")
    assert [len(document) for document in documents(build_source("text", str(tmp_path / "a.txt")))] == [300_001, 6]


def test_a_folder_and_a_glob_are_read_in_order_without_other_files(tmp_path):
    (tmp_path / "b" / "deep.txt").mkdir(parents=True)  # a folder that is named as a file
    for name in ("b/2.txt", "a.txt", "b/deep.txt/1.txt", "c.md", "b/empty.txt"):
        (tmp_path / name).write_text("" if "empty" in name else name)
    assert documents(build_source("text", str(tmp_path))) == ["a.txt", "b/2.txt", "b/deep.txt/1.txt"]
    assert documents(build_source("text", f"{tmp_path}/b/*.txt")) == ["b/2.txt"]
    assert documents(build_source("text", f"{tmp_path}/**/*.md")) == ["c.md"]


def test_a_file_may_be_named_as_a_glob_would_be(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert documents(build_source("text", str(tmp_path / "a[1].txt"))) == ["text"]


def test_the_fingerprint_tells_other_data_but_not_another_place(tmp_path):
    prints = []
    for folder, text in [("a", "same"), ("b", "same"), ("c", "longer")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(text)
        prints.append(build_source("text", str(tmp_path / folder)).fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_files_that_are_not_there_are_refused(name, tmp_path):
    path = f"{tmp_path}/nothing"
    assert refused(name, path) == f"training.dataset_path={path}: {path}: No such file or directory"
    message = refused(name, str(tmp_path), key="validation.dataset_path")
    suffix = {"text": "txt", "jsonl": "jsonl and *.json"}[name]
    assert message == f"validation.dataset_path={tmp_path}: no file found (of a folder, all *.{suffix} are read)"
    assert "no file found" in refused(name, f"{tmp_path}/*.data")
    assert refused(name, None) == f"training.dataset={name} needs training.dataset_path, a file, folder or glob"


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_a_link_to_nowhere_is_refused(name, tmp_path):
    (tmp_path / f"x.{'txt' if name == 'text' else name}").symlink_to(tmp_path / "gone")
    assert "No such file or directory" in refused(name, str(tmp_path))


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_empty_data_are_refused(name, tmp_path):
    path = str(tmp_path / "a")
    open(path, "w").close()
    assert refused(name, path) == f"training.dataset_path={path}: no documents: all is empty, 0 bad records"


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_data_without_permission_are_refused(name, tmp_path, monkeypatch):
    (tmp_path / "a").write_text('{"text": "x"}')

    def deny(file, *_):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(files if name == "text" else records, "open", deny, raising=False)  # root may open everything
    path = str(tmp_path / "a")
    assert refused(name, path) == f"training.dataset_path={path}: {path}: Permission denied"


def test_text_that_is_not_utf_8_is_refused_with_its_place(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"fine line\n" * 1000 + b"bad \xff line\n")
    message = refused("text", str(file))
    assert f"{file}:1001: byte 10004 (0xff) is not UTF-8" in message
    assert "training.skip_bad_records=true" in message and "convert the file" in message


def test_files_that_are_not_utf_8_are_left_out_counted_and_told_of_when_asked(tmp_path, caplog):
    for name, data in [("a", b"good"), ("b", b"bad \xff"), ("c", b"bad \xc3"), ("d", "gut é".encode())]:
        (tmp_path / f"{name}.txt").write_bytes(data)
    with caplog.at_level(logging.WARNING, "titanlite"):
        source = build_source("text", str(tmp_path), skip_bad_records=True)
    assert documents(source) == ["good", "gut é"] and source.skipped == 2
    (line,) = caplog.messages
    assert line.startswith(
        f"training.dataset_path={tmp_path} skipped_records=2 first='{tmp_path}/b.txt:1: byte 4 (0xff)"
    )


def test_a_file_cut_short_while_training_is_noticed(tmp_path):
    (tmp_path / "a.txt").write_text("text\n" * 10)
    source = build_source("text", str(tmp_path))
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(OSError, match="a.txt is shorter than when the run started"):
        source[0]


# JSONL


def test_jsonl_texts_come_back_exactly(jsonl):
    texts = ["plain", "é€😀", "a\r\nb\n", "nul \0 and tab \t", " ", "x" * 100_000]
    source = build_source("jsonl", jsonl(*({"id": i, "text": text} for i, text in enumerate(texts))))
    assert documents(source) == texts and source.skipped == 0


def test_jsonl_takes_windows_line_ends_a_byte_order_mark_and_blank_lines_at_the_end(jsonl, tmp_path):
    jsonl(b'\xef\xbb\xbf{"text": "a"}\r', b'{"text": "raw \0 and \t inside"}\r', b"\r", b"  ", b"", name="a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "no line end"}')
    assert documents(build_source("jsonl", str(tmp_path))) == ["a", "raw \0 and \t inside", "no line end"]


def test_jsonl_records_with_an_empty_text_are_no_documents(jsonl):
    source = build_source("jsonl", jsonl({"text": ""}, {"text": "a"}, {"text": ""}))
    assert documents(source) == ["a"] and source.skipped == 0


def test_a_jsonl_line_of_50_mb_is_a_document(jsonl):
    text = "0123456789" * 5_000_000
    source = build_source("jsonl", jsonl({"text": "small"}, {"text": text}, {"text": "after"}))
    assert len(source) == 3 and source[1] == text and source[2] == "after"


def test_jsonl_data_converted_earlier_are_never_stale(jsonl):
    path = jsonl({"text": "one"})
    assert documents(build_source("jsonl", path)) == ["one"]
    jsonl({"text": "two"})  # as long as before
    assert documents(build_source("jsonl", path)) == ["two"]
    jsonl({"text": "three", "other": "four"})
    assert documents(build_source("jsonl", path)) == ["three"]
    assert documents(build_source("jsonl", path, text_key="other")) == ["four"]


def test_jsonl_data_are_converted_once(jsonl, monkeypatch):
    path = jsonl({"text": "a"}, b"broken")
    first = build_source("jsonl", path, skip_bad_records=True)
    monkeypatch.setattr(records, "read_record", None)
    again = build_source("jsonl", path, skip_bad_records=True)
    assert documents(again) == ["a"] and again.skipped == first.skipped == 1


def test_jsonl_data_may_be_converted_by_several_ranks_at_once(jsonl):
    path = jsonl(*({"text": f"{i} " * 100} for i in range(5000)))
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4) as pool:
        assert pool.map(_fingerprint_of_data, [path] * 4) == [(5000, "4999 " * 100)] * 4


def _fingerprint_of_data(path):
    source = build_source("jsonl", path)
    return len(source), source[4999]


BAD_LINES = [
    (b"", "a blank line between records"),
    (b'{"text": "cut', 'not JSON: Unterminated string starting at at column 10: \'{"text": "cut'),
    (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data at column 15"),
    (b'["a"]', "a record must be an object, not ['a']"),
    (b"null", "a record must be an object, not None"),
    (b'{"txt": "a", "id": 1}', "no key 'text' among ['txt', 'id']; did you mean 'txt'?"),
    (b'{"text": 5}', "the value of 'text' must be a string, not 5"),
    (b'{"text": null}', "the value of 'text' must be a string, not None"),
    (b'{"text": ["a"]}', "the value of 'text' must be a string, not ['a']"),
    (b'{"text": "\xff"}', "byte 10 (0xff) of the line is not UTF-8"),
    (b'{"text": "\\ud83d"}', "surrogates not allowed"),
    (b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize("line, problem", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_jsonl_record_is_refused_with_its_place_and_the_fix(jsonl, line, problem):
    path = jsonl({"text": "good"}, line, {"text": "good"})
    message = refused("jsonl", path)
    assert message.startswith(f"training.dataset_path={path}: {path}:2: ") and problem in message
    assert "see text_key='text', or set training.skip_bad_records=true" in message


def test_bad_jsonl_records_are_left_out_counted_and_told_of_when_asked(jsonl, caplog):
    lines = [line for bad, _ in BAD_LINES for line in (bad, {"text": "good"})]
    path = jsonl(*lines)
    with caplog.at_level(logging.WARNING, "titanlite"):
        source = build_source("jsonl", path, skip_bad_records=True)
    assert documents(source) == ["good"] * len(BAD_LINES) and source.skipped == len(BAD_LINES)
    (line,) = caplog.messages
    assert re.fullmatch(rf".* skipped_records={len(BAD_LINES)} first='{path}:1: a blank line between records'", line)


def test_jsonl_data_with_nothing_but_bad_records_are_refused(jsonl):
    path = jsonl(b"bad", b"worse")
    assert "no documents: all is empty, 2 bad records" in refused("jsonl", path, skip_bad_records=True)


@pytest.mark.parametrize("name", ["stdlib", "text", "jsonl"])
def test_a_source_goes_to_worker_processes_small(name, jsonl, tmp_path):
    path = jsonl(*({"text": "x" * 1000} for _ in range(1000)))
    (tmp_path / "a.txt").write_text("x\n" * 500_000)
    source = build_source(name, {"stdlib": None, "text": str(tmp_path), "jsonl": path}[name])
    pickled = pickle.dumps(source)
    assert len(pickled) < 250_000  # the data are a megabyte and more
    assert pickle.loads(pickled)[7] == source[7]

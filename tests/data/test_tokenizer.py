import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from titanlite.config import Model
from titanlite.data.tokenizer import ByteTokenizer, SubwordTokenizer, build_tokenizer, check_vocab, stream_decode
from titanlite.utils import ConfigError

HARD = ["", "plain", "é€😀 👩‍👩‍👧 \u200d", "a\r\nb\tc \0 d", "  two  spaces ", "<|end|> is text here", "\ufffd kept"]
SAMPLE = ["The quick brown fox jumps over the lazy dog. ", "def f(x):\n    return x + 1\n", "Größe 😀 €\r\n"] * 20


@pytest.fixture(scope="module")
def bpe():
    return build_tokenizer(Model(tokenizer="bpe", vocab_size=300), None, [SAMPLE])


@pytest.fixture
def hf_folder(bpe, tmp_path):
    """A Hugging Face folder with marks <bos> = 300 and <eos> = 301."""

    def write(settings_name=None, *, marks=("<bos>", "<eos>"), **settings):
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer.from_str(bpe.backend.to_str())
        backend.add_special_tokens([AddedToken(mark) for mark in marks])
        backend.enable_truncation(3)
        backend.enable_padding(length=50)
        backend.save(str(tmp_path / "tokenizer.json"))
        if settings_name:
            (tmp_path / settings_name).write_text(json.dumps(settings))
        return str(tmp_path)

    return write


def load(folder):
    return build_tokenizer(Model(hf_assets_path=folder), None, None)


@pytest.fixture(params=["byte", "bpe", "hf"])
def tokenizer(request, bpe, hf_folder):
    return {"byte": ByteTokenizer, "bpe": lambda: bpe, "hf": lambda: load(hf_folder())}[request.param]()


@pytest.mark.parametrize("text", HARD)
def test_text_survives_the_tokens(tokenizer, text):
    if tokenizer.vocab_size == 302:  # where Hugging Face files mark a token as special, text may hold it
        text = text.replace("<|end|>", "")
    assert tokenizer.decode(tokenizer.encode_document(text).tolist()) == text
    assert "".join(stream_decode(tokenizer, iter(tokenizer.encode_document(text).tolist()))) == text


def test_a_document_has_its_marks_and_a_prompt_no_end(tokenizer):
    ids = tokenizer.encode_document("a fox")
    assert isinstance(ids, np.ndarray) and ids[-1] == tokenizer.end_id
    assert tokenizer.encode_prompt("a fox") == ids[:-1].tolist()
    assert not set(ids[1:-1].tolist()) & {ids[0], ids[-1]}
    assert max(ids) < tokenizer.vocab_size


def test_a_tokenizer_goes_to_worker_processes(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "a fox <|end|> é"
    assert copy.encode_document(text).tolist() == tokenizer.encode_document(text).tolist()
    assert (copy.vocab_size, copy.end_id) == (tokenizer.vocab_size, tokenizer.end_id)


def test_a_stream_shows_whole_characters_as_soon_as_they_are_there(tokenizer):
    text = "x😀 é€ 👩‍👧 end" * 3
    ids = tokenizer.encode_document(text).tolist()
    shown = ""
    for piece in stream_decode(tokenizer, iter(ids)):
        assert piece and "\ufffd" not in piece
        shown += piece
    assert shown == text
    pieces = stream_decode(tokenizer, iter(tokenizer.encode_prompt("x😀")))
    assert next(pieces) == "x" and "".join(pieces) == "😀"


def test_a_stream_after_a_prompt_keeps_the_space_that_some_decoders_drop():
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({"▁Hello": 0, "▁big": 1, "▁world": 2, "</s>": 3}, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = SubwordTokenizer(backend, 3, 3, marks_in_text=True)
    assert list(stream_decode(tokenizer, iter([0, 1, 2]))) == ["Hello", " big", " world"]
    assert list(stream_decode(tokenizer, iter([1, 2]), after=[0])) == [" big", " world"]


def test_a_stream_ends_with_the_marks_of_what_was_no_character():
    bytes_of_a_cut_character = "ab😀".encode()[:-1]
    assert "".join(stream_decode(ByteTokenizer(), iter(bytes_of_a_cut_character))) == "ab\ufffd"
    assert "".join(stream_decode(ByteTokenizer(), iter(b"a\xff\xfe\xffb\xff"))) == "a\ufffd\ufffd\ufffdb\ufffd"


def test_ids_that_only_a_padded_vocabulary_has_are_left_out(tokenizer):
    assert tokenizer.decode([*tokenizer.encode_prompt("fox"), 5000]) == "fox"


def test_bytes_stand_for_themselves_with_the_end_before_and_after():
    assert ByteTokenizer().encode_document("aé").tolist() == [256, 97, 0xC3, 0xA9, 256]
    assert (ByteTokenizer().vocab_size, ByteTokenizer().end_id) == (257, 256)


def test_bytes_are_the_default_without_assets():
    assert isinstance(build_tokenizer(Model(), None, None), ByteTokenizer)


def test_bpe_merges_what_its_data_repeat_and_keeps_to_its_size(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode_document("The quick brown fox")) < 14


def test_bpe_trained_again_is_the_same_and_is_read_from_the_runs_folder(tmp_path, bpe):
    cfg = Model(tokenizer="bpe", vocab_size=300)
    trained = build_tokenizer(cfg, tmp_path / "run", [SAMPLE])
    assert trained.backend.to_str() == bpe.backend.to_str()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["tokenizer.json"]
    loaded = build_tokenizer(cfg, tmp_path / "run", None)
    assert loaded.encode_document("The fox <|end|>").tolist() == trained.encode_document("The fox <|end|>").tolist()


def test_bpe_takes_its_sample_from_all_over_the_data(monkeypatch, source_of):
    monkeypatch.setattr("titanlite.data.tokenizer.BPE_SAMPLE_CHARACTERS", 2000)
    source = source_of(["aaaa " * 20] * 500 + ["bbbb " * 20] * 500)
    tokenizer = build_tokenizer(Model(tokenizer="bpe", vocab_size=300), None, [source])
    assert len(tokenizer.encode_document("aaaa")) == len(tokenizer.encode_document("bbbb")) == 3


@pytest.mark.parametrize("vocab_size", [None, 256])
def test_bpe_without_room_for_all_bytes_is_refused(vocab_size):
    with pytest.raises(ConfigError, match=rf"needs model.vocab_size >= 257 \(256 bytes .*\), not {vocab_size}"):
        build_tokenizer(Model(tokenizer="bpe", vocab_size=vocab_size), None, [SAMPLE])


def test_bpe_that_cannot_be_read_is_refused(tmp_path):
    cfg = Model(tokenizer="bpe", vocab_size=300)
    with pytest.raises(ConfigError, match="the run's folder has no tokenizer.json"):
        build_tokenizer(cfg, tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="model.tokenizer: .*tokenizer.json is not a tokenizer.json"):
        build_tokenizer(cfg, tmp_path, None)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("tokenizer_config.json", {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "special": True}}),
        ("config.json", {"bos_token_id": 300, "eos_token_id": 301}),
        ("generation_config.json", {"bos_token_id": 300, "eos_token_id": [301, 5]}),
        ("tokenizer_config.json", {"bos_token": None}),
        ("config.json", {"bos_token_id": -1, "eos_token_id": []}),
        (None, {}),
    ],
)
def test_a_hugging_face_tokenizer_has_the_marks_its_files_name_else_well_known_ones(hf_folder, name, settings):
    tokenizer = load(hf_folder(name, **settings))
    ids = tokenizer.encode_document("The quick brown fox jumps")  # longer than the file's truncation
    assert (ids[0], ids[-1]) == (300, 301) and tokenizer.vocab_size == 302
    assert tokenizer.decode(ids) == "The quick brown fox jumps"


def test_a_hugging_face_tokenizer_without_a_begin_token_begins_with_the_end(hf_folder):
    tokenizer = load(hf_folder(marks=("</s>",)))
    assert tokenizer.encode_document("a")[[0, -1]].tolist() == [300, 300]


def test_a_hugging_face_tokenizer_without_an_end_token_is_refused(hf_folder):
    folder = hf_folder("tokenizer_config.json", marks=("[SEP]",), eos_token="<nowhere>")
    file = Path(folder, "tokenizer.json")
    file.write_text(file.read_text().replace("<|end|>", "<|other|>"))
    with pytest.raises(ConfigError, match="no end token: name it as eos_token in tokenizer_config.json"):
        load(folder)


def test_a_missing_or_broken_hugging_face_file_is_refused(hf_folder, tmp_path):
    with pytest.raises(ConfigError, match="needs model.hf_assets_path"):
        build_tokenizer(Model(tokenizer="hf"), None, None)
    with pytest.raises(ConfigError, match="model.hf_assets_path=.*/tokenizer.json: No such file or directory"):
        load(str(tmp_path / "nothing"))
    folder = hf_folder("tokenizer_config.json")
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(ConfigError, match="tokenizer_config.json is not JSON: "):
        load(folder)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer.json: "):
        load(folder)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused():
    check_vocab(ByteTokenizer(), 257)
    with pytest.raises(ConfigError) as caught:
        check_vocab(ByteTokenizer(), 256)
    assert str(caught.value) == (
        "model.vocab_size=256 is smaller than the tokenizer's 257 tokens: set model.vocab_size=257 or larger"
    )
    assert "model.vocab_size" in caught.value.keys

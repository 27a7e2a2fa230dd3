import json
import multiprocessing
import os
import signal

import numpy as np
import pytest

from titanlite.cli import main
from titanlite.config import DataSource, load_config
from titanlite.data.build import build_source, build_sources, check_tokens
from titanlite.data.tokenizer import ByteTokenizer, build_tokenizer
from titanlite.utils import ConfigError, Fault

TEXTS = ["one", "", "twö\n", *(f"{i} " * (i % 50) for i in range(300))]


@pytest.fixture
def config(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "run.toml").write_text(f'[training]\ndataset = "jsonl"\ndataset_path = "{tmp_path}/a.jsonl"\n')
    return tmp_path / "run.toml"


@pytest.mark.parametrize("words", [[], ["--model.tokenizer", "bpe", "--model.vocab_size", "300"]], ids=["byte", "bpe"])
def test_tokens_on_disk_are_what_the_run_would_read_from_text(config, tmp_path, words, capsys):
    out = str(tmp_path / "tokens")
    assert main(["tokenize", str(config), "-o", out, "--workers", "2", *words]) == 0
    assert f'format = "tokens"\npath = "{out}"' in capsys.readouterr().out
    cfg, _ = load_config(config, words)
    (text,) = build_sources(cfg)
    tokenizer = ByteTokenizer() if not words else build_tokenizer(load_config(config, ["--model.hf_assets_path", out])[0].model, None, None)
    source = build_source(DataSource("tokens", out))
    assert len(source) == len(text) and source[0].dtype == np.uint16
    for i in range(len(text)):
        assert source[i].tolist() == tokenizer.encode_document(text[i]).tolist()
    check_tokens([source], tokenizer)
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert manifest["tokens"] == sum(len(source[i]) for i in range(len(source))) and manifest["documents"] == len(source)
    assert (tmp_path / "tokens" / "tokens.bin").stat().st_size == manifest["bin_bytes"] == 2 * manifest["tokens"]


def test_each_source_of_a_mixture_gets_a_folder(config, tmp_path):
    (tmp_path / "b.txt").write_text("text")
    config.write_text(f"""
[[data.sources]]
format = "jsonl"
path = "{tmp_path}/a.jsonl"
[[data.sources]]
format = "text"
path = "{tmp_path}/b.txt"
""")
    assert main(["tokenize", str(config), "-o", str(tmp_path / "tokens"), "--workers", "1"]) == 0
    assert build_source(DataSource("tokens", str(tmp_path / "tokens" / "1")))[0].tolist() == [256, *b"text", 256]
    assert len(build_source(DataSource("tokens", str(tmp_path / "tokens" / "0")))) == sum(map(bool, TEXTS))


def test_tokens_of_another_tokenizer_are_refused(config, tmp_path):
    assert main(["tokenize", str(config), "-o", str(tmp_path / "tokens")]) == 0
    source = build_source(DataSource("tokens", str(tmp_path / "tokens")))

    class Other(ByteTokenizer):
        fingerprint = "other"

    with pytest.raises(ConfigError, match=r"written by titanlite tokenize with another tokenizer \(byte\) than this run's \(other\)"):
        check_tokens([source], Other())


@pytest.mark.parametrize("name, n, message", [("tokens.bin", -2, "tokens.bin has "), ("tokens.idx", -1, "tokens.idx has "), ("manifest.json", -5, "not a manifest of titanlite")])
def test_tokens_that_were_cut_short_are_refused(config, tmp_path, name, n, message):
    assert main(["tokenize", str(config), "-o", str(tmp_path / "tokens")]) == 0
    file = tmp_path / "tokens" / name
    file.write_bytes(file.read_bytes()[:n])
    with pytest.raises(ConfigError, match=message):
        build_source(DataSource("tokens", str(tmp_path / "tokens")))


def test_an_existing_folder_tokens_and_streams_are_refused(config, tmp_path, capsys):
    (tmp_path / "tokens").mkdir()
    assert main(["tokenize", str(config), "-o", str(tmp_path / "tokens")]) == 2
    assert "tokens exists: choose another folder" in capsys.readouterr().err
    assert main(["tokenize", str(config), "-o", str(tmp_path / "t")]) == 0
    words = ["--training.dataset", "tokens", "--training.dataset_path", str(tmp_path / "t")]
    assert main(["tokenize", str(config), "-o", str(tmp_path / "u"), *words]) == 2
    assert "only text that ends can be tokenized" in capsys.readouterr().err


@pytest.mark.parametrize("how, code, message", [("killed", 1, "a process that tokenizes was ended"), ("gone", 1, "a.txt is shorter than when the run started")])
def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch, capsys, how, code, message):
    def encode_documents(self, texts):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Fault("a.txt is shorter than when the run started")

    monkeypatch.setattr(ByteTokenizer, "encode_documents", encode_documents)
    (tmp_path / "a.txt").write_text("x\n" * 50_000)
    (tmp_path / "run.toml").write_text(f'[training]\ndataset = "text"\ndataset_path = "{tmp_path}/a.txt"\n')
    assert main(["tokenize", str(tmp_path / "run.toml"), "-o", str(tmp_path / "tokens"), "--workers", "2"]) == code
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "run.toml"]
    assert multiprocessing.active_children() == []

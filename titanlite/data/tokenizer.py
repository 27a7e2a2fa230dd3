"""Between text and tokens: bytes, a byte-level BPE trained on the run's own data, or a Hugging Face tokenizer.json."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import numpy as np

from titanlite.config import Model
from titanlite.data.order import shuffled_index
from titanlite.data.sources import Source, fingerprint_of
from titanlite.utils import ConfigError

BPE_END = "<|end|>"
BPE_SAMPLE_CHARACTERS = 8_000_000  # more text hardly changes the merges
HF_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
HF_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>")
HF_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", BPE_END)


class Tokenizer(Protocol):
    """Goes to worker processes, so it can be pickled."""

    vocab_size: int  # every id is below it
    end_id: int
    fingerprint: str  # the same where the same text gives the same ids

    def encode_document(self, text: str) -> np.ndarray:
        """[n] ids, with a mark before and the end mark after: a document's boundary is learnt from both sides."""

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """`encode_document` of each."""

    def encode_prompt(self, text: str) -> list[int]:
        """As the start of a document, to be gone on with."""

    def decode(self, ids: Sequence[int]) -> str:
        """Without marks; U+FFFD for what is not UTF-8."""


class ByteTokenizer:
    vocab_size = 257
    end_id = 256
    fingerprint = "byte"

    def encode_document(self, text: str) -> np.ndarray:
        data = np.frombuffer(text.encode(), np.uint8)
        ids = np.full(len(data) + 2, self.end_id, np.uint16)
        ids[1:-1] = data
        return ids

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode_document(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        return [self.end_id, *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library with the marks it leaves to the caller."""

    def __init__(self, backend: "tokenizers.Tokenizer", begin_id: int, end_id: int, marks_in_text: bool):  # noqa: F821
        backend.no_truncation()  # some files ask for it, and would shorten documents silently
        backend.no_padding()
        backend.encode_special_tokens = not marks_in_text
        self.backend = backend
        self.begin_id = begin_id
        self.end_id = end_id
        self.vocab_size = max(backend.get_vocab().values()) + 1  # ids may have gaps

    def __reduce__(self):
        marks_in_text = not self.backend.encode_special_tokens  # not kept when the backend is pickled
        return SubwordTokenizer, (self.backend, self.begin_id, self.end_id, marks_in_text)

    @property
    def fingerprint(self) -> str:
        parts = json.loads(self.backend.to_str())
        for unused in ("truncation", "padding", "post_processor", "decoder"):
            parts.pop(unused, None)
        return fingerprint_of(parts, self.begin_id, self.end_id)

    def encode_document(self, text: str) -> np.ndarray:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)  # without places in the text, in two thirds of the time
        return [np.array([self.begin_id, *one.ids, self.end_id], np.int32) for one in encoded]

    def encode_prompt(self, text: str) -> list[int]:
        return [self.begin_id, *self.backend.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids)


def build_tokenizer(cfg: Model, run_dir: Path | None, sources: Sequence[Source] | None) -> Tokenizer:
    """The tokenizer that `model.tokenizer` names.

    bpe is read from run_dir/tokenizer.json, or trained on `sources` and kept there: call it on one rank first. Raises
    ConfigError where a file, the vocabulary's size or the end token is missing.
    """
    kind = tokenizer_kind(cfg)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "hf":
        return _load_hf(cfg.hf_assets_path)
    file = run_dir and run_dir / "tokenizer.json"
    if file and file.exists():
        backend = _load(file, "model.tokenizer")
    else:
        backend = _train_bpe(cfg.vocab_size, sources)
        if file:
            part = file.with_name(f"{file.name}.{uuid4().hex}")  # whoever reads meanwhile sees all of it or nothing
            run_dir.mkdir(parents=True, exist_ok=True)
            backend.save(str(part))
            os.replace(part, file)
    end_id = backend.token_to_id(BPE_END)
    if end_id is None:
        raise ConfigError(f"model.tokenizer=bpe: {file} has no token {BPE_END!r}", "model.tokenizer")
    return SubwordTokenizer(backend, end_id, end_id, marks_in_text=False)


def tokenizer_kind(cfg: Model) -> str:
    return cfg.tokenizer or ("hf" if cfg.hf_assets_path else "byte")


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError when the model has no embedding for some token."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} tokens: "
            f"set model.vocab_size={tokenizer.vocab_size} or larger",
            "model.vocab_size",
            "model.tokenizer",
            "model.hf_assets_path",
        )


def stream_decode(tokenizer: Tokenizer, ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
    """The text of `ids`, which follow the prompt `after`, in pieces of whole characters, each as soon as it is there."""
    shown, new = list(after), []  # what was shown last stays as context: some decoders drop a first token's space
    for i in ids:
        new.append(i)
        text = tokenizer.decode(shown + new)
        if text.endswith("\ufffd"):  # perhaps a character's first bytes
            continue
        if piece := text[len(tokenizer.decode(shown)) :]:
            yield piece
            shown, new = new, []
    if piece := tokenizer.decode(shown + new)[len(tokenizer.decode(shown)) :]:
        yield piece


def _train_bpe(vocab_size: int | None, sources: Sequence[Source] | None):
    """Byte-level BPE; the same data give the same vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size is None or vocab_size < 257:
        message = f"model.tokenizer=bpe needs model.vocab_size >= 257 (256 bytes and {BPE_END}), not {vocab_size}"
        raise ConfigError(message, "model.vocab_size", "model.tokenizer")
    if not sources:
        raise ConfigError("model.tokenizer=bpe: the run's folder has no tokenizer.json", "model.tokenizer")

    def sample() -> Iterator[str]:
        for source in sources:
            left = BPE_SAMPLE_CHARACTERS // len(sources)
            for i in range(len(source)):
                text = source[i if getattr(source, "in_order", False) else shuffled_index(i, len(source), seed=0, epoch=0)]
                if not isinstance(text, str) and len(text):
                    raise ConfigError("model.tokenizer=bpe is trained on text, and the data are tokens: name their tokenizer as model.hf_assets_path", "model.tokenizer")
                text = text[:left] if isinstance(text, str) else ""
                left -= len(text)
                yield text
                if left == 0:
                    break

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BPE_END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(sample(), trainer)
    return backend


def _load_hf(path: str | None) -> SubwordTokenizer:
    """Begin and end tokens are those its settings name, else well-known ones; without a begin token the end begins too."""
    if path is None:
        raise ConfigError(
            "model.tokenizer=hf needs model.hf_assets_path=a folder with a tokenizer.json", "model.tokenizer"
        )
    folder = Path(path).expanduser()
    backend = _load(folder / "tokenizer.json", f"model.hf_assets_path={path}")
    settings = [_read_settings(folder / name) for name in HF_SETTINGS if (folder / name).exists()]
    end_id = _find_mark("eos", settings, HF_ENDS, backend)
    if end_id is None:
        raise ConfigError(
            f"model.hf_assets_path={path}: no end token: name it as eos_token in tokenizer_config.json "
            f"(none of {', '.join(HF_SETTINGS)} names a token that tokenizer.json has, nor has it one of {HF_ENDS})",
            "model.hf_assets_path",
        )
    begin_id = _find_mark("bos", settings, HF_BEGINS, backend)
    return SubwordTokenizer(backend, end_id if begin_id is None else begin_id, end_id, marks_in_text=True)


def _find_mark(kind: str, settings: list[dict], well_known: tuple[str, ...], backend) -> int | None:
    ids = backend.get_vocab()
    named = [s.get(f"{kind}{suffix}") for s in settings for suffix in ("_token", "_token_id")]
    for mark in [*named, *well_known]:
        if isinstance(mark, dict):  # an AddedToken
            mark = mark.get("content")
        if isinstance(mark, list):  # any of these ends a text; the first is the document's end
            mark = mark[0] if mark else None
        mark_id = ids.get(mark) if isinstance(mark, str) else mark
        if mark_id in ids.values():  # some files name -1
            return mark_id
    return None


def _read_settings(file: Path) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.hf_assets_path: {file} is not JSON: {error}", "model.hf_assets_path") from error


def _load(file: Path, setting: str):
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{setting}: {file}: {error.strerror}", "model.hf_assets_path") from error
    except Exception as error:  # the library has no exception of its own
        raise ConfigError(f"{setting}: {file} is not a tokenizer.json: {error}", "model.hf_assets_path") from error

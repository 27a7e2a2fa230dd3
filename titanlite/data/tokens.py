"""Documents that are tokens already, in Megatron's .bin and .idx files, read in place."""

import json
import os
from pathlib import Path

import numpy as np

from titanlite.data.sources import BadRecord, fingerprint_of, sample_of
from titanlite.utils import ConfigError

# The layout of an index (Megatron-LM's core/datasets/indexed_dataset.py, after fairseq's): magic, version, code of the tokens'
# type, number of sequences, number of documents (not in fairseq's), lengths int32, first bytes int64, documents' first sequences int64.
MAGIC, VERSION = b"MMIDIDX\0\0", 1
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8
MANIFEST = "manifest.json"  # beside the files that `titanlite tokenize` writes


class TokenSource:
    """Token ids in a memory-mapped file, a document each."""

    skipped = 0
    tokenizer: str | None = None  # fingerprint of what made the ids, where it is known

    def __init__(self, prefix: str, vocab_size: int):
        """Raises BadRecord where the files are not what the format says, or disagree."""
        self.prefix, self.vocab_size = prefix, vocab_size
        self.fingerprint = fingerprint_of([sample_of(f"{prefix}{suffix}") for suffix in (".idx", ".bin")])
        self._map()
        self._check()

    def _map(self) -> None:
        dtype, n, n_documents, at = _read_header(f"{self.prefix}.idx")
        index = _mapped(f"{self.prefix}.idx", np.uint8)
        lengths, firsts, documents = (part.view(kind) for part, kind in zip(np.split(index[at:], [4 * n, 12 * n]), ("<i4", "<i8", "<i8"), strict=True))
        self.data = _mapped(f"{self.prefix}.bin", dtype)
        if n_documents > 0 and len(documents) != n + 1:  # some document is more than one sequence
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            if (np.diff(documents) < 0).any() or documents[0] != 0 or documents[-1] != n or (firsts != ends[:-1] * self.data.itemsize).any():
                raise BadRecord(f"{self.prefix}.idx: its documents are not its sequences, one after another")
            lengths, firsts = np.diff(ends[documents]), ends[documents[:-1]] * self.data.itemsize
        self.lengths, self.firsts = lengths, firsts  # tokens, and bytes
        self.unsigned = f"u{self.data.itemsize}"  # in which a negative id is too large

    def __getstate__(self) -> dict:
        return {key: getattr(self, key) for key in ("prefix", "vocab_size", "fingerprint", "tokenizer")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        first = int(self.firsts[i]) // self.data.itemsize
        ids = self.data[first : first + int(self.lengths[i])]
        if len(ids) and ids.view(self.unsigned).max() >= self.vocab_size:
            raise ConfigError(
                f"{self.name(i)}: token {ids[ids.view(self.unsigned).argmax()]} is not below model.vocab_size={self.vocab_size}: the data were made by "
                f"another tokenizer; name it as model.hf_assets_path, and set model.vocab_size",
                "model.vocab_size",
                "model.hf_assets_path",
            )
        return ids

    def name(self, i: int) -> str:
        return f"{self.prefix}.bin, {self.lengths[i]} tokens from byte {self.firsts[i]}"

    def _check(self) -> None:
        lengths, firsts, size, bin_bytes = self.lengths, self.firsts, self.data.itemsize, self.data.nbytes
        if not len(lengths):
            return
        impossible = (lengths < 0) | (firsts < 0) | (firsts % size != 0)
        if impossible.any():
            raise BadRecord(f"{self.prefix}.idx: document {impossible.argmax()} has an impossible place")
        ends = firsts + lengths.astype(np.int64) * size
        if ends.max() > bin_bytes:
            i = int((ends > bin_bytes).argmax())
            raise BadRecord(
                f"{self.prefix}.bin has {bin_bytes} bytes, and {self.prefix}.idx places document {i} at bytes {firsts[i]} to {ends[i]}: "
                f"the data are cut short, or the two do not belong together"
            )
        if ends.max() != bin_bytes:
            raise BadRecord(f"{self.prefix}.bin has {bin_bytes} bytes, {self.prefix}.idx tells of {ends.max()}: the two do not belong together")


def build_tokens(path: str, vocab_size: int) -> TokenSource:
    """The source of Megatron's `path`.bin and `path`.idx; either may be named instead. Raises BadRecord."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    source = TokenSource(prefix, vocab_size)
    if len(source) and source.lengths.max() < 2:
        raise BadRecord(f"{prefix}.idx: none of the {len(source)} documents has two tokens: there is nothing to predict")
    return source


def build_tokenized(path: str, vocab_size: int) -> TokenSource:
    """The source in a folder that `titanlite tokenize` wrote. Raises BadRecord where it is not one."""
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        tokenizer, n_bytes = manifest["tokenizer"], {name: manifest[f"{name}_bytes"] for name in ("bin", "idx")}
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecord(f"{file}: not a manifest of titanlite tokenize: {error!r}") from error
    for name, size in n_bytes.items():
        if (found := os.path.getsize(f"{path}/tokens.{name}")) != size:
            raise BadRecord(f"{path}/tokens.{name} has {found} bytes, {file} says {size}: it is cut short or was changed")
    source = build_tokens(f"{path}/tokens", vocab_size)
    source.tokenizer = tokenizer
    return source


def index_bytes(dtype: np.dtype, lengths: np.ndarray) -> bytes:
    """A .idx file in Megatron's layout, each sequence a document: its size grows by 20 bytes a document."""
    code = next(code for code, kind in DTYPES.items() if dtype == kind)
    n = len(lengths)
    firsts = np.zeros(n, np.int64)
    np.cumsum(lengths[:-1] * dtype.itemsize, out=firsts[1:])
    header = MAGIC + VERSION.to_bytes(8, "little") + bytes([code]) + n.to_bytes(8, "little") + (n + 1).to_bytes(8, "little")
    return header + lengths.astype("<i4").tobytes() + firsts.astype("<i8").tobytes() + np.arange(n + 1, dtype="<i8").tobytes()


def _mapped(file: str, dtype: type) -> np.ndarray:
    """A file's content, in place; as a plain array, of which slices are cheap."""
    size = os.path.getsize(file)
    if size % np.dtype(dtype).itemsize:
        raise BadRecord(f"{file} has {size} bytes, which are no whole number of {np.dtype(dtype)} tokens: it is cut short or of another type")
    return np.memmap(file, dtype, mode="r").view(np.ndarray) if size else np.empty(0, dtype)


def _read_header(file: str) -> tuple[type, int, int, int]:
    """(type of the tokens, number of sequences, length of the list of documents or 0, byte at which the lengths begin)."""
    size = os.path.getsize(file)
    with open(file, "rb") as handle:
        header = handle.read(HEADER_BYTES + 8)
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER_BYTES:
        raise BadRecord(f"{file}: not an index of Megatron's: it does not begin with {MAGIC[:7].decode()}")
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    n, n_documents = (int.from_bytes(header[at : at + 8], "little") for at in (18, 26))
    if version != VERSION:
        raise BadRecord(f"{file}: version {version} of the index, {VERSION} is known")
    if code not in DTYPES:
        kind = {6: "float64", 7: "float32"}.get(code, "unknown")
        raise BadRecord(f"{file}: tokens of type {code} ({kind}): expected one of {', '.join(f'{c} ({np.dtype(t)})' for c, t in DTYPES.items())}")
    if size == HEADER_BYTES + 12 * n:
        return DTYPES[code], n, 0, HEADER_BYTES
    expected = HEADER_BYTES + 8 + 12 * n + 8 * n_documents
    if size == expected + n and n:
        raise BadRecord(f"{file}: sequences have modes: multimodal data are not supported")
    if size != expected:
        raise BadRecord(f"{file} has {size} bytes, and should have {expected} for {n} sequences in {max(n_documents - 1, 0)} documents: it is cut short or was changed")
    return DTYPES[code], n, n_documents, HEADER_BYTES + 8

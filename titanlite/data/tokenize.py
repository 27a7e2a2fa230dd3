"""`titanlite tokenize`: a run's documents as token ids on disk, in Megatron's files, made by several processes."""

import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from uuid import uuid4

import numpy as np

from titanlite.config import Config
from titanlite.data.build import build_sources
from titanlite.data.remote import with_local_data
from titanlite.data.sources import Source
from titanlite.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_kind
from titanlite.data.tokens import MANIFEST, index_bytes
from titanlite.utils import ConfigError, Fault, logger

BLOCK = 64  # documents that a worker encodes at once
LOG_EVERY_S = 5


def tokenize_command(cfg: Config, folder: Path, workers: int) -> None:
    """Writes `folder` whole or not at all: tokens.bin, tokens.idx and manifest.json, in subfolders 0, 1, ... where there are several sources."""
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder, or remove it")
    sources = build_sources(with_local_data(cfg))
    for source in sources:
        if hasattr(source, "prefix") or hasattr(source, "for_rows"):
            raise ConfigError(f"{source.name(0)}: only text that ends can be tokenized, not tokens nor a stream", "training.dataset", "data.sources")
    part = folder.with_name(f"{folder.name}.{uuid4().hex}.part")
    part.mkdir(parents=True)
    try:
        tokenizer = build_tokenizer(cfg.model, part, sources)
        for i, source in enumerate(sources):
            into = part if len(sources) == 1 else part / str(i)
            into.mkdir(exist_ok=True)
            _write(source, tokenizer, into, workers)
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for path in [folder] if len(sources) == 1 else [folder / str(i) for i in range(len(sources))]:
        logger.info(f'[[data.sources]]\nformat = "tokens"\npath = {json.dumps(str(path))}')
    if tokenizer_kind(cfg.model) == "bpe":
        logger.info(f"[model]\nhf_assets_path = {json.dumps(str(folder))}")


def _write(source: Source, tokenizer: Tokenizer, folder: Path, workers: int) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    lengths, tokens, start_s = [], 0, time.monotonic()
    logged_s = start_s
    with open(folder / "tokens.bin", "wb") as file:
        for ids, block_lengths in _encoded(source, tokenizer, dtype, workers):
            file.write(ids)
            lengths.append(block_lengths)
            tokens += len(ids)
            if time.monotonic() - logged_s > LOG_EVERY_S:
                logged_s = time.monotonic()
                n = sum(map(len, lengths))
                logger.info(f"documents={n:,} of {len(source):,} tokens={tokens:,} tokens/s={tokens / (logged_s - start_s):,.0f}")
        _sync(file)
    with open(folder / "tokens.idx", "wb") as file:
        file.write(index_bytes(dtype, np.concatenate(lengths)))
        _sync(file)
    manifest = {
        "documents": len(source),
        "tokens": tokens,
        "dtype": dtype.name,
        "tokenizer": tokenizer.fingerprint,
        "source": source.fingerprint,
        "skipped_records": source.skipped,
        "bin_bytes": os.path.getsize(folder / "tokens.bin"),
        "idx_bytes": os.path.getsize(folder / "tokens.idx"),
    }
    with open(folder / MANIFEST, "w") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        _sync(file)
    seconds = time.monotonic() - start_s
    logger.info(f"documents={len(source):,} tokens={tokens:,} seconds={seconds:.1f} tokens/s={tokens / seconds:,.0f}")


def _encoded(source: Source, tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, length of each document) of blocks of documents, in their order: worker w makes blocks w, w + workers, ..."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are the parallelism, and its threads do not outlive a fork
    fork, pipes, processes = multiprocessing.get_context("fork"), [], []
    for worker in range(workers):
        ours, theirs = fork.Pipe(duplex=False)
        pipes.append(ours)
        processes.append(fork.Process(target=_encode, args=(source, tokenizer, dtype, range(worker, math.ceil(len(source) / BLOCK), workers), theirs, pipes), daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        for block in range(math.ceil(len(source) / BLOCK)):
            item = pipes[block % workers].recv()
            if isinstance(item, Exception):
                raise item
            yield item
    except EOFError:
        raise Fault("a process that tokenizes was ended: is there too little memory? try fewer --workers") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _encode(source: Source, tokenizer: Tokenizer, dtype: np.dtype, blocks: range, pipe: Connection, others: list[Connection]) -> None:
    for other in others:  # so that this process ends when the parent does
        other.close()
    try:
        for block in blocks:
            documents = tokenizer.encode_documents([source[i] for i in range(block * BLOCK, min((block + 1) * BLOCK, len(source)))])
            pipe.send((np.concatenate(documents).astype(dtype, copy=False), np.array([len(ids) for ids in documents], np.int32)))
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send(error)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())

"""From packed rows to this rank's microbatches: a resumable training loader and one pass over the validation data."""

import atexit
import dataclasses
import os
import signal
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from titanlite.batch import Batch
from titanlite.config import Data, DataLoader, Training, Validation
from titanlite.data.mixing import Turns, mixed_rows
from titanlite.data.packing import PACKINGS, STATE, Documents, Row, padding, split_rows
from titanlite.data.sources import Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import ConfigError, logger

Step = tuple[np.ndarray, np.ndarray]


class TrainLoader:
    """Each `next` returns a step: R / local_batch_size microbatches of [local_batch_size, S] on the CPU.

    `positions` [R, W] int64 is where each row stands after the last step returned: for each source the three integers of
    `packing.State`, then the number of steps. Gathered over the data-parallel ranks it is all a checkpoint needs, whatever
    was prefetched.
    """

    def __init__(
        self, steps: "Generator[Step] | _Workers", positions: Tensor, end: float, local_batch_size: int, *, pin_memory: bool
    ):
        self.positions, self._end = positions, end
        self._steps = steps
        self._local_batch_size = local_batch_size
        self._pin_memory = pin_memory
        # Workers ignore SIGTERM, so the interpreter could not end them at its exit: they must have been asked to go.
        atexit.register(self.close)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        fields, after = next(self._steps)
        fields, self.positions = torch.from_numpy(fields), torch.from_numpy(after)
        if self._pin_memory:
            fields = fields.pin_memory()
        return [_batch(part) for part in fields.split(self._local_batch_size, dim=1)]

    def has_more(self) -> bool:
        """Whether there are documents left for this rank's rows. Rows that have none are padding."""
        return _has_more(self.positions, self._end)

    def close(self) -> None:
        """Ends the workers."""
        self._steps.close()
        atexit.unregister(self.close)


def build_train_loader(
    cfg: Training,
    data: Data,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    *,
    seed: int,
    dp_rank: int,
    dp_degree: int,
    global_batch_size: int,
    positions: Tensor | None = None,
) -> TrainLoader:
    """The loader of one data-parallel rank: row r of every step comes from streams r of global_batch_size.

    `positions` [global_batch_size, W] is the gathered table of a checkpoint, of any number of ranks and workers.
    Raises ConfigError when the table is of another batch size, or when the workers cannot share the rows evenly.
    """
    if positions is None:
        positions = torch.tensor([(row, 0, 0) * len(sources) + (0,) for row in range(global_batch_size)])
    if len(positions) != global_batch_size:
        raise ConfigError(
            f"training.global_batch_size={global_batch_size}, but the checkpoint's data were split for "
            f"{len(positions)}: only that size goes on with each sample exactly once",
            "training.global_batch_size",
        )
    if (fewest := min(map(len, sources))) < global_batch_size:
        logger.warning(f"documents={fewest} rows={global_batch_size}: rows of one step hold the same document")
    n_rows = global_batch_size // dp_degree
    positions = positions[dp_rank * n_rows : (dp_rank + 1) * n_rows]
    documents = [Documents(source, tokenizer, seed + (i << 32), data.epochs) for i, source in enumerate(sources)]
    turns = Turns([source.weight for source in data.sources] or [1.0])
    rows = _StepRows(documents, turns, data.packing, cfg.seq_len, positions.numpy(), first=dp_rank * n_rows, stride=global_batch_size, seed=seed)
    steps = _start_workers(rows, cfg.dataloader, n_rows) if cfg.dataloader.num_workers else iter(rows)
    pin_memory = cfg.dataloader.pin_memory and torch.cuda.is_available()
    return TrainLoader(steps, positions, documents[0].end, cfg.local_batch_size, pin_memory=pin_memory)


def data_have_ended(data: Data, sources: Sequence[Source], positions: Tensor | None) -> bool:
    """Whether a run at these gathered positions has read all that it was to read."""
    return positions is not None and data.epochs is not None and not _has_more(positions, data.epochs * len(sources[0]))


def _has_more(positions: Tensor, end: float) -> bool:
    return bool((positions[:, 0] < end).any())


class _StepRows(IterableDataset):
    """Endless steps of some rows: fields [4, R, S] as in `Row`, and each row's state after it [R, W].

    In a worker these are its share of the rows, and a ConfigError comes as an item: raised, it would arrive as the text
    of a traceback.
    """

    def __init__(
        self,
        documents: Sequence[Documents],
        turns: Turns,
        packing: str,
        seq_len: int,
        positions: np.ndarray,
        *,
        first: int,
        stride: int,
        seed: int,
    ):
        self.documents, self.turns, self.packing, self.seq_len = documents, turns, packing, seq_len
        self.positions, self.first, self.stride, self.seed = positions, first, stride, seed

    def __iter__(self) -> Generator[Step | ConfigError]:
        worker = get_worker_info()
        numbers = np.arange(self.first, self.first + len(self.positions))
        if worker:
            numbers, positions = (np.array_split(x, worker.num_workers)[worker.id] for x in (numbers, self.positions))
        else:
            positions = self.positions
        documents = [_of_rows(d, numbers.tolist(), self.stride, int(positions[:, i * STATE].min())) for i, d in enumerate(self.documents)]
        rows = [self._row(documents, *args) for args in zip(numbers.tolist(), positions.tolist(), strict=True)]
        missing = padding(self.seq_len, self.documents[0].tokenizer.end_id)
        try:
            while True:
                found, after = zip(*map(next, rows), strict=True)
                yield np.stack([missing if row is None else row.fields for row in found], axis=1), np.array(after)
        except ConfigError as error:
            if worker is None:
                raise
            yield error

    def _row(self, documents: list[Documents], row: int, start: list[int]) -> Iterator[tuple[Row | None, tuple[int, ...]]]:
        starts = [tuple(start[i : i + STATE]) for i in range(0, len(start) - 1, STATE)]
        pack = PACKINGS[self.packing]
        streams = [pack(d, self.seq_len, start=at, stride=self.stride) for d, at in zip(documents, starts, strict=True)]
        return mixed_rows(streams, self.turns, row, self.stride, self.seed, start)


def _of_rows(documents: Documents, rows: list[int], stride: int, first: int) -> Documents:
    """What one process reads: of a stream it keeps only what its rows will ask for."""
    if not hasattr(documents.source, "for_rows"):
        return documents
    return dataclasses.replace(documents, source=documents.source.for_rows(rows, stride, first))


def _start_workers(rows: _StepRows, cfg: DataLoader, n_rows: int) -> "_Workers":
    from torchdata.stateful_dataloader import StatefulDataLoader

    if n_rows % cfg.num_workers:
        raise ConfigError(
            f"training.dataloader.num_workers={cfg.num_workers} must divide the {n_rows} rows that a rank reads a step: "
            f"use one of {[0] + [w for w in range(1, n_rows + 1) if n_rows % w == 0]}",
            "training.dataloader.num_workers",
            "training.global_batch_size",
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not outlive a fork, of which it would warn
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's, of what it calls itself
        loader = StatefulDataLoader(
            rows,
            batch_size=None,
            collate_fn=_as_is,  # NumPy arrays travel through a pipe; tensors would need room in /dev/shm
            num_workers=cfg.num_workers,
            prefetch_factor=cfg.prefetch_factor,
            worker_init_fn=_prepare_worker,
        )
    return _Workers(iter(loader), cfg.num_workers)


class _Workers:
    """The steps that workers read, each a share of the rows."""

    def __init__(self, items: Iterator[Step | ConfigError], num_workers: int):
        self.items, self.num_workers = items, num_workers

    def __next__(self) -> Step:
        parts = list(islice(self.items, self.num_workers))  # one item of each worker, in the order of their rows
        for part in parts:
            if isinstance(part, ConfigError):
                raise part
        fields, after = zip(*parts, strict=True)
        return np.concatenate(fields, axis=1), np.concatenate(after)

    def close(self) -> None:
        self.items._shutdown_workers()  # their own end would wait for whoever holds a traceback through here


def _as_is(item: Step | ConfigError) -> Step | ConfigError:
    return item


def _prepare_worker(_worker: int) -> None:
    """A signal to the whole job must leave the workers alive until the trainer has saved, but not without a trainer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # a regular end would wait for ever to hand over the last rows


def validation_batches(
    cfg: Validation, source: Source, tokenizer: Tokenizer, *, dp_rank: int, dp_degree: int
) -> Iterator[Batch]:
    """One pass over the documents in their own order: batches of [local_batch_size, S], dealt to the ranks in turn.

    Every rank gets the same number of batches, at most `steps` of them unless that is negative; rows that the last of
    them lack are padding, labels IGNORE. So the rows that all ranks see do not depend on dp_degree.
    """
    B = cfg.local_batch_size
    rows = split_rows(_of_rows(Documents(source, tokenizer), [0], 1, 0), cfg.seq_len)
    missing = padding(cfg.seq_len, tokenizer.end_id)
    for _ in count() if cfg.steps < 0 else range(cfg.steps):
        dealt = [row.fields if i // B == dp_rank else None for i, row in enumerate(islice(rows, B * dp_degree))]
        if not dealt:
            return
        mine = dealt[dp_rank * B : (dp_rank + 1) * B]
        yield _batch(torch.from_numpy(np.stack(mine + [missing] * (B - len(mine)), axis=1)))


def _batch(fields: Tensor) -> Batch:
    """fields [4, B, S] -> Batch."""
    tokens, labels, positions, documents = fields
    return Batch(tokens, labels, positions, documents if documents[:, -1].any() else None)

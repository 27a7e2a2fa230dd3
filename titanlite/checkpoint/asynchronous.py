"""Saves while training goes on, by a thread or by a process, out of a copy of the state as it was. Used by all ranks together."""

import contextlib
import copy
import ctypes
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from titanlite.checkpoint.store import save
from titanlite.parallel.collective import gathered, on_rank_0, rank_in, size_of
from titanlite.parallel.compat import silent_mesh

DEAD = "dead"  # in the writers' store: the rank of one that is
SLOW_DISK = timedelta(hours=1)  # how long a rank waits for the others


class ThreadSaver:
    """Saves in a thread, over a process group that nothing else uses: the main thread's collectives must not mix with the thread's."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._staging = Staging(shared=False)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: Future | None = None

    def reserve(self, state: dict[str, Tensor]) -> None:
        """Makes room for copies of `state`, so that the first save does not wait for memory."""
        self._staging.copy(state)

    def start(self, folder: Path, step: int, state: dict[str, Tensor], **options: Any) -> None:
        """Waits for the save before, copies `state` and `options` as they are now, and returns; see `save`."""
        self.wait()
        tensors = tensors_in(self._staging.copy(state), self._staging.pieces)
        options = copy.deepcopy(options)
        self._pending = self._executor.submit(save, folder, step, tensors, **options, process_group=self._group)

    def wait(self) -> bool:
        """Returns when no save is under way, and whether one was. Raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        return pending is not None

    def close(self) -> None:
        """Waits, whatever becomes of the save."""
        self._executor.shutdown()


class ProcessSaver:
    """Saves in a process of each rank's own, which shares the copy's memory: training's threads and its GIL have no part in it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._staging = Staging(shared=True)
        self._pending = False
        self._launch()

    def reserve(self, state: dict[str, Tensor]) -> None:
        """As ThreadSaver's."""
        self._staging.copy(state)

    def start(self, folder: Path, step: int, state: dict[str, Tensor], **options: Any) -> None:
        """As ThreadSaver's."""
        self.wait()
        block = self._staging.copy(state)
        self._pending = True
        with contextlib.suppress(BrokenPipeError):  # it has died: `wait` will find that
            self._connection.send((block, self._staging.pieces, folder, step, options))

    def wait(self) -> bool:
        """As ThreadSaver's; OSError on all ranks, and new processes, if one has died."""
        if not self._pending:
            return False
        for failure in gathered(self._outcome(), self._group):
            if failure is not None:
                self._end()
                self._launch()
                raise failure
        return True

    def close(self) -> None:
        """As ThreadSaver's."""
        if self._pending:
            with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
                self._outcome()
        self._end()

    def _outcome(self) -> OSError | None:
        """What became of the save, or that a process has died: those of other ranks may wait for it in vain, so all are told."""
        self._pending = False
        try:
            while not self._connection.poll(1.0):
                if self._store.check([DEAD]):
                    return OSError(f"the process that writes rank {self._store.get(DEAD).decode()}'s checkpoints died")
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            rank = rank_in(self._group)
            self._store.set(DEAD, str(rank))
            return OSError(f"the process that writes rank {rank}'s checkpoints died")

    def _launch(self) -> None:
        host = os.environ.get("MASTER_ADDR", "localhost")  # of rank 0's machine
        rank, ranks = rank_in(self._group), size_of(self._group)
        if rank == 0:
            self._store = dist.TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False)
        port = on_rank_0(lambda: self._store.port, self._group)
        if rank != 0:
            self._store = dist.TCPStore(host, port, ranks, is_master=False)
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid(), rank, ranks, host, port), daemon=True)
        self._process.start()
        theirs.close()

    def _end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


class Piece(NamedTuple):
    """Where a tensor, of a DTensor this rank's part, lies in a block of bytes."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    layout: tuple[Tensor, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None  # a DTensor's mesh, placements, shape, stride


class Staging:
    """Copies states into one block of CPU memory, which is pinned where there is a GPU and may be shared with other processes."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._block = torch.empty(0, dtype=torch.uint8)
        self.pieces: list[Piece] = []

    def copy(self, state: dict[str, Tensor]) -> Tensor:
        """The block, which the next call overwrites; `pieces` says what lies where."""
        locals_ = {key: (t.to_local() if isinstance(t, DTensor) else t).detach() for key, t in state.items()}
        self.pieces, end = [], 0
        for key, local in locals_.items():
            tensor = state[key]
            layout = None
            if isinstance(tensor, DTensor):
                layout = (tensor.device_mesh.mesh, tensor.placements, tensor.shape, tensor.stride())
            self.pieces.append(Piece(key, local.dtype, local.shape, end, layout))
            end += -(-local.nbytes // 64) * 64
        if len(self._block) < end:
            self._block = self._allocate(end)
        on_device = any(local.is_cuda for local in locals_.values())
        for piece in self.pieces:
            _view(self._block, piece).copy_(locals_[piece.key], non_blocking=on_device)
        if on_device:
            torch.cuda.synchronize()
        return self._block

    def _allocate(self, n_bytes: int) -> Tensor:
        if not self._shared:
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        block = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(n_bytes))
        if torch.cuda.is_available():
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), n_bytes, 0)))
        return block


def tensors_in(block: Tensor, pieces: list[Piece]) -> dict[str, Tensor]:
    """The state whose copy the block holds; its DTensors know their layout and cannot communicate."""
    meshes: dict[tuple, Any] = {}
    state = {}
    for piece in pieces:
        state[piece.key] = local = _view(block, piece)
        if piece.layout is not None:
            ranks, placements, shape, stride = piece.layout
            name = (tuple(ranks.shape), *ranks.flatten().tolist())
            if name not in meshes:
                meshes[name] = silent_mesh(ranks)
            state[piece.key] = DTensor.from_local(local, meshes[name], placements, run_check=False, shape=shape, stride=stride)
    return state


def _view(block: Tensor, piece: Piece) -> Tensor:
    if not piece.shape.numel():
        return torch.empty(piece.shape, dtype=piece.dtype)
    # With a storage of its own size: DCP copies a tensor whose storage is larger before it writes it.
    return torch.frombuffer(block.numpy(), dtype=piece.dtype, count=piece.shape.numel(), offset=piece.start).view(piece.shape)


def _serve(connection: Connection, parent: int, rank: int, ranks: int, host: str, port: int) -> None:
    """Saves what comes through `connection`, until that ends or the parent does."""
    # A writer must not outlive its rank: the next gang may be at work in the folder. (1 is PR_SET_PDEATHSIG.)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # to the whole job: the trainer's last save is still to come
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=SLOW_DISK)
    while True:
        try:
            block, pieces, folder, step, options = connection.recv()
        except EOFError:
            return
        outcome = None
        try:
            save(folder, step, tensors_in(block, pieces), **options)
        except Exception as error:
            outcome = error if isinstance(error, OSError) else OSError(repr(error))
        connection.send(outcome)

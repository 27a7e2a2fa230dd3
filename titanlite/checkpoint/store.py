"""Saves and loads steps: PyTorch's distributed checkpoint (DCP) inside a commit protocol of our own.

A step is the folder step-N: DCP's files, MANIFEST.json with a checksum of each, made while it was written, and a fingerprint of each
tensor, and the manifest's own checksum. It is written under another name, manifest last, and renamed once every byte is known to be
on disk: DCP alone can report success with the disk full, and loads flipped bits as if they were right.
"""

import errno
import json
import shutil
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite import __version__
from titanlite.checkpoint.fingerprint import holds_first_replica, joined, local_sums
from titanlite.checkpoint.folder import (
    clear_temporary,
    delete_old_steps,
    fsync,
    newest_before,
    remove,
    set_torn_aside,
)
from titanlite.checkpoint.integrity import (
    SCHEMA,
    DamagedStep,
    checksum,
    damaged_files,
    file_sizes,
    read_manifest,
    seal_manifest,
)
from titanlite.checkpoint.match import describe, keys_to_load
from titanlite.checkpoint.streaming import making_planner
from titanlite.checkpoint.writer import METADATA, checksumming_writer, step_reader
from titanlite.parallel.collective import (
    gathered,
    gathered_on_rank_0,
    on_all_ranks,
    on_rank_0,
    on_shares,
    rank_in,
    size_of,
)
from titanlite.utils import logger

RANK_STATE = "rank_state"  # the folder of what each rank alone knows


def save(
    folder: Path,
    step: int,
    state: dict[str, Tensor],
    *,
    extra: dict[str, Any],
    keep_latest_k: int,
    rank_state: dict[str, Any] | None = None,
    make: Callable[[str, Tensor], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Commits `state` as step-N, then deletes all but the newest `keep_latest_k` steps (0: none). Collective.

    A plain tensor must be equal on all ranks that hold its key; any of them may be the one that is written. `extra`
    (JSON) goes into the manifest, `rank_state` (JSON, each rank's own) into rank_state/RANK.json. A committed step stays as it is.
    With `make` the tensors of `state` are on meta, and it fills each, given its key and the memory, when that is written.
    When this returns on any rank, the step is committed. If any rank cannot write, all raise OSError and nothing is left.
    """
    from torch.distributed import checkpoint as dcp
    from torch.utils.serialization import config as serialization

    started = time.monotonic()
    # An object store has no rename: there the manifest, written last, is what commits the step.
    place = folder / (f".tmp-step-{step}" if isinstance(folder, Path) else f"step-{step}")
    if not on_rank_0(lambda: _open_step(folder, step, place), process_group):
        return
    needed = _bytes_of(state, process_group)
    # DCP copies ahead on the thread's current CUDA stream, which in an asynchronous save is one of device 0.
    ahead_bytes = 10_000_000 if any(tensor.is_cuda for tensor in state.values()) else 0
    committed = False
    try:
        on_rank_0(lambda: _check_space(place, needed), process_group)
        writer, checksums = checksumming_writer(place, per_thread_copy_ahead=ahead_bytes)
        # Our checksums stand in for those that torch would put into each tensor's record.
        unchecked = serialization.patch("save.compute_crc32", False)
        with ThreadPoolExecutor(1) as pool, dcp_failures(f"cannot write {place} (is the disk full?)"), unchecked:
            planner = making_planner(state, make, pool) if make else None
            sums = None if make else pool.submit(lambda: {key: local_sums(tensor) for key, tensor in state.items()})
            dcp.save(state, storage_writer=writer, planner=planner, process_group=process_group, no_dist=not dist.is_initialized())
            sums = {key: one.result() for key, one in planner.sums.items()} if make else sums.result()
        if rank_state is not None:
            write = lambda: checksums.update(_write_rank_state(place, rank_state, process_group))  # noqa: E731
            on_all_ranks(write, process_group, errors=OSError)
        checksums = {name: crc for one in gathered_on_rank_0(checksums, process_group) for name, crc in one.items()}
        facts = {"step": step, "tensors": _described(place, sums, process_group), **extra}
        on_rank_0(lambda: _commit(folder, place, checksums, facts, started, process_group), process_group)
        committed = True
    finally:
        if not committed and rank_in(process_group) == 0:
            remove(place)
    on_rank_0(lambda: delete_old_steps(folder, step, keep_latest_k), process_group)


def load(
    folder: Path,
    step: int,
    state: dict[str, Tensor],
    *,
    counted: dict[str, Tensor] | None = None,
    exclude: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Copies step-N into the tensors of `state`, in place, and returns the manifest. Collective.

    Names, shapes and dtypes must match, both ways, for every first component of a name (`model`, ...) that `state` uses;
    otherwise raises ConfigError before any tensor changes. Left as they are: keys that `exclude` names, by a pattern or as
    parent of others, and the optimizer's state of parameters that the checkpoint was written without (they were frozen).
    Every file's checksum is read, each rank its share, and every tensor's fingerprint compared, of `counted` where a rank holds
    copies that are another rank's to count. Raises DamagedStep where one is not what was written, or cannot be read; tensors
    may have changed then.
    """
    from torch.distributed import checkpoint as dcp

    path = folder / f"step-{step}"

    def read_index() -> tuple[dict, dict[str, str]]:
        try:
            manifest = read_manifest(path)
            if problems := damaged_files(path, manifest, [METADATA]):  # a pickle: whole, or not opened
                raise ValueError("; ".join(problems))
            saved = step_reader(path).read_metadata().state_dict_metadata
        except (OSError, ValueError) as error:
            raise DamagedStep(f"{path} is not a whole checkpoint: {error}") from error
        return manifest, {key: describe(tensor.properties.dtype, tensor.size) for key, tensor in saved.items()}

    manifest, saved = on_rank_0(read_index, process_group)
    keys = keys_to_load(path, saved, state, tuple(exclude), process_group)
    failure = None
    with ThreadPoolExecutor(2) as pool:
        names = sorted(manifest["files"])[rank_in(process_group) :: size_of(process_group)]
        damaged = pool.submit(damaged_files, path, manifest, names)
        planner = _summing_planner(state if counted is None else counted, pool)
        # A new dict: DCP assigns to the entries of the one it is given.
        wanted = {key: tensor for key, tensor in state.items() if key in keys}
        try:
            with dcp_failures(f"cannot read {path}"):
                dcp.load(
                    wanted,
                    storage_reader=step_reader(path),
                    planner=planner,
                    process_group=process_group,
                    no_dist=not dist.is_initialized(),
                )
        except OSError as error:  # on all ranks
            failure = error
        problems = sum(gathered(damaged.result(), process_group), [])
    if problems or failure:
        raise DamagedStep("; ".join(problems) or str(failure)) from failure
    found = joined({key: sums.result() for key, sums in planner.sums.items()}, sorted(keys), process_group)
    wrong = [key for key, value in found.items() if value != manifest["tensors"][key]["fingerprint"]]
    if wrong:
        raise DamagedStep(
            f"{', '.join(wrong[:3])} {'is' if len(wrong) == 1 else 'are'} not what was written, although the files are: "
            f"{len(wrong)} of {len(found)} fingerprints differ"
        )
    return manifest


def _summing_planner(counted: dict[str, Tensor], pool: ThreadPoolExecutor) -> Any:
    """DCP's planner of a load, whose `sums` gets what `joined` takes of each tensor of `counted` as soon as it is loaded."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class SummingPlanner(DefaultLoadPlanner):
        def finish_plan(self, plan: Any) -> Any:
            self.missing = Counter(item.dest_index.fqn for item in plan.items)
            self.sums: dict[str, Future] = {}
            return super().finish_plan(plan)

        def commit_tensor(self, item: Any, tensor: Tensor) -> None:
            key = item.dest_index.fqn
            self.missing[key] -= 1
            if not self.missing[key] and key in counted:
                self.sums[key] = pool.submit(local_sums, counted[key])

    return SummingPlanner()


def read_rank_states(path: Path, manifest: dict[str, Any], process_group: dist.ProcessGroup | None = None) -> dict[int, dict[str, Any]]:
    """Rank -> its `rank_state`, of all ranks that wrote the step, on every rank. Collective: each reads its share."""
    names = [name for name in manifest["files"] if name.startswith(RANK_STATE + "/")]

    def read(names: list[str]) -> dict[int, dict[str, Any]]:
        return {int(Path(name).stem): json.loads((path / name).read_bytes()) for name in names}

    return {rank: state for share in on_shares(names, read, process_group) for rank, state in share.items()}


def _open_step(folder: Path, step: int, place: Path) -> bool:
    """Makes room for `step`; False if it is committed already."""
    path = folder / f"step-{step}"
    clear_temporary(folder)
    if path.exists():
        try:
            read_manifest(path)
            logger.info(f"checkpoint={path} exists already: not saved again")
            return False
        except (OSError, ValueError):
            set_torn_aside(folder, step)
    if isinstance(place, Path):
        place.mkdir(parents=True)
    return True


def _write_rank_state(place: Path, rank_state: dict[str, Any], process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """Name -> checksum of the file."""
    name, data = f"{RANK_STATE}/{rank_in(process_group)}.json", json.dumps(rank_state).encode()
    (place / RANK_STATE).mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(data)
    if isinstance(place, Path):
        fsync(place / name)
    return {name: checksum(data)}


def _bytes_of(state: dict[str, Tensor], process_group: dist.ProcessGroup | None) -> int:
    """What all ranks' tensors take on disk; of replicas of a shard one counts."""
    total = torch.zeros((), dtype=torch.int64)
    for tensor in state.values():
        if not isinstance(tensor, DTensor):
            total += tensor.nbytes
        elif holds_first_replica(tensor):
            total += tensor.to_local().nbytes
    if dist.is_initialized():
        dist.all_reduce(total, group=process_group)
    return int(total)


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free if isinstance(path, Path) else needed
    if free < needed:
        raise OSError(errno.ENOSPC, f"a step takes {needed / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free", str(path))


def _described(path: Path, sums: dict[str, Tensor], process_group: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
    """Key -> dtype, shape and fingerprint of every tensor that DCP has written into `path`."""

    def read() -> dict[str, dict[str, Any]]:
        saved = step_reader(path).read_metadata().state_dict_metadata
        return {
            key: {"dtype": str(tensor.properties.dtype).removeprefix("torch."), "shape": list(tensor.size)}
            for key, tensor in sorted(saved.items())
        }

    tensors = on_rank_0(read, process_group)
    for key, value in joined(sums, list(tensors), process_group).items():
        tensors[key]["fingerprint"] = value
    return tensors


def _commit(
    folder: Path,
    place: Path,
    checksums: dict[str, str],
    facts: dict[str, Any],
    started: float,
    process_group: dist.ProcessGroup | None,
) -> None:
    sizes = _check_written(place, checksums)
    own = {
        "schema": SCHEMA,
        "uuid": str(uuid.uuid4()),
        "parent": newest_before(folder, facts["step"]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "save_s": round(time.monotonic() - started, 3),
        "titanlite": __version__,
        "torch": torch.__version__,
        "world_size": size_of(process_group),
        "files": {name: {"size": size, "crc32": checksums[name]} for name, size in sizes.items()},
    }
    assert not own.keys() & facts.keys(), f"the manifest has keys {list(own)} of its own"
    paths = seal_manifest(place, own | facts)
    if isinstance(place, Path):
        for path in (*paths, *{(place / name).parent for name in sizes}):
            fsync(path)
        place.rename(folder / f"step-{facts['step']}")
        fsync(folder)


def _check_written(path: Path, checksums: dict[str, str]) -> dict[str, int]:
    """Sizes of the files that were written. Raises OSError if a part of a tensor or a file is not on disk."""
    metadata = step_reader(path).read_metadata()
    planned = {(key, chunk.offsets) for key, tensor in metadata.state_dict_metadata.items() for chunk in tensor.chunks}
    if lost := planned - {(index.fqn, index.offset) for index in metadata.storage_data}:
        raise OSError(errno.EIO, f"{len(lost)} parts of tensors were not written", str(path))
    ends = dict.fromkeys(checksums, 0)
    for part in metadata.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    sizes = file_sizes(path)
    for name, end in ends.items():
        if sizes.get(name, -1) < end:
            raise OSError(
                errno.EIO,
                f"{sizes.get(name, 0)} of {end} bytes are there: the disk is full, or the folder is not shared by all hosts",
                str(path / name),
            )
    return {name: sizes[name] for name in ends}


@contextmanager
def dcp_failures(what: str) -> Iterator[None]:
    """Raises OSError, the same on all ranks, for what DCP raises: a BaseException that collects all ranks' errors."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as failure:
            rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
            raise OSError(getattr(error, "errno", None) or errno.EIO, f"{what} on rank {rank}: {error!r}") from failure


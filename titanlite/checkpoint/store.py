"""Saves and loads steps: PyTorch's distributed checkpoint (DCP) inside a commit protocol of our own.

A step is the folder step-N: DCP's files, MANIFEST.json with a checksum of each, made while it was written, and a fingerprint of each
tensor, and the manifest's own checksum. It is written under another name, manifest last, and renamed once every byte is known to be
on disk: DCP alone can report success with the disk full, and loads flipped bits as if they were right.
"""

import copy
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
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
from titanlite.checkpoint.fingerprint import fingerprints, holds_first_replica
from titanlite.checkpoint.integrity import damaged_files, read_manifest, seal_manifest
from titanlite.checkpoint.writer import checksumming_writer
from titanlite.utils import ConfigError, logger

METADATA = ".metadata"  # DCP's index: which bytes of which file hold which part of a tensor


def step_folders(folder: Path) -> list[int]:
    """Steps that have a folder, ascending, whole or not."""
    names = (re.fullmatch(r"step-(0|[1-9]\d*)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def list_steps(folder: Path) -> list[int]:
    """Committed steps, ascending. What is not whole (no manifest, a file missing or of another size) does not count."""
    steps = []
    for step in step_folders(folder):
        try:
            read_manifest(folder / f"step-{step}")
            steps.append(step)
        except (OSError, ValueError) as error:
            logger.warning(f"checkpoint={folder}/step-{step} is ignored: {error}")
    return steps


def verify_step(path: Path, *, process_group: dist.ProcessGroup | None = None) -> list[str]:
    """What is wrong with the step in `path`, nothing where it is good. Collective: each rank reads its share of the files."""

    def read() -> dict | str:
        try:
            return read_manifest(path)
        except (OSError, ValueError) as error:
            return str(error)

    manifest = _on_rank_0(read, process_group)
    if isinstance(manifest, str):
        return [manifest]
    names = sorted(manifest["files"])
    if not dist.is_initialized():
        return damaged_files(path, manifest, names)
    problems: list[list[str]] = [[]] * dist.get_world_size(process_group)
    share = names[_rank(process_group) :: len(problems)]
    dist.all_gather_object(problems, damaged_files(path, manifest, share), group=process_group)
    return sum(problems, [])


def quarantine(folder: Path, step: int, problems: list[str]) -> None:
    """Renames step-N, which is damaged, so that nothing takes it for a checkpoint again; the reason lies beside it."""
    aside = _unused(folder, f"quarantine-step-{step}")
    (folder / f"step-{step}").rename(aside)
    (folder / f"{aside.name}.txt").write_text("\n".join(problems) + "\n")
    logger.error(f"checkpoint={folder}/step-{step} is damaged and quarantined as {aside.name}: {'; '.join(problems[:3])}")


def save(
    folder: Path,
    step: int,
    state: dict[str, Tensor],
    *,
    extra: dict[str, Any],
    keep_latest_k: int,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Commits `state` as step-N, then deletes all but the newest `keep_latest_k` steps (0: none). Collective.

    A plain tensor must be equal on all ranks that hold its key; any of them may be the one that is written. `extra`
    (JSON) goes into the manifest. A step that is already committed stays as it is.
    When this returns on any rank, the step is committed. If any rank cannot write, all raise OSError and nothing is left.
    """
    from torch.distributed import checkpoint as dcp

    temporary = folder / f".tmp-step-{step}"
    if not _on_rank_0(lambda: _open_step(folder, step), process_group):
        return
    needed = _bytes_of(state, process_group)
    # DCP copies ahead on the thread's current CUDA stream, which in an asynchronous save is one of device 0.
    ahead_bytes = 10_000_000 if any(tensor.is_cuda for tensor in state.values()) else 0
    try:
        _on_rank_0(lambda: _check_space(temporary, needed), process_group)
        writer, mine = checksumming_writer(temporary, per_thread_copy_ahead=ahead_bytes)
        with _dcp_failures(f"cannot write {temporary} (is the disk full?)"):
            dcp.save(state, storage_writer=writer, process_group=process_group, no_dist=not dist.is_initialized())
        checksums, tensors = _gathered(mine, process_group), _described(temporary, state, process_group)
        _on_rank_0(lambda: _commit(folder, step, checksums, tensors, extra, process_group), process_group)
        _on_rank_0(lambda: _delete_old_steps(folder, step, keep_latest_k), process_group)
    finally:
        if _rank(process_group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def load(
    folder: Path, step: int, state: dict[str, Tensor], *, process_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Copies step-N into the tensors of `state`, in place, and returns the manifest. Collective.

    Names, shapes and dtypes must match, both ways, for every first component of a name (`model`, ...) that `state` uses;
    otherwise raises ConfigError before any tensor changes. Raises OSError if a file cannot be read.
    """
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(folder / f"step-{step}")

    def read_index() -> tuple[dict, dict[str, str]]:
        try:
            manifest = read_manifest(reader.path)
            saved = reader.read_metadata().state_dict_metadata
        except Exception as error:  # a damaged index, a pickle, may raise anything
            raise ConfigError(
                f"{reader.path} is not a whole checkpoint: {error}; those in {folder} are {list_steps(folder)}",
                "checkpoint.load_step",
            ) from error
        return manifest, {key: _describe(tensor.properties.dtype, tensor.size) for key, tensor in saved.items()}

    manifest, saved = _on_rank_0(read_index, process_group)
    _check_same_model(reader.path, saved, state, process_group)
    with _dcp_failures(f"cannot read {reader.path}"):
        # A copy: DCP assigns to the entries of the dict it is given.
        dcp.load(dict(state), storage_reader=reader, process_group=process_group, no_dist=not dist.is_initialized())
    return manifest


class AsyncSaver:
    """Saves in a thread while training goes on, one step at a time. Used by all ranks together.

    It needs a process group of its own: the main thread's collectives must not mix with the thread's.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._group = process_group
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: Future | None = None

    def start(
        self, folder: Path, step: int, state: dict[str, Tensor], *, extra: dict[str, Any], keep_latest_k: int
    ) -> None:
        """Waits for the save before, copies `state` and `extra` as they are now, and returns; see `save`."""
        self.wait()
        self._pending = self._executor.submit(
            save,
            folder,
            step,
            self._stager.stage(state),
            extra=copy.deepcopy(extra),
            keep_latest_k=keep_latest_k,
            process_group=self._group,
        )

    def wait(self) -> None:
        """Returns when no save is under way. Raises what the last one raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def abandon_after(folder: Path, step: int) -> None:
    """Moves the steps after `step`, from which a run has gone back, into abandoned/: they would pass for what it trains now."""
    later_steps = [later for later in step_folders(folder) if later > step]
    for later in later_steps:
        (folder / "abandoned").mkdir(exist_ok=True)
        aside = _unused(folder / "abandoned", f"step-{later}")
        (folder / f"step-{later}").rename(aside)
        logger.warning(f"checkpoint={folder}/step-{later} is moved to abandoned/{aside.name}: the run goes on from step {step}")
    for changed in (folder / "abandoned", folder) if later_steps else ():
        _fsync(changed)  # before anything is trained that they could be taken for


def _unused(folder: Path, name: str) -> Path:
    return next(path for k in range(1, 1000) if not (path := folder / f"{name}-{k}").exists())


def _open_step(folder: Path, step: int) -> bool:
    """Makes the temporary folder of `step`; False if the step is committed already."""
    path = folder / f"step-{step}"
    for stale in folder.glob(".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)  # NFS keeps what a reader still has open: a later save removes it
    if path.exists():
        try:
            read_manifest(path)
            logger.info(f"checkpoint={path} exists already: not saved again")
            return False
        except (OSError, ValueError) as error:
            aside = _unused(folder, f"bad-step-{step}")
            logger.warning(f"checkpoint={path} is moved to {aside.name}: {error}")
            path.rename(aside)
    (folder / f".tmp-step-{step}").mkdir(parents=True)
    return True


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
    free = shutil.disk_usage(path).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"a step takes {needed / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free", str(path))


def _gathered(mine: dict[str, str], process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """All ranks' entries, on rank 0."""
    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, str] | None] | None = None
    if _rank(process_group) == 0:
        everyone = [None] * dist.get_world_size(process_group)
    dist.gather_object(mine, everyone, group=process_group, group_dst=0)
    return {name: value for one in everyone or [] for name, value in one.items()}


def _described(path: Path, state: dict[str, Tensor], process_group: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
    """Key -> dtype, shape and fingerprint of every tensor that DCP has written into `path`."""
    from torch.distributed.checkpoint import FileSystemReader

    def read() -> dict[str, dict[str, Any]]:
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        return {
            key: {"dtype": str(tensor.properties.dtype).removeprefix("torch."), "shape": list(tensor.size)}
            for key, tensor in sorted(saved.items())
        }

    tensors = _on_rank_0(read, process_group)
    for key, value in fingerprints(state, list(tensors), process_group).items():
        tensors[key]["fingerprint"] = value
    return tensors


def _commit(
    folder: Path,
    step: int,
    checksums: dict[str, str],
    tensors: dict[str, dict[str, Any]],
    extra: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> None:
    temporary = folder / f".tmp-step-{step}"
    sizes = _check_written(temporary)
    manifest = {
        "schema": 2,
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "titanlite": __version__,
        "torch": torch.__version__,
        "world_size": dist.get_world_size(process_group) if dist.is_initialized() else 1,
        "files": {name: {"size": size, "crc32": checksums[name]} for name, size in sizes.items()},
        "tensors": tensors,
    }
    assert not manifest.keys() & extra.keys(), f"the manifest has keys {list(manifest)} of its own"
    for path in (*seal_manifest(temporary, manifest | extra), temporary):
        _fsync(path)
    temporary.rename(folder / f"step-{step}")
    _fsync(folder)


def _check_written(path: Path) -> dict[str, int]:
    """Sizes of the files DCP wrote. Raises OSError if a part of a tensor is not on disk."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(path).read_metadata()
    planned = {(key, chunk.offsets) for key, tensor in metadata.state_dict_metadata.items() for chunk in tensor.chunks}
    if lost := planned - {(index.fqn, index.offset) for index in metadata.storage_data}:
        raise OSError(errno.EIO, f"{len(lost)} parts of tensors were not written", str(path))
    ends: dict[str, int] = {METADATA: 0}
    for part in metadata.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    sizes = {name: (path / name).stat().st_size if (path / name).exists() else 0 for name in ends}
    for name, end in ends.items():
        if sizes[name] < end:
            raise OSError(
                errno.EIO,
                f"{sizes[name]} of {end} bytes are there: the disk is full, or the folder is not shared by all hosts",
                str(path / name),
            )
    return sizes


def _delete_old_steps(folder: Path, written: int, keep_latest_k: int) -> None:
    steps = list_steps(folder)
    for step in steps[:-keep_latest_k] if keep_latest_k else []:
        if step != written:
            # Renamed first, so that a deletion that is cut leaves no torn step.
            doomed = (folder / f"step-{step}").rename(folder / f".tmp-deleted-step-{step}")
            shutil.rmtree(doomed, ignore_errors=True)


def _check_same_model(
    path: Path, saved: dict[str, str], state: dict[str, Tensor], process_group: dist.ProcessGroup | None
) -> None:
    # A pipeline rank holds some of the keys: what no rank holds is missing in this run.
    wrong = {
        f"{key}: {saved.get(key, 'absent')} in the checkpoint, {ours} in this run"
        for key, tensor in state.items()
        if saved.get(key) != (ours := _describe(tensor.dtype, tensor.size()))
    }
    parts = {key.split(".")[0] for key in state}
    unused = {key for key in saved if key.split(".")[0] in parts} - state.keys()
    reports = [(wrong, unused)]
    if dist.is_initialized():
        reports *= dist.get_world_size(process_group)
        receive = reports if _rank(process_group) == 0 else None
        dist.gather_object((wrong, unused), receive, group=process_group, group_dst=0)

    def judge() -> None:
        missing = set.intersection(*(keys for _, keys in reports))
        lines = {f"{key}: {saved[key]} in the checkpoint, absent in this run" for key in missing}
        lines = sorted(lines.union(*(lines for lines, _ in reports)))
        if lines:
            raise ConfigError(
                f"{path} holds another model; {len(lines)} tensors differ:\n  "
                + "\n  ".join(lines[:3])
                + "\ngive this run another --job.name, or the model settings that the checkpoint was written with",
                "job.name",
                "model.name",
                "model.flavor",
            )

    _on_rank_0(judge, process_group)


def _describe(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(size)}"


def _on_rank_0(action: Callable[[], Any], process_group: dist.ProcessGroup | None) -> Any:
    """What `action` returns on rank 0, on every rank; what it raises there, every rank raises."""
    result, error = None, None
    if _rank(process_group) == 0:
        try:
            result = action()
        except Exception as e:
            error = e
    if dist.is_initialized():
        outcome = [result, error]
        dist.broadcast_object_list(outcome, group=process_group, group_src=0)
        result, error = outcome
    if error is not None:
        raise error
    return result


def _rank(process_group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(process_group) if dist.is_initialized() else 0


@contextmanager
def _dcp_failures(what: str) -> Iterator[None]:
    """Raises OSError, the same on all ranks, for what DCP raises: a BaseException that collects all ranks' errors."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as failure:
            rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
            raise OSError(getattr(error, "errno", None) or errno.EIO, f"{what} on rank {rank}: {error!r}") from failure


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Where a rank can be hit, and what is recorded of it: all that these tests know of the insides of titanlite and torch."""

import hashlib
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

import titanlite.train
from titanlite.checkpoint import asynchronous
from titanlite.checkpoint.state import model_state, optimizer_state

# Each is passed before the file system does it. (point, what happens, to which path; a rename is "old -> new")
FILES = (
    ("before a rank's state", "write", r".*/\.tmp-step-\d+/rank_state/\d+\.json"),
    ("before the seal", "write", r".*/\.tmp-step-\d+/MANIFEST\.crc32"),
    ("before the manifest", "write", r".*/\.tmp-step-\d+/MANIFEST\.json"),
    ("before the rename", "rename", r".*/\.tmp-step-\d+ -> .*/step-\d+"),
    ("while old steps are deleted", "rename", r".* -> .*/\.tmp-deleted-step-\d+"),
    ("while old steps are deleted", "remove", r".*/\.tmp-deleted-step-.*"),
    ("while later steps are abandoned", "rename", r".* -> .*/abandoned/[^/]+"),
    ("while a step is quarantined", "rename", r".* -> .*/quarantine-step-[^/]+"),
    ("while a step is quarantined", "write", r".*/quarantine-step-[^/]+\.txt"),
    ("while a step is loaded", "read", r".*/step-\d+/__\d+_\d+\.distcp"),
)
COMPUTE = ("in forward", "in backward", "before the optimizer", "after the optimizer")
STAGING, WRITING, COMMITTED = "while staging", "while writing", "after the rename"
POINTS = (*COMPUTE, STAGING, WRITING, COMMITTED, *dict.fromkeys(point for point, *_ in FILES))


def watch(passed: Callable[[str], None], record: Callable[[dict], None]) -> None:
    """From now on this process calls `passed` with the name of every point it comes by, and rank 0 `record` after each step.

    So does the process that writes its checkpoints, if it has one: `passed` must be such as travels to it.
    """
    _watch_files(passed)
    _watch_steps(passed, record)
    plain = asynchronous._view

    def view(*args):
        passed(STAGING)
        return plain(*args)

    asynchronous._view = view
    asynchronous._serve = partial(_serve, passed)


def _serve(passed: Callable[[str], None], *args) -> None:
    _watch_files(passed)
    asynchronous._serve(*args)


def _watch_files(passed: Callable[[str], None]) -> None:
    sys.addaudithook(_FileEvents(passed))
    plain = FileSystem.create_stream

    @contextmanager
    def create_stream(self, path, mode):
        with plain(self, path, mode) as stream:
            yield _Writes(stream, passed) if "w" in mode else stream

    FileSystem.create_stream = create_stream


class _FileEvents:
    def __init__(self, passed: Callable[[str], None]):
        self.passed = passed
        self.thread = threading.local()

    def __call__(self, event: str, args: tuple) -> None:
        if getattr(self.thread, "renamed", False):  # any event after the rename's own: it is done
            self.thread.renamed = False
            self.passed(COMMITTED)
        happens, path = _described(event, args)
        for point, action, pattern in FILES if happens else ():
            if action == happens and re.fullmatch(pattern, path):
                self.passed(point)
                self.thread.renamed = point == "before the rename"


def _described(event: str, args: tuple) -> tuple[str, str]:
    if event == "open" and isinstance(args[0], str | os.PathLike):
        return "write" if args[2] & (os.O_WRONLY | os.O_RDWR) else "read", os.fspath(args[0])
    if event == "os.rename":
        return "rename", f"{os.fspath(args[0])} -> {os.fspath(args[1])}"
    if event in ("os.remove", "os.rmdir"):
        folder = "" if args[1] == -1 else os.readlink(f"/proc/self/fd/{args[1]}") + "/"
        return "remove", folder + os.fspath(args[0])
    return "", ""


class _Writes:
    def __init__(self, stream, passed: Callable[[str], None]):
        self.stream, self.passed = stream, passed

    def write(self, data) -> int:
        self.passed(WRITING)
        return self.stream.write(data)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def _watch_steps(passed: Callable[[str], None], record: Callable[[dict], None]) -> None:
    plain_step, plain_loader = titanlite.train.train_step, titanlite.train.build_train_loader
    loaders, hooked = [], []

    def build_train_loader(*args, **options):
        loaders.append(_Samples(plain_loader(*args, **options)))
        return loaders[-1]

    def train_step(run, *args):
        if not hooked:
            hooked.append(_hook(run, passed))
        measured = plain_step(run, *args)
        found = _state_of(run, loaders[-1].samples)
        if run.mesh.rank == 0:
            record({"step": run.step, "loss": measured.loss.hex(), **found})
        return measured

    titanlite.train.train_step, titanlite.train.build_train_loader = train_step, build_train_loader


class _Samples:
    """The loader, and the rows of its last step as document:offset:checksum of the tokens."""

    def __init__(self, loader):
        self.loader, self.samples = loader, []

    def __next__(self):
        starts = self.loader.positions.tolist()
        batches = next(self.loader)
        rows = torch.cat([batch.tokens for batch in batches])
        self.samples = [f"{c}:{used}:{zlib.crc32(row.numpy().tobytes()):08x}" for (c, used, *_), row in zip(starts, rows, strict=True)]
        return batches

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


def _hook(run, passed: Callable[[str], None]) -> None:
    def after(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda gradient: passed("in backward"))

    for part in run.parts:
        for block in part.layers.values():
            block.register_forward_pre_hook(lambda *_: passed("in forward"))
            block.register_forward_hook(after)
    run.optimizer.register_step_pre_hook(lambda *_: passed("before the optimizer"))
    run.optimizer.register_step_post_hook(lambda *_: passed("after the optimizer"))


def _state_of(run, samples: list[str]) -> dict:
    """Samples of all rows in their order, and one fingerprint of what all ranks hold of the model and the optimizer."""
    state = model_state(run.parts) | optimizer_state(run.optimizer, run.parts)
    digest = hashlib.sha256()
    for key in sorted(state):
        local = state[key].to_local() if isinstance(state[key], DTensor) else state[key]
        digest.update(key.encode() + local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    everyone = [None] * run.mesh.world_size
    dist.all_gather_object(everyone, (run.mesh.batch_rank, samples, digest.hexdigest()))
    rows = {batch_rank: samples for batch_rank, samples, _ in everyone}
    assert all(rows[batch_rank] == samples for batch_rank, samples, _ in everyone), "ranks of one batch rank read other rows"
    fingerprint = hashlib.sha256("".join(digest for *_, digest in everyone).encode()).hexdigest()[:16]
    return {"samples": [row for _, mine in sorted(rows.items()) for row in mine], "fingerprint": fingerprint, "tokens": run.tokens}

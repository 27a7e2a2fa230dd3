"""A step saved and read one tensor at a time, so that a model needs the memory of its largest tensor."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.fingerprint import fingerprint, local_sums
from titanlite.checkpoint.integrity import DamagedStep, damaged_files, read_manifest
from titanlite.checkpoint.writer import METADATA, step_reader


def making_planner(state: dict[str, Tensor], make: Callable[[str, Tensor], None], pool: ThreadPoolExecutor) -> Any:
    """DCP's planner of a save of tensors on meta, each of which `make` fills when it is written; its `sums` gets what `joined` takes of each.

    One after the other they lie in the same memory: DCP keeps every tensor of a file to its end, and does not look at it again.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    class MakingPlanner(DefaultSavePlanner):
        memory = bytearray(max(tensor.nbytes for tensor in state.values()))
        sums: dict[str, Future] = {}
        last: Future | None = None

        def lookup_object(self, index: Any) -> Tensor:
            if self.last is not None:
                self.last.result()
            like = state[index.fqn]
            tensor = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel()).view(like.shape)
            make(index.fqn, tensor)
            self.sums[index.fqn] = self.last = pool.submit(local_sums, tensor)
            return tensor

    return MakingPlanner()


class Step:
    """A committed step that is read tensor by tensor. `manifest` says what there is."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.manifest = read_manifest(path)
            if problems := damaged_files(path, self.manifest, [METADATA]):  # a pickle: whole, or not opened
                raise ValueError("; ".join(problems))
            self.metadata = step_reader(path).read_metadata()
        except (OSError, ValueError) as error:
            raise DamagedStep(f"{path} is not a whole checkpoint: {error}") from error
        self.reader = step_reader(path)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def tensor(self, key: str) -> Tensor:
        """On the CPU. Raises DamagedStep where it is not what was written."""
        from torch.distributed.checkpoint import DefaultLoadPlanner

        described = self.manifest["tensors"][key]
        tensor = torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]))
        planner = DefaultLoadPlanner()
        planner.set_up_planner({key: tensor}, self.metadata, is_coordinator=True)
        try:
            self.reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # whatever unpickling damaged bytes may raise
            raise DamagedStep(f"cannot read {key} of {self.path}: {error!r}") from error
        if fingerprint(tensor) != described["fingerprint"]:
            raise DamagedStep(f"{key} of {self.path} is not what was written")
        return tensor

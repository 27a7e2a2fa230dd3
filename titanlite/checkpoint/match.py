"""Which of a checkpoint's tensors go into which of a run's, and what must stop a run from going on."""

import fnmatch
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.parallel.collective import gathered_on_rank_0, on_rank_0
from titanlite.utils import ConfigError, logger


def keys_to_load(
    path: Path, saved: dict[str, str], state: dict[str, Tensor], exclude: tuple[str, ...], process_group: dist.ProcessGroup | None
) -> set[str]:
    """Keys, of all ranks, that are in both. Raises ConfigError, on all ranks, where the rest is not to be explained."""
    ours = {key: describe(tensor.dtype, tensor.size()) for key, tensor in state.items()}
    everyone = gathered_on_rank_0(ours, process_group)

    def judge() -> set[str]:
        # A pipeline rank holds some of the keys: what no rank holds is missing in this run.
        here = {key: description for one in everyone for key, description in one.items() if not _matches(key, exclude)}
        parts = {key.split(".")[0] for key in here}
        there = {key: d for key, d in saved.items() if key.split(".")[0] in parts and not _matches(key, exclude)}
        new, gone = _anew(here, there), _anew(there, here)
        if new or gone:
            logger.warning(
                f"resumed={path}: optimizer state starts anew for {_names(new)}, is left out for {_names(gone)}: "
                f"parameters that were, or are, not trained"
            )
        lines = sorted(
            f"{key}: {there.get(key, 'absent')} in the checkpoint, {here.get(key, 'absent')} in this run"
            for key in (here.keys() | there.keys()) - new - gone
            if here.get(key) != there.get(key)
        )
        if lines:
            raise ConfigError(
                f"{path} holds another model; {len(lines)} tensors differ:\n  "
                + "\n  ".join(lines[:3])
                + "\ngive this run another --job.name, or the model settings that the checkpoint was written with; or name what is "
                "to keep its initial values, in the checkpoint or in this run, in checkpoint.exclude_from_loading",
                "job.name",
                "model.name",
                "model.flavor",
                "checkpoint.exclude_from_loading",
            )
        return here.keys() & there.keys()

    return on_rank_0(judge, process_group)


def _anew(here: dict[str, str], there: dict[str, str]) -> set[str]:
    """Keys of the optimizer's state here of parameters that are on both sides, and of which it keeps no state there."""
    trained = {key.rpartition(".")[0] for key in there if key.startswith("optimizer.")}
    states = {key: key.rpartition(".")[0] for key in here if key.startswith("optimizer.")}
    return {
        key for key, name in states.items() if name not in trained and name.replace("optimizer.", "model.", 1) in here.keys() & there.keys()
    }


def _names(keys: set[str]) -> str:
    names = sorted({key.rpartition(".")[0].removeprefix("optimizer.") for key in keys})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) or key.startswith(pattern + ".") for pattern in patterns)


def describe(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(size)}"

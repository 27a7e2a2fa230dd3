"""Reads the weights of a Hugging Face folder: what there is, whether it fits a model, and any part of it into any layout."""

import dataclasses
import errno
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.checkpoint.store import dcp_failures
from titanlite.config import Model
from titanlite.models import OVERRIDES, get_args, get_hf, get_model, hf_folder
from titanlite.models.hf import args_from, read_config, unused_keys
from titanlite.models.hf_weights import Twin
from titanlite.parallel.collective import on_rank_0
from titanlite.utils import ConfigError, logger

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder."""

    path: Path
    dtype: torch.dtype
    shape: list[int]
    offset: int  # of its bytes in the file

    def read(self, into: Tensor) -> None:
        """Without mapping the file: what is mapped counts as memory, whole."""
        data = memoryview(into.flatten().view(torch.uint8).numpy())
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            while data and (n := file.readinto(data)):
                data = data[n:]
        if data:
            raise OSError(errno.EIO, "it has become shorter", str(self.path))


def twins_of(cfg: Model) -> Callable[[str], list[Twin]]:
    """Our name of a tensor -> those that hold it in a Hugging Face folder; none of what is tied to another."""
    hf, args = get_hf(cfg), get_args(cfg)
    return lambda name: hf.twins(name, args)


def checked_tensors(cfg: Model, folder: Path) -> dict[str, Stored]:
    """Name -> tensor of the folder, of every one that the model needs. Raises ConfigError, once, for all that is missing or other."""
    config, args, twins = read_config(folder), get_args(cfg), twins_of(cfg)
    _check_sizes(cfg, config, folder / "config.json")
    stored = _stored_tensors(folder)
    state = get_model(cfg, torch.float32).state_dict()
    if getattr(args, "tie_embeddings", False):  # a copy of the head may lie there: it is not used
        state.pop("output.weight")
    wanted = {twin.name: twin.shape(list(tensor.shape)) for name, tensor in state.items() for twin in twins(name)}
    problems = [
        f"{name} has shape {stored[name].shape} instead of {shape}" if name in stored else f"{name} {shape} is missing"
        for name, shape in wanted.items()
        if name not in stored or stored[name].shape != shape
    ]
    problems += [f"{name} {stored[name].shape} belongs to no part of the model" for name in stored.keys() - wanted.keys() if not _is_extra(name, config)]
    if problems:
        raise ConfigError(
            f"{folder} does not hold the model of its config.json, or of the configuration; {len(problems)} tensors differ:\n  "
            + "\n  ".join(sorted(problems)[:3]),
            "model.hf_assets_path", "model.name", "model.vocab_size", "model.tie_embeddings", "checkpoint.initial_load_path",
        )  # fmt: skip
    return {name: stored[name] for name in wanted}


def _is_extra(name: str, config: Mapping[str, Any]) -> bool:
    """What files may hold besides the model: a tied head, layers that predict further tokens, tables that are computed."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        name.endswith(("rotary_emb.inv_freq", "self_attn.slope_rate", "_decay"))
        or (name == "lm_head.weight" and config.get("tie_word_embeddings", False))
        or (layer is not None and 0 <= int(layer[1]) - config["num_hidden_layers"] < (config.get("num_nextn_predict_layers") or 0))
    )


FREE = {"attention", "mtp_depth", "head_dim", "n_kv_heads", "balance_loss", "bias_speed", "capacity_factor"}  # of training, or seen in shapes


def _check_sizes(cfg: Model, config: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError where weights would be of a model that computes otherwise, which their shapes need not show."""
    hf = get_hf(cfg)
    if config["model_type"] != hf.model_type:
        raise ConfigError(
            f"{path}: model_type={config['model_type']!r}, but {cfg.title} is {hf.model_type!r}: use model.name='hf'", "model.name", "checkpoint.initial_load_path"
        )
    theirs, ours = (_leaves(dataclasses.asdict(args)) for args in (args_from(config, hf, path), get_args(cfg)))
    given = {key for key in OVERRIDES if getattr(cfg, key) is not None}
    differ = [name for name in (ours | theirs) if ours.get(name) != theirs.get(name) and not {name, name.split(".")[0], name.split(".")[-1]} & (FREE | given)]
    if differ:
        raise ConfigError(
            f"{path} says {', '.join(f'{name}={theirs.get(name)}' for name in differ[:3])}; {cfg.title} has "
            f"{', '.join(str(ours.get(name)) for name in differ[:3])}: use model.name='hf', or another flavor",
            "model.name", "model.flavor", "checkpoint.initial_load_path",
        )  # fmt: skip


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in table.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _stored_tensors(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    if index.exists():
        try:
            files: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is not an index of safetensors: {error!r}", "model.hf_assets_path") from error
        found = {name: tensor for file in sorted(set(files.values())) for name, tensor in _header(folder / file, index).items()}
        if lost := sorted(name for name, file in files.items() if name not in found or found[name].path != folder / file):
            raise ConfigError(f"{folder / files[lost[0]]} lacks {lost[0]}, which {INDEX} says it holds", "model.hf_assets_path")
        return found
    return _header(folder / ONE_FILE, None)


def _header(path: Path, index: Path | None) -> dict[str, Stored]:
    """The tensors of one safetensors file, which must hold every byte of them."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            file_bytes = path.stat().st_size
            header = json.loads(file.read(size)) if size <= file_bytes - 8 else None
    except OSError as error:
        why = f"{INDEX} names it" if index else f"a Hugging Face folder has it, or {INDEX}"
        raise ConfigError(f"{path}: {error.strerror}: {why}", "model.hf_assets_path") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}", "model.hf_assets_path") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is not a safetensors file, or cut: it has {file_bytes} bytes", "model.hf_assets_path")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + size + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if file_bytes != end:
        raise ConfigError(f"{path} has {file_bytes} bytes instead of {end}: {'it is cut' if file_bytes < end else 'not as it was written'}", "model.hf_assets_path")
    if strange := [(name, entry["dtype"]) for name, entry in tensors.items() if entry["dtype"] not in DTYPES]:
        raise ConfigError(f"{path}: {strange[0][0]} has dtype {strange[0][1]}: expected one of {', '.join(DTYPES)}", "model.hf_assets_path")
    return {name: Stored(path, DTYPES[entry["dtype"]], entry["shape"], 8 + size + entry["data_offsets"][0]) for name, entry in tensors.items()}


def tensor_maker(cfg: Model, folder: Path, keys: Iterable[str]) -> Callable[[str, Tensor], None]:
    """A function that fills the tensor of one of the keys (model.NAME) with the folder's values, in whatever dtype it has."""
    stored, twins = checked_tensors(cfg, folder), twins_of(cfg)
    if orphans := [key for key in keys if not twins(key.removeprefix("model."))]:
        raise ConfigError(f"a Hugging Face folder of {get_hf(cfg).model_type} has no place for {orphans[0]}: set model.mtp_depth=0", "model.mtp_depth")

    def make(key: str, tensor: Tensor) -> None:
        for twin in twins(key.removeprefix("model.")):
            source = stored[twin.name]
            whole = tensor if twin.expert is None else tensor[twin.expert]
            if twin.is_plain and source.dtype == whole.dtype:
                source.read(whole)
                continue
            theirs = torch.empty(source.shape, dtype=source.dtype)
            source.read(theirs)
            for part, values in twin.pairs(tensor, theirs):
                part.copy_(values)

    return make


def load_hf(cfg: Model, folder: Path, state: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Fills `state` (model.NAME -> tensor or DTensor of any layout), in place, from a Hugging Face folder. Collective.

    Each rank reads the parts of tensors that it holds, one at a time. Raises ConfigError, on all ranks, before any tensor changes.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    stored = on_rank_0(lambda: checked_tensors(cfg, folder), process_group)

    class Reader(HuggingFaceStorageReader):
        def read_metadata(self) -> Metadata:
            """What rank 0 has read already: a folder may have as many files as there are ranks."""
            places = {MetadataIndex(name, [0] * len(t.shape)): SimpleNamespace(relative_path=str(t.path)) for name, t in stored.items()}
            return Metadata(state_dict_metadata={}, storage_data=places)

    planner = _parts_planner(state, stored, twins_of(cfg))
    # A new dict: DCP assigns to the entries of the one it is given.
    options = {"planner": planner, "process_group": process_group, "no_dist": not dist.is_initialized()}
    with dcp_failures(f"cannot read {folder}"):
        dcp.load(dict(state), storage_reader=Reader(str(folder)), **options)


def _parts_planner(state: Mapping[str, Tensor], stored: Mapping[str, Stored], twins: Callable[[str], list[Twin]]) -> Any:
    """DCP's planner of a load of this rank's parts of tensors that are named and laid out as in a Hugging Face folder."""
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    parts: list[tuple[Twin, Tensor, list[int]]] = []  # of each item of the plan: this rank's part of ours, and where it begins

    class PartsPlanner(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            items = []
            for key, tensor in state.items():
                local, start = _local_part(tensor)
                for twin in twins(key.removeprefix("model.")) if local.numel() else ():
                    if box := twin.box(start, list(local.shape)):
                        nothing = torch.Size([0] * len(box[0]))
                        where = MetadataIndex(twin.name, nothing)
                        here = MetadataIndex(key, nothing, index=len(parts))
                        items.append(ReadItem(LoadItemType.TENSOR, here, nothing, where, torch.Size(box[0]), torch.Size(box[1])))
                        parts.append((twin, local, start))
            return LoadPlan(items)

        def resolve_tensor(self, item: ReadItem) -> Tensor:
            return torch.empty(item.lengths, dtype=stored[item.storage_index.fqn].dtype)

        def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
            twin, local, start = parts[item.dest_index.index]
            part = local
            if twin.head:  # whole heads, of which `local` may begin and end with parts
                part = tensor.new_empty(len(tensor) // twin.lanes, *tensor.shape[1:])
            for ours, theirs in twin.pairs(part, tensor, start[0] if start else 0):
                ours.copy_(theirs)
            if twin.head:
                local.copy_(part[start[0] % twin.head :][: len(local)])

    return PartsPlanner()


def _local_part(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """What this rank holds, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), [0] * tensor.ndim
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), list(start)


def warn_of_unused_keys(cfg: Model) -> None:
    """Tells of keys of config.json that nothing reads."""
    if cfg.name == "hf" and (keys := unused_keys(read_config(hf_folder(cfg)), get_hf(cfg), get_args(cfg))):
        logger.warning(f"{hf_folder(cfg) / 'config.json'}: not used: {', '.join(keys)}")

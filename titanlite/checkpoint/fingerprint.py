"""A number for each tensor that is the same under every layout and sees what moved along any dimension.

With b the bits of an element as an integer and i_d its index along dimension d, it is the sum over elements of
b * (w_0(i_0) + w_1(i_1) + ...) mod 2^64, where w are fixed pseudorandom weights whose sum is odd: sums add up over shards,
one flipped bit always changes it, and exchanging two slices changes it unless their sums are equal.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ABSENT = torch.iinfo(torch.int64).min


def fingerprints(state: dict[str, Tensor], keys: list[str], process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """Key -> fingerprint, of `keys`, which are the same on all ranks; a rank may hold some of them only. Collective.

    A plain tensor is equal on all ranks that hold its key; of a DTensor's replicas one counts.
    """
    sums = torch.zeros(len(keys), dtype=torch.int64)
    plain = torch.full((len(keys),), _ABSENT)
    for i, key in enumerate(keys):
        tensor = state.get(key)
        if isinstance(tensor, DTensor):
            sums[i] = _of_shard(tensor)
        elif tensor is not None:
            plain[i] = _of(tensor.detach(), (0,) * tensor.ndim)
    if dist.is_initialized():
        dist.all_reduce(sums, group=process_group)
        dist.all_reduce(plain, dist.ReduceOp.MAX, group=process_group)
    found = torch.where(plain == _ABSENT, sums, plain).tolist()
    return {key: f"{value % 2**64:016x}" for key, value in zip(keys, found)}


def holds_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the one, among those that hold the same shard, that counts."""
    coordinate = tensor.device_mesh.get_coordinate()
    return all(c == 0 for c, place in zip(coordinate, tensor.placements) if place.is_replicate())


def _of_shard(tensor: DTensor) -> Tensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return _of(tensor.to_local().detach(), offset) if holds_first_replica(tensor) else torch.zeros((), dtype=torch.int64)


def _of(local: Tensor, offset: tuple[int, ...]) -> Tensor:
    bits = local.contiguous().view(_INTEGERS[local.element_size()]) if local.dtype is not torch.bool else local.to(torch.uint8)
    bits = bits.reshape(1) if bits.ndim == 0 else bits
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for dim, start in enumerate(offset or (0,)):
        others = [d for d in range(bits.ndim) if d != dim]
        sums = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
        total += (sums * _weights(dim, start, len(sums), bits.device)).sum()
    return total.cpu()


def _weights(dim: int, start: int, n: int, device: torch.device) -> Tensor:
    """[n] int64: SplitMix64 of (dim, index), odd in dimension 0, even in others."""
    x = torch.arange(start, start + n, dtype=torch.int64, device=device) + ((dim + 1) << 40)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    x = x ^ (x >> 31)
    return x | 1 if dim == 0 else x & -2

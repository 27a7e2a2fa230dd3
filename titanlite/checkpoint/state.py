"""Flat state dicts of live tensors, under the same keys whatever the layout."""

from torch import Tensor, nn, no_grad, zeros_like
from torch.optim import Optimizer

from titanlite.parallel.pipeline import copies as tied_copies
from titanlite.utils import ConfigError


def model_state(parts: list[nn.Module], *, copies: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers as `model.<name>`; what is tied appears once, under its first name.

    With `copies` a pipeline stage's copy of a tied parameter goes by the name of the original, to be loaded; without, it is
    left out. Where one rank has both, `copy_tied` brings the copy along after a load.
    """
    return {f"model.{name}": tensor for name, tensor in _named_tensors(parts, copies).items()}


def optimizer_state(optimizer: Optimizer, parts: list[nn.Module], *, copies: bool = False) -> dict[str, Tensor]:
    """`optimizer.<parameter>.<key>`, complete once `init_optimizer_state` has run.

    Hyperparameters are left out: they follow from the configuration and the step.
    """
    names = {id(tensor): name for name, tensor in _named_tensors(parts, copies).items()}
    all_copies = {id(p) for part in parts for name, p in part.named_parameters() if name in tied_copies(parts)}
    state = {}
    for param, values in optimizer.state.items():
        if id(param) in all_copies and id(param) not in names:
            continue
        assert id(param) in names, f"the optimizer holds a {list(param.shape)} parameter of no part of the model"
        for key, value in values.items():
            name = f"optimizer.{names[id(param)]}.{key}"
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{name} is of type {type(value).__name__}: a checkpoint holds tensors only; "
                    f"let {type(optimizer).__name__} keep it as a tensor of shape []",
                    "optimizer.name",
                )
            state[name] = value
    return state


@no_grad()
def init_optimizer_state(optimizer: Optimizer) -> None:
    """Makes the state of every trained parameter that has none, so that it can be saved or loaded into.

    It is what AdamW and SGD would start from; a few others (NAdam, ASGD) start from other values and must load theirs.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, _ in groups:
        group["params"] = []
    for group, params in groups:
        for param in params:
            if not param.requires_grad or param in optimizer.state:
                continue
            # A stand-in of zeros takes the step: no parameter or gradient changes, weight decay leaves no trace.
            stand_in = zeros_like(param)
            stand_in.grad = zeros_like(param)
            group["params"] = [stand_in]
            optimizer.step()
            optimizer.state[param] = state = optimizer.state.pop(stand_in, {})
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
        group["params"] = []
    for group, params in groups:
        group["params"] = params


@no_grad()
def copy_tied(parts: list[nn.Module], optimizer: Optimizer) -> None:
    """Gives a copy of a tied parameter whose original is on this rank too the original's values and optimizer state."""
    for copy, original in _tied_twins(parts):
        for to, source in [(copy, original), *((optimizer.state[copy][k], v) for k, v in optimizer.state[original].items())]:
            to.copy_(source)


def _tied_twins(parts: list[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """(copy, original) of tied parameters that a pipeline has in two stages of this rank."""
    named = {name: p for part in parts for name, p in part.named_parameters()}
    return [(named[name], named[canonical]) for name, canonical in tied_copies(parts).items() if canonical in named]


def _named_tensors(parts: list[nn.Module], copies: bool) -> dict[str, Tensor]:
    canonical, twins = tied_copies(parts), {id(copy) for copy, _ in _tied_twins(parts)}
    named, seen = {}, set()
    for part in parts:
        # Not named_parameters(): FSDP2 hooks state_dict() to have its parameters sharded.
        for name, tensor in part.state_dict(keep_vars=True).items():
            if name in canonical and not copies:
                continue
            name = canonical.get(name, name)
            if id(tensor) not in seen and id(tensor) not in twins:
                assert name not in named, f"two parts of the model hold a {name!r}"
                named[name] = tensor
                seen.add(id(tensor))
    return named

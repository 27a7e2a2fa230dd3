import pytest
import torch
from torch import nn

from titanlite.checkpoint.state import init_optimizer_state, model_state, optimizer_state
from titanlite.utils import ConfigError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embeddings.weight
        self.register_buffer("load", torch.zeros(3))
        self.register_buffer("table", torch.zeros(5), persistent=False)


def bits(tensors):
    return [t.detach().clone().view(torch.int32) for t in tensors]


def test_model_state_holds_live_parameters_and_persistent_buffers_and_tied_ones_once():
    model = Model()
    state = model_state([model])
    assert list(state) == ["model.load", "model.embeddings.weight", "model.hidden.weight", "model.hidden.bias"]
    assert state["model.embeddings.weight"] is model.output.weight
    assert state["model.load"] is model.load


def test_parts_may_not_share_a_name():
    assert len(model_state([nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})])) == 4
    with pytest.raises(AssertionError, match="weight"):
        model_state([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_optimizer_state_is_named_by_parameter_and_leaves_frozen_ones_out():
    model = Model()
    model.hidden.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    init_optimizer_state(optimizer)
    state = optimizer_state(optimizer, [model])
    names = ("embeddings.weight", "hidden.bias")
    assert sorted(state) == [f"optimizer.{n}.{key}" for n in names for key in ("exp_avg", "exp_avg_sq", "step")]
    assert state["optimizer.hidden.bias.exp_avg"] is optimizer.state[model.hidden.bias]["exp_avg"]


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5, fused=False, foreach=False),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5, fused=True),
    "amsgrad_with_tensor_rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True),
    "l2_decay": lambda params: torch.optim.Adam(params, weight_decay=0.5),
    "sgd": lambda params: torch.optim.SGD(params),
    "momentum": lambda params: torch.optim.SGD(params, momentum=0.9, weight_decay=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "muon": torch.optim.Muon,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_appears_and_nothing_else_changes_under(name):
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    with torch.no_grad():
        params[0][0] = torch.tensor([-0.0, float("nan"), float("inf")])
    params[1].grad = torch.randn(4, 3)
    optimizer = OPTIMIZERS[name]([{"params": params[:2]}, {"params": params[2:]}])
    before, grad, rate = bits(params), params[1].grad.clone(), float(optimizer.param_groups[0]["lr"])
    init_optimizer_state(optimizer)
    assert all(map(torch.equal, before, bits(params)))
    assert [p.grad is None for p in params] == [True, False, True] and torch.equal(params[1].grad, grad)
    assert [group["params"] for group in optimizer.param_groups] == [params[:2], params[2:]]
    assert optimizer.param_groups[0]["lr"] == rate
    state = optimizer_state(optimizer, [nn.ParameterList(params)])
    assert len(state) == sum(len(values) for values in optimizer.state.values())
    assert bool(state) == (name != "sgd")
    assert all(value == 0 for key, value in state.items() if key.endswith(".step"))
    if name in ("adamw", "adamw_fused", "l2_decay", "momentum", "muon"):
        assert all((value == 0).all() for value in state.values())


@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "adamw_fused", "l2_decay", "momentum", "rmsprop"])
def test_training_after_init_is_bit_equal_to_training_without_under(name):
    def train(*, init):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(3):
            if init:
                init_optimizer_state(optimizer)  # leaves what exists alone from the second time on
            for param in params:
                param.grad = torch.randn(5, 3)
            optimizer.step()
            optimizer.zero_grad()
        return params

    assert all(map(torch.equal, train(init=True), train(init=False)))


def test_optimizer_state_that_is_no_tensor_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["rounds"] = 3
    with pytest.raises(ConfigError, match="optimizer.weight.rounds is of type int"):
        optimizer_state(optimizer, [model])

import sys
import types

import pytest
import torch

from titanlite.config import Model
from titanlite.models import get_args, get_family, get_model
from titanlite.models.llama.model import FLAVORS
from titanlite.utils import ConfigError


def test_a_model_is_built_on_meta_in_the_dtype_asked_for():
    model = get_model(Model(flavor="405B"), torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_the_configuration_overrides_vocabulary_and_ties_of_a_flavor():
    assert get_args(Model(flavor="1B")) == FLAVORS["1B"]
    args = get_args(Model(flavor="1B", vocab_size=300, tie_embeddings=False))
    assert (args.vocab_size, args.tie_embeddings, args.dim) == (300, False, FLAVORS["1B"].dim)


def test_a_family_may_be_any_package_that_can_be_imported(monkeypatch):
    mine = types.ModuleType("mine.family")
    mine.FLAVORS, mine.Model, mine.plan, mine.flops_per_token = {}, None, None, None
    monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))
    monkeypatch.setitem(sys.modules, "mine.family", mine)
    assert get_family(Model(name="mine.family")) is mine


@pytest.mark.parametrize(
    "model, message",
    [
        (Model(name="lama3"), "model.name='lama3': expected one of .* or an import path; did you mean 'llama3'"),
        (Model(name=""), "model.name='': expected one of"),
        (Model(name="."), "model.name='.': expected one of"),
        (Model(name="..llama"), "model.name='..llama': expected one of"),
        (Model(name="my-models.llama"), "model.name='my-models.llama': expected one of"),
        (Model(name="no_such.family"), "model.name='no_such.family': cannot import it: No module named 'no_such'"),
        (Model(name="os.path"), "model.name='os.path': the package lacks FLAVORS, Model, flops_per_token, plan"),
        (Model(flavor="8b"), "model.flavor='8b': llama3 has .*8B, 70B, 405B"),
        (Model(flavor="debug"), "model.flavor='debug': llama3 has .*; did you mean 'debugmodel'"),
    ],
)
def test_a_model_that_is_not_there_is_answered_with_what_is(model, message):
    with pytest.raises(ConfigError, match=message):
        get_args(model)

import sys
import types

import pytest
import torch

from titanlite.config import Model
from titanlite.models import get_args, get_family, get_model
from titanlite.models.layers import RopeScaling, YarnScaling
from titanlite.models.llama.model import FLAVORS
from titanlite.models.moe import MoEArgs
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
        (Model(mtp_depth=1, flavor="1B"), "model.mtp_depth=1: llama3 1B ties its head to the embedding.*: set model.tie_embeddings=false"),
        (Model(rope_scaling="yarn", rope_scaling_factor=4.0), "model.rope_scaling='yarn' needs model.rope_original_seq_len: set it"),
        (Model(rope_scaling="linear"), "model.rope_scaling='linear' needs model.rope_scaling_factor: set it"),
        (Model(moe_capacity_factor=1.5), "model.moe_capacity_factor=1.5: llama3 debugmodel has no experts"),
        (Model(name="tests.faults.plain", flavor="tiny", mtp_depth=1), "model.mtp_depth=1: tests.faults.plain tiny has no such size: leave it out"),
    ],
)
def test_a_size_that_a_model_cannot_have_is_answered_with_the_fix(model, message, monkeypatch):
    plain = types.ModuleType("tests.faults.plain")
    plain.FLAVORS, plain.Model, plain.plan, plain.flops_per_token = {"tiny": types.SimpleNamespace(dim=8)}, None, None, None
    monkeypatch.setitem(sys.modules, "tests.faults.plain", plain)
    with pytest.raises(ConfigError, match=message):
        get_args(model)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"top_k": 9}, "top_k=9: a token cannot choose so many of n_experts=8: use 1 to 8"),
        ({"top_k": 0}, "top_k=0: a token cannot choose so many of n_experts=8: use 1 to 8"),
        ({"n_groups": 3}, r"n_groups=3 must divide n_experts=8: use one of \[1, 2, 4, 8\]"),
        ({"n_groups": 4, "top_groups": 1, "top_k": 3}, "top_groups=1 of n_groups=4 hold 2 of n_experts=8, of which a token chooses top_k=3: use 2 to 4"),
        ({"n_groups": 4, "top_groups": 5}, "top_groups=5 of n_groups=4 .*: use 1 to 4"),
        ({"n_groups": 8, "top_groups": 4}, "judges=2: a group has 1 experts: use 1 to so many"),
    ],
)
def test_experts_that_do_not_fit_together_are_answered_with_what_is_legal(sizes, message):
    with pytest.raises(ValueError, match=message):
        MoEArgs(**{"n_experts": 8, "top_k": 2, "hidden_dim": 16} | sizes)


def test_a_family_whose_sizes_do_not_fit_is_the_users_mistake(tmp_path, monkeypatch):
    (tmp_path / "misfit_family.py").write_text("from titanlite.models.moe import MoEArgs\nFLAVORS = {'x': MoEArgs(8, 9, 16)}\n")
    (tmp_path / "misfit").mkdir()
    (tmp_path / "misfit" / "family.py").write_text("from misfit_family import FLAVORS\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="model.name='misfit.family': cannot import it: top_k=9"):
        get_family(Model(name="misfit.family"))


def test_keys_stretch_a_flavors_rotary_frequencies():
    yarn = Model(rope_scaling="yarn", rope_scaling_factor=4.0, rope_original_seq_len=8192, rope_theta=1e6)
    assert (get_args(yarn).rope_scaling, get_args(yarn).rope_theta) == (YarnScaling(4.0, 8192), 1e6)
    llama3 = Model(rope_scaling="llama3", rope_scaling_factor=2.0, rope_original_seq_len=4096)
    assert get_args(llama3).rope_scaling == RopeScaling(2.0, original_max_position=4096)
    assert get_args(Model(flavor="8B", rope_scaling="none")).rope_scaling is None and get_args(Model(flavor="8B")).rope_scaling == RopeScaling()


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

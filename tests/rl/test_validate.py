"""What reinforcement cannot do is told before anything is started."""

import pytest

from titanlite.cli import main
from titanlite.config import KEYS, Config, override
from titanlite.rl.validate import LAYOUTS, validate_rl
from titanlite.utils import ConfigError


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": 0.0}, "rl.temperature=0.0: must be above 0, and finite"),
        ({"group_size": 0}, "rl.group_size=0: must be at least 1"),
        ({"clip_high": float("nan")}, "rl.clip_high=nan: must be at least 0"),
        ({"dual_clip": 0.5}, "rl.dual_clip=0.5: must be at least 1"),
        ({"gamma": 1.5}, "rl.gamma=1.5: must be in [0, 1]"),
        ({"top_p": 0.9}, "rl.top_p=0.9: training samples are drawn from the whole distribution, whose logprobs the trainer computes"),
        ({"top_k": 50}, "never learnt; use 0, and rl.temperature"),
        ({"group_size": 1}, "rl.group_size=1 has nothing to compare with (rl.baseline='mean'): use 2 or more"),
        ({"group_size": 1, "advantage": "gae", "dynamic_sampling": True}, "rl.group_size=1 has nothing to compare with (rl.dynamic_sampling=true)"),
        ({"baseline": "none"}, "rl.deviation='population' divides rewards by their group's spread, which may be 0"),
        ({"minibatches": 17}, "rl.minibatches=17 share rl.prompts_per_step=16 groups: use fewer"),
        ({"max_new_tokens": 2048}, "rl.max_new_tokens=2048 must be below training.seq_len=2048"),
        ({"overlong_buffer_tokens": 17}, "rl.overlong_buffer_tokens=17 are the last of rl.max_new_tokens=16"),
        ({"rollout_low": 3.0}, "rl.rollout_low=3.0 must be at most rl.rollout_high=2.0"),
        ({"overlong_filter": True, "kl_reward": "k1"}, "rl.kl_reward='k1' counts in a group's rewards, also of samples that rl.overlong_filter leaves out"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(values, message):
    with pytest.raises(ConfigError) as error:
        validate_rl(override(Config(), {f"rl.{key}": value for key, value in values.items()}))
    assert message in str(error.value) and any(key.removeprefix("rl.") in values for key in error.value.keys)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"advantage": "gae", "group_size": 1},
        {"advantage": "returns", "baseline": "none", "deviation": "none", "group_size": 1},
        {"top_k": -1},
        {"overlong_filter": True, "kl_reward": "k1", "advantage": "returns"},
        {"rollout_high": float("inf"), "rollout_correction": "truncate"},
    ],
)
def test_what_can_be_is_not(values):
    validate_rl(override(Config(), {f"rl.{key}": value for key, value in values.items()}))


def test_layouts_that_do_not_go_are_refused_with_the_reason():
    assert LAYOUTS.keys() <= KEYS.keys()
    for key, value in (("training.loss_chunk_tokens", 64), ("model.mtp_depth", 1)):
        with pytest.raises(ConfigError, match=f"{key}={value}: not in reinforcement, "):
            validate_rl(override(Config(), {key: value}))
    for key, (_, why_not) in LAYOUTS.items():
        if key.endswith("_degree"):
            assert not why_not
            validate_rl(override(Config(), {key: 2}))


def test_the_commands_answer_before_they_start_anything(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[rl]\ngroup_size = 1\n")
    for command in (["config", str(tmp_path / "run.toml")], ["rl", str(tmp_path / "run.toml"), "--nproc", "2"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "rl.group_size=1 has nothing to compare with" in said and f"rl.group_size is set at {tmp_path / 'run.toml'}:2" in said
    (tmp_path / "plain.toml").write_text("[training]\nloss_chunk_tokens = 64\n")
    assert main(["config", str(tmp_path / "plain.toml")]) == 0

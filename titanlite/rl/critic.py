"""A critic for PPO: the policy's model with a head for one number, made, trained and saved as the policy is, beside it."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from titanlite.batch import IGNORE, Batch
from titanlite.checkpoint.state import init_optimizer_state, model_state
from titanlite.config import RL, Config, override
from titanlite.models import get_model, get_plan
from titanlite.parallel.forward_backward import LossFn
from titanlite.parallel.mesh import Mesh
from titanlite.rl.algorithms import value_loss
from titanlite.rl.metrics import Figures
from titanlite.rl.signals import SIGNALS
from titanlite.trainer import Run, setup

CRITIC_FIGURES = ("value_loss", "value", "value_clip_fraction")  # means over labels


def build_policy(cfg: Config, mesh: Mesh) -> Run:
    """The policy's run, with a critic where `rl.advantage` needs one."""
    run = setup(cfg, mesh)
    if cfg.rl.advantage == "gae":
        run.critic = setup(_config(cfg), mesh, _model(cfg))
        init_optimizer_state(run.critic.optimizer)  # it is saved with the policy, also before it has taken a step
    return run


def _config(cfg: Config) -> Config:
    """Its schedule spans the steps of reinforcement."""
    left = lambda steps: steps and max(steps - cfg.rl.warm_up_steps, 1)  # noqa: E731
    steps = {"training.steps": left(cfg.training.steps), "lr_scheduler.total_steps": left(cfg.lr_scheduler.total_steps)}
    return override(cfg, {"optimizer.lr": cfg.rl.critic_lr, **steps})


def _model(cfg: Config) -> tuple[nn.Module, object]:
    model, plan = get_model(cfg.model, getattr(torch, cfg.training.dtype)), get_plan(cfg.model)
    head = model.get_submodule(plan.head)
    model.set_submodule(plan.head, nn.Linear(head.in_features, 1, bias=False, device="meta", dtype=head.weight.dtype))
    return model, replace(plan, tensor={**plan.tensor, plan.head: "value_head"})


@torch.no_grad()
def start_critic(run: Run) -> None:
    """Gives the critic the policy's weights of this moment, under a head that foretells 0."""
    policy = model_state(run.parts)
    for name, tensor in model_state(run.critic.parts).items():
        if name == f"model.{get_plan(run.cfg.model).head}.weight":
            tensor.zero_()
        else:
            tensor.copy_(policy[name])


def values_of(output: Tensor, batch: Batch) -> Tensor:
    """A critic's output [B, S, 1] -> [B, S], in fp32 at least, 0 where there is no label."""
    return output.squeeze(-1).to(torch.promote_types(output.dtype, torch.float32)) * (batch.labels != IGNORE)


def build_critic_loss(cfg: RL, figures: Figures) -> LossFn:
    """`loss_fn(output, batch)` for the trainer's step, weighed as the policy's; what it sees on the way is added to `figures`."""

    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        here = batch.labels != IGNORE
        values = values_of(output, batch)[here]
        signals = dict(zip(SIGNALS, batch.signals[here].to(values.dtype).unbind(-1)))
        losses = value_loss(values, signals["value"], signals["returns"], clip=cfg.value_clip)
        far = (values - signals["value"]).abs() > cfg.value_clip
        figures.add(len(values), value_loss=losses, value=values, value_clip_fraction=far)
        return (signals["weight"] * losses).sum()

    return loss_fn

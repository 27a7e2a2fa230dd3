"""Llama 3, as `titanlite.models` expects a family: FLAVORS, Model, flops_per_token, plan."""

from titanlite.models.llama.model import FLAVORS, LlamaArgs, flops_per_token
from titanlite.models.llama.model import Llama as Model
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "LlamaArgs", "Model", "flops_per_token", "plan"]

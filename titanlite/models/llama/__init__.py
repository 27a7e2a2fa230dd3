"""Llama 3, as `titanlite.models` expects a family: FLAVORS, Model, PLAN, flops_per_token."""

from titanlite.models.llama.model import FLAVORS, LlamaArgs, flops_per_token
from titanlite.models.llama.model import Llama as Model
from titanlite.models.llama.plan import PLAN

__all__ = ["FLAVORS", "PLAN", "LlamaArgs", "Model", "flops_per_token"]

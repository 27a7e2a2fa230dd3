"""Llama small enough that a run of 40 steps, with a fingerprint after each, takes a second."""

from titanlite.models.llama import LlamaArgs, Model, flops_per_token, plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]

FLAVORS = {"tiny": LlamaArgs(16, 2, 4, 2, 32, vocab_size=257)}

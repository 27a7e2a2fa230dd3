"""Llama small enough that a run of 40 steps, with a fingerprint after each, takes a second."""

from titanlite.models.llama import PLAN, LlamaArgs, Model, flops_per_token

__all__ = ["FLAVORS", "PLAN", "Model", "flops_per_token"]

FLAVORS = {"tiny": LlamaArgs(16, 2, 4, 2, 32, vocab_size=257)}

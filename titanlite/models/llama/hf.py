"""Llama's Hugging Face twin."""

from titanlite.models.hf import BIASES, SIZES, HFFamily

HF = (HFFamily("llama", "LlamaForCausalLM", SIZES | BIASES, only={"mlp_bias": False}),)

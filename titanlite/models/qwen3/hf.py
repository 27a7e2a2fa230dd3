"""Qwen3's Hugging Face twin."""

from titanlite.models.hf import BIASES, FULL_ATTENTION, SIZES, HFFamily

HF = (HFFamily("qwen3", "Qwen3ForCausalLM", SIZES | BIASES, fixed={"qk_norm": True}, only=FULL_ATTENTION),)

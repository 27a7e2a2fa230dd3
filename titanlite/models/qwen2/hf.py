"""Qwen2.5's Hugging Face twin."""

from titanlite.models.hf import FULL_ATTENTION, SIZES, HFFamily

HF = (HFFamily("qwen2", "Qwen2ForCausalLM", SIZES, fixed={"qkv_bias": True}, only=FULL_ATTENTION),)

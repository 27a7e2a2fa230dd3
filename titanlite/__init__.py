"""titanlite: a minimal composable trainer for large language models on native PyTorch DTensor."""

__version__ = "0.1.0"

"""Proves that a layout computes what one rank computes: `titanlite verify train_configs/debug.toml --layouts tp=2`."""

"""Checkpoints: who may write a run (lock), what a step holds (state), how it is committed and read back (store)."""

"""Unit tests run on CPU on every machine; those of tests/integration take devices where there are enough."""

import os

# Before torch is imported: a process that has touched a device cannot fork ranks that use one.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

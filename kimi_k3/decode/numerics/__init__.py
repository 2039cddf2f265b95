"""Numerics of the ops: FP64 oracles with derived error bounds, input families, and the cases the harness runs."""

"""The latency-specialised decode path: one schedule of fused ops over lock-step tensor-parallel ranks.

Nothing here is imported while the switch is off. ``executor.Executor`` is the entry point.
"""

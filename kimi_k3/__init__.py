"""Kimi K3: the PyTorch reference (the stock path of the embedded engine) and the latency-specialised decode path."""

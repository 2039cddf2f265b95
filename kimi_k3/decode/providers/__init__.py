"""Implementations of the ops. The torch ones run anywhere and reproduce the declared rounding points."""

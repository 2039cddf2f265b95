"""A toy target: proof that the target protocol suffices, with no Kimi in it. Importing it loads no torch."""

from fake_target.target import TARGET, write_entry_point

__all__ = ["TARGET", "write_entry_point"]

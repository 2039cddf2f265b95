"""Sealing a run into a bundle, and verifying one. No torch, no network, no clock."""

from fasttrack.bundle.binding import Binding
from fasttrack.bundle.seal import seal
from fasttrack.bundle.verify import NOT_PROVEN, Verification, verify

__all__ = ["NOT_PROVEN", "Binding", "Verification", "seal", "verify"]

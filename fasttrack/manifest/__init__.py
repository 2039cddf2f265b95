"""The manifest: what is claimed, where, and how strictly it is to be tested. Needs no torch."""

from fasttrack.manifest.load import load_manifest, manifest_digest, place
from fasttrack.manifest.model import Manifest, NamedCell, Probe, ScopeCell, Tier

__all__ = ["Manifest", "NamedCell", "Probe", "ScopeCell", "Tier", "load_manifest", "manifest_digest", "place"]

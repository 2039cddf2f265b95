"""fasttrack: scope -> experiment -> bundle -> verdict, for model-specific inference optimisations."""

__version__ = "0.1.0"

#: Version of every file format this package writes (manifest, run folder, records, bundle).
SCHEMA_VERSION = 1

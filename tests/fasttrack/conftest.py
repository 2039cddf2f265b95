"""Makes the fake target importable as ``fake_target`` from every test below this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

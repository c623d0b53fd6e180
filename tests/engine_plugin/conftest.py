"""The plugin is a distribution of its own: it is found where it lies, as an engine's environment would."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "subscriber" / "engine_plugin"))

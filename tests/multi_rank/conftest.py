"""The helper modules of this folder are imported by their bare names, here and in the workers that torchrun starts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

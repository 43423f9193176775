"""The helper modules of this folder and scripts/ are imported by bare names, here and in the workers of torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]

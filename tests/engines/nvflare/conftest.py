"""NVFlare's engine is tested where NVFlare is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "federation")]

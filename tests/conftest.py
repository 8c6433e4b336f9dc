"""Shared fixtures: where the real data lie, and how a test skips without them."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images and weights beside the checkout; skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the real data (../shared/data beside the checkout) are not here")
    return SHARED

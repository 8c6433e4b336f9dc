"""Shared fixtures: where the real data lie, and how a test skips without them."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# No example is too slow on a busy machine, and a release is not stopped by an input that nobody has seen before.
hypothesis.settings.register_profile("medfed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("medfed")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images and weights beside the checkout; skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the real data (../shared/data beside the checkout) are not here")
    return SHARED

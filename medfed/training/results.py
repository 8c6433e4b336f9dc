"""Where results go."""

from __future__ import annotations

import tempfile
from pathlib import Path

from medfed.errors import ConfigError


def result_folder(folder: Path) -> Path:
    """Makes a folder for results, and sees that files can be written there, before anything is computed.

    Raises:
        ConfigError: a file is in its place, or it is read-only.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        what = f"results cannot be written there: {error.strerror or error}."
        raise ConfigError(what, where=str(folder), fix="Choose another folder.") from None

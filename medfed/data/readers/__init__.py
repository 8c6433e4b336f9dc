"""Readers: one public layout of files and tables a module, each turning a folder into a cohort.

A reader module has ``class Options(pydantic.BaseModel, extra="forbid")`` and
``read(root: Path, options: Options, progress: Progress | None = None) -> Cohort``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from medfed.errors import ConfigError, nearest

READERS: dict[str, str] = {
    "folder": "medfed.data.readers.folder",
    "isic": "medfed.data.readers.isic",
    "kermany": "medfed.data.readers.kermany",
    "rsna_ich": "medfed.data.readers.rsna_ich",
    "table": "medfed.data.readers.table",
}


def get_reader(name: str) -> ModuleType:
    """The reader module of a layout.

    Args:
        name: a key of :data:`READERS`.

    Returns:
        The module, with ``Options`` and ``read``.

    Raises:
        ConfigError: no layout has that name.
    """
    if name not in READERS:
        raise ConfigError(f"there is no reader {name!r}.", where="cohort.reader", fix=nearest(name, READERS))
    return importlib.import_module(READERS[name])

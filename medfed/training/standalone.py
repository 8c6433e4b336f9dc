"""Training items for a bundle that runs alone, without a federation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfed.errors import DataError


def training_items(reader: str, root: str | Path, classes: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Reads a public layout for a MONAI data set.

    Args:
        reader: name of the layout, e.g. ``kermany``.
        root: its folder.
        classes: the bundle's classes, in the order of the outputs; the layout must have the same.
        **options: the reader's own options.

    Returns:
        One dict a training sample with ``image`` (path), ``frame`` and ``label``; what belongs to a validation or test
        split is left out.

    Raises:
        DataError: other classes, or no training sample.
    """
    from medfed.data.readers import get_reader

    module = get_reader(reader)
    cohort = module.read(Path(root), module.Options(**options))
    if list(cohort.task.classes) != [str(c) for c in classes]:
        raise DataError(
            f"these data have the classes {', '.join(cohort.task.classes)}, the bundle has {', '.join(classes)}.",
            where=str(root),
            fix="Override 'classes' of the bundle with those of the data.",
        )
    cohort = cohort.where(lambda table: table["split"].isin(["", "train"]))
    if not len(cohort):
        raise DataError("there is no training sample.", where=str(root))
    labels = cohort.labels.astype("float32" if cohort.task.kind == "multilabel" else "int64")
    table = cohort.table
    return [
        {"image": path, "frame": int(frame), "label": label}
        for path, frame, label in zip(table["path"], table["frame"], labels)
    ]

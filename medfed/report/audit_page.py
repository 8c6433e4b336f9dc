"""The work list of one client as a CSV and as one self-contained page with thumbnails.

Both hold images or paths of the client: they belong where the images are, and nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from PIL import Image

from medfed.report.audit import WorkList
from medfed.report.audit_signals import CRITERIA
from medfed.report.html import environment, write_page
from medfed.report.page import common
from medfed.spreadsheet import inert_table

SIDE = 256
"""Longest side of a thumbnail in pixels; smaller images stay as they are."""
SCORES = ("S_R ", "S_N ")


@dataclass(frozen=True)
class Standing:
    """How the federation judged the client, as the client was told.

    Args:
        status: ``clean``, ``noisy``, ``undetermined``, or empty where it was not judged.
        posterior: probability of clean, or None.
        round: round of the judgement, or None.
        targets: training may use other targets at clients that are not clean; otherwise labels stay as they are.
    """

    status: str = ""
    posterior: float | None = None
    round: int | None = None
    targets: bool = True

    def sentence(self) -> str:
        """One sentence for people."""
        said = {
            "clean": "counted this client as clean",
            "noisy": "counted this client as noisy",
            "undetermined": "could not judge this client",
        }.get(self.status)
        if said is None:
            return "This run keeps no judgement of this client."
        when = f" in round {self.round}" if self.round else ""
        sure = "" if self.posterior is None else f" (probability of clean {self.posterior:.2f})"
        changed = self.targets and self.status != "clean"
        then = "training may use other targets" if changed else "its labels were not changed in training"
        return f"The federation {said}{when}{sure}: {then}."


def write_csv(table: pd.DataFrame, out: Path) -> Path:
    """Writes the list, in UTF-8 with the mark by which spreadsheets recognise it, and nothing that they would run."""
    return write_page("\ufeff" + inert_table(table).to_csv(index=False, float_format="%.6g", lineterminator="\n"), out)


def write_audit_page(
    found: WorkList,
    table: pd.DataFrame,
    out: Path,
    *,
    client: str,
    run: str,
    method: str,
    standing: Standing,
    thumbnails: Mapping[str, str],
    only: str | None = None,
    csv: str = "audit.csv",
) -> Path:
    """Writes the page.

    Args:
        found: the list.
        table: the rows to show: all of the list, or those of one class.
        out: the file.
        client: the client's name.
        run: the run's name.
        method: the method's name.
        standing: how the federation judged the client.
        thumbnails: ``data:`` URL by sample, for the first rows.
        only: the observed class that the rows are of.
        csv: name of the list beside the page.

    Raises:
        FederationError: the file cannot be written.
    """
    templates = environment()
    script = templates.loader.get_source(templates, "audit.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    named = [(key, CRITERIA[key]) for key in found.criteria]
    view = {
        **common(),
        "client": client,
        "run": run,
        "method": method,
        "standing": standing,
        "found": found,
        "criteria": named,
        "rows": [_row(row, named, thumbnails) for row in table.to_dict("records")],
        "pictures": len(thumbnails),
        "only": only,
        "csv": csv,
        "samples": int(found.observed.sum()),
        "largest": max((max(counts) for _, counts, _, _ in found.summary()), default=0) or 1,
        "by_criteria": [(n, int((table["contradicting"] == n).sum())) for n in range(len(named), -1, -1)],
        "moved": int((table["training_target"] != table["observed"]).sum()),
        "script": Markup(script),
        "digest": digest,
    }
    return write_page(templates.get_template("audit.html").render(view), out)


def thumbnail(record: np.ndarray, windows: bool = False) -> str:
    """A record of the image store as a ``data:`` URL, to be looked at.

    Args:
        record: ``[C, h, w]``: uint8, or floats in 0..1.
        windows: channels are windows of a CT: side by side, not as red, green and blue.
    """
    pixels = np.asarray(record)
    if pixels.dtype != np.uint8:
        pixels = np.rint(np.clip(np.nan_to_num(pixels), 0, 1) * 255).astype(np.uint8)
    if len(pixels) == 1 or (pixels == pixels[:1]).all():
        image = Image.fromarray(pixels[0])
    elif len(pixels) == 3 and not windows:
        image = Image.fromarray(np.moveaxis(pixels, 0, -1))
    else:
        image = Image.fromarray(np.concatenate(list(pixels), axis=1))
    longest = max(image.size) / (1 if image.width <= 2 * image.height else len(pixels))
    if longest > SIDE:
        image = image.resize([max(round(n * SIDE / longest), 1) for n in image.size], Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _row(row: dict[str, Any], named: list[tuple[str, str]], thumbnails: Mapping[str, str]) -> dict[str, Any]:
    path = Path(row["path"]) if row["path"] else None
    signals = []
    for key, words in named:
        margin, label = row[f"{key}_margin"], row[f"{key}_label"]
        known = bool(np.isfinite(margin))
        # Spectral margins are shares of the larger score, that of leave-one-out is on its own scale.
        if known:
            text = f"{margin:+.2f}" if key == "left_out" else f"{100 * margin:+.1f} %"
        elif not label:
            text = "cannot compare"
        else:
            text = "alone has a score" if label == row["observed"] else f"(no score for {row['observed']})"
        signals.append({"words": words, "label": label, "text": text, "against": known and margin > 0})
    return {
        **{k: v for k, v in row.items() if not k.startswith(SCORES)},
        "name": path.name if path else row["sample"],
        "folder": str(path.parent) if path else "",
        "url": path.as_uri() if path and path.is_absolute() else "",
        "signals": signals,
        "picture": thumbnails.get(row["sample"], ""),
    }

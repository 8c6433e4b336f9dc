"""HEYEX XML exports: one XML file beside the pictures of an examination, each B-scan a picture of its own.

The XML says which pictures are B-scans and which show the fundus, and whose they are.  An export therefore counts as
one volume: its B-scans are the frames, fundus pictures are left out.  Names and dates of birth are not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from medfed.data.cohort import Findings
from medfed.data.decode import Undecodable, sniff
from medfed.data.readers.scan import Scan


@dataclass(frozen=True)
class Export:
    """One XML export.

    Args:
        patient: patient id, empty where the export has none.
        bscans: the pictures of the B-scans, in the order of the XML.
        fundus: the other pictures that it names.
        missing: names of B-scans that do not lie beside it.
    """

    patient: str
    bscans: tuple[Path, ...]
    fundus: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()


def is_export(path: Path) -> bool:
    """Whether a file is a HEYEX XML export, by name and first bytes."""
    if path.suffix.lower() != ".xml":
        return False
    try:
        with path.open("rb") as file:
            return sniff(file.read(540)) == "heyex_xml"
    except OSError:
        return False


def read_export(path: Path) -> Export:
    """Reads an export.  Pictures are looked for beside the XML alone, whatever folder it names.

    Raises:
        Undecodable: it cannot be read, or names no B-scan.
    """
    try:
        body = ElementTree.parse(path).getroot()
        beside = {name.lower(): name for name in sorted(os.listdir(path.parent), reverse=True)}
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise Undecodable("damaged HEYEX XML export", where=str(path)) from error
    bscans: list[Path] = []
    fundus: list[Path] = []
    missing: list[str] = []
    for image in body.iter("Image"):
        url = image.findtext("ImageData/ExamURL") or ""
        name = unquote(re.split(r"[/\\]", url.strip())[-1])
        is_bscan = (image.findtext("ImageType/Type") or "").strip().upper() == "OCT"
        if name.lower() in beside:
            (bscans if is_bscan else fundus).append(path.parent / beside[name.lower()])
        elif is_bscan:
            missing.append(name)
    if not bscans:
        raise Undecodable("a HEYEX XML export without B-scans beside it", where=str(path))
    return Export(_patient(body), tuple(bscans), tuple(fundus), tuple(missing))


def _patient(body: ElementTree.Element) -> str:
    given = (body.findtext(".//Patient/PatientID") or "").strip()
    number = (body.findtext(".//Patient/ID") or "").strip()
    # As in .vol files: the number in the database of HEYEX where nobody gave the patient an id.
    return given or (f"HEYEX-{int(number)}" if number.isdecimal() else number)


def gather(files: Scan, findings: Findings) -> list[Path]:
    """The images of a scan with each export's pictures replaced by its XML, which stands for the volume."""
    exports, claimed = [], set[Path]()
    fundus = 0
    for path in files.others:
        if is_export(path):
            exports.append(path)
            try:
                export = read_export(path)
            except Undecodable:
                continue  # the XML is listed with its reason where frames are counted
            claimed.update(export.bscans, export.fundus)
            fundus += len(export.fundus)
    if exports:
        findings.notes.append(f"{len(exports)} HEYEX exports; {fundus} fundus pictures left out")
    return sorted([p for p in files.images if p not in claimed] + exports)


class Beside:
    """Whose pictures lie in a folder, by the exports there; each folder is looked at once."""

    def __init__(self) -> None:
        self._folders: dict[Path, str] = {}

    def patient(self, picture: Path) -> str:
        """The patient of the exports beside a picture, where they agree; empty otherwise."""
        folder = picture.parent
        if folder not in self._folders:
            found = {export.patient for export in _exports_in(folder)}
            self._folders[folder] = found.pop() if len(found) == 1 else ""
        return self._folders[folder]


def _exports_in(folder: Path) -> Iterator[Export]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if is_export(folder / name):
            with suppress(Undecodable):
                yield read_export(folder / name)

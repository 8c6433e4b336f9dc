"""Which files a report wrote into a folder, so that the next one removes those that it does not write any more.

A file is removed only if an earlier report wrote it, by its name and by what is in it: a file of another name, one that
was changed since, and one behind a link stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "report-files.json"
"""For each report the names of the files that it wrote last, each with the sha256 of what is in it."""
FIGURES = "figures"
_PART = r"[^./\\:\x00-\x1f][^/\\:\x00-\x1f]*"
_NAME = re.compile(rf"(?:{_PART}\.(?:html|csv|tex|md)|{FIGURES}/{_PART}\.pdf)")
"""Names that a report gives its files; nothing else is ever removed, whatever the manifest says."""


class OwnFiles:
    """The files of the reports in a folder.

    Args:
        folder: where the reports are written; it need not exist yet.
        of: what is reported, e.g. the name of a grid: files of other reports in the folder stay.

    Attributes:
        problem: why what an earlier report wrote is not known; empty where it is, or where there was none.
    """

    def __init__(self, folder: Path, of: str = ""):
        self.folder, self.of = folder, of
        self.problem = ""
        self._reports: dict[str, dict[str, str]] = {}
        try:
            self._reports = _read(folder / MANIFEST)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self.problem = (
                f"{MANIFEST} cannot be used ({why}): files of earlier reports were left where they are; "
                "remove by hand what this report has not written."
            )

    def settle(self, written: Iterable[Path]) -> list[str]:
        """Removes what an earlier report wrote and this one did not, and notes what this one wrote.

        Args:
            written: files in the folder.

        Returns:
            What was removed, and what was left although it is of an earlier report, for people.

        Raises:
            FederationError: the note cannot be written.
        """
        from medfed.report.html import write_page

        now = {path.relative_to(self.folder).as_posix(): _digest(path) for path in written}
        said = [self.problem] if self.problem else []
        current = {name.casefold() for name in now}  # where Q.csv and q.csv are one file, it is a new one
        left, known = {}, self._reports.pop(self.of, {})
        for name, digest in known.items():
            path = self.folder / name
            if name.casefold() in current or not path.is_file():
                continue
            try:
                if not self._unchanged(path, digest):
                    said.append(f"Left: {path}, of an earlier report, but changed since")
                    continue
                path.unlink()
                said.append(f"Removed: {path}, of an earlier report")
            except OSError as error:
                said.append(f"Left: {path}, of an earlier report ({error.strerror})")
                left[name] = digest
        if any(name.startswith(f"{FIGURES}/") for name in known.keys() - now.keys()):
            with contextlib.suppress(OSError):  # it is gone, a link, or something else lies in it
                (self.folder / FIGURES).rmdir()
        others = {
            report: {name: digest for name, digest in files.items() if name.casefold() not in current}
            for report, files in self._reports.items()
        }
        content = {"reports": {**others, self.of: {**left, **now}}}
        write_page(json.dumps(content, indent=1, ensure_ascii=False) + "\n", self.folder / MANIFEST)
        return said

    def _unchanged(self, path: Path, digest: str) -> bool:
        """Whether it is the very file that was written, and no link or other file in its place."""
        at = self.folder.resolve()
        return path.resolve() == at / path.relative_to(self.folder) and _digest(path) == digest


def _read(manifest: Path) -> dict[str, dict[str, str]]:
    """Names and digests by report.

    Raises:
        OSError: it cannot be read.
        ValueError: it is of another form, or names a file that no report writes.
    """
    content = json.loads(manifest.read_text(encoding="utf-8"))
    reports = content.get("reports") if isinstance(content, dict) else None
    if not isinstance(reports, dict):
        raise ValueError("it is no list of reports")
    for files in reports.values():
        if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise ValueError("it is no list of files")
        for name in files:
            if not _NAME.fullmatch(name):
                raise ValueError(f"no report writes a file called {name!r}")
    return reports


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

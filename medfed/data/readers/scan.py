"""Which files lie under a folder, and which of them may be images.

Symbolic links are followed, each folder once.  What is left out is kept with its reason.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from medfed.data.cohort import Findings, Unusable
from medfed.data.decode import sniff
from medfed.errors import DataError

DICOM_SUFFIXES = frozenset({".dcm", ".dicom", ".ima"})
IMAGE_SUFFIXES = DICOM_SUFFIXES | {
    ".png", ".jpg", ".jpeg", ".jpe", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".nii", ".nii.gz", ".vol", ".e2e",
}  # fmt: skip
OTHER_SUFFIXES = frozenset({
    ".csv", ".tsv", ".txt", ".md", ".json", ".jsonl", ".yaml", ".yml", ".xml", ".html", ".pdf", ".zip", ".gz",
    ".tar", ".tgz", ".7z", ".npy", ".npz", ".parquet", ".xlsx", ".xls", ".py", ".ipynb", ".log", ".doc", ".docx",
})  # fmt: skip
ONE_FRAME_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jpe", ".bmp"})
_SYSTEM = frozenset({"__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "@eadir"})


@dataclass
class Scan:
    """The files under one folder.

    Args:
        root: the folder.
        images: candidates for images, sorted by path.
        others: files that are no images (tables, notes, archives), sorted.
        system: files of the operating system, left out (``.DS_Store``, ``__MACOSX``).
        unusable: links that lead nowhere or in a circle, DICOMDIR, unreadable folders.
        folders: every folder visited, relative to the root.
    """

    root: Path
    images: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    system: list[Path] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    def relative(self, path: Path) -> str:
        """The path below the root, with forward slashes."""
        return path.relative_to(self.root).as_posix()

    def report(self, findings: Findings) -> None:
        """Writes what was left out into the findings."""
        findings.unusable += self.unusable
        if self.system:
            names = Counter(p.name if not p.name.startswith("._") else "._*" for p in self.system)
            some = ", ".join(f"{n} {c}x" for n, c in names.most_common(3))
            findings.notes.append(f"{len(self.system)} files of the operating system left out ({some})")

    def found(self) -> str:
        """What lies here, in a few words, for messages about a wrong folder."""
        if not (self.images or self.others or self.folders[1:]):
            return "The folder is empty."
        top = sorted(p.name + ("/" if p.is_dir() else "") for p in self.root.iterdir())
        shown = ", ".join(top[:8]) + (", ..." if len(top) > 8 else "")
        return f"Found {len(self.images)} images and {len(self.others)} other files; at the top: {shown}."


def suffix_of(name: str) -> str:
    """The extension in lower case; ``.nii.gz`` is one extension."""
    name = name.lower()
    return ".nii.gz" if name.endswith(".nii.gz") else os.path.splitext(name)[1]


def stem_of(name: str) -> str:
    """The name without its image extension; anything else after a dot is part of the name."""
    suffix = suffix_of(name)
    return name[: -len(suffix)] if suffix in IMAGE_SUFFIXES else name


def looks_like_image(path: Path) -> bool:
    """Whether the content of a file without a known extension is that of an image, DICOM above all."""
    try:
        with path.open("rb") as file:
            return sniff(file.read(540)) is not None
    except OSError:
        return False


def scan(root: Path) -> Scan:
    """Lists every file under a folder.

    Args:
        root: the folder; links below it are followed, each real folder once (no endless loops).

    Returns:
        The files, sorted into images, other files and what was left out.

    Raises:
        DataError: the folder does not exist or is a file.
    """
    root = Path(root).expanduser().absolute()
    if not root.is_dir():
        problem = "is a file, but a folder is expected." if root.exists() else "does not exist."
        raise DataError(f"The data folder {problem}", where=str(root), fix="Check the path under data.root.")
    result = Scan(root)
    visited: set[tuple[int, int]] = set()
    # Links wait until the real folders are done, so that a sample keeps its own path as id.
    pending, links = [str(root)], list[str]()
    while pending or links:
        folder = pending.pop() if pending else links.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:
                result.unusable.append(Unusable(folder, "link to a folder that was read already"))
                continue
            visited.add((status.st_dev, status.st_ino))
            result.folders.append(os.path.relpath(folder, root).replace(os.sep, "/"))
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda e: e.name, reverse=True)
        except OSError as error:
            result.unusable.append(Unusable(folder, f"folder cannot be read: {error.strerror}"))
            continue
        for entry in entries:
            if _is_system(entry.name):
                result.system.append(Path(entry.path))
            elif _is_folder(entry):
                (links if entry.is_symlink() else pending).append(entry.path)
            else:
                _sort_file(entry, result)
    result.images.sort()
    result.others.sort()
    result.folders.sort()
    return result


def _is_system(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _sort_file(entry: os.DirEntry[str], result: Scan) -> None:
    path, suffix = Path(entry.path), suffix_of(entry.name)
    if entry.is_symlink() and not os.path.exists(path):
        result.unusable.append(Unusable(entry.path, "link that leads nowhere"))
    elif not os.path.isfile(path):  # a pipe would be waited for without end
        result.unusable.append(Unusable(entry.path, "a pipe, socket or device and not a file"))
    elif entry.name.upper() == "DICOMDIR":
        result.unusable.append(Unusable(entry.path, "DICOMDIR, a directory of files and not an image"))
    elif suffix in IMAGE_SUFFIXES:
        result.images.append(path)
    elif suffix in OTHER_SUFFIXES or not looks_like_image(path):
        result.others.append(path)
    else:
        result.images.append(path)

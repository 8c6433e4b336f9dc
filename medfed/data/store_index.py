"""The index of an image store: which record holds which image, in SQLite.

Connections live for one operation only, so that none is carried into a forked process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

Key = tuple[str, int]  # content digest, frame

_RETIRED = "(damaged)"  # the variant of rows that are no longer used; nobody asks for it
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, digest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS images (
    row INTEGER PRIMARY KEY, digest TEXT NOT NULL, frame INTEGER NOT NULL, variant TEXT NOT NULL,
    corrections TEXT NOT NULL, checksum INTEGER, UNIQUE (variant, digest, frame));
CREATE TABLE IF NOT EXISTS failures (
    digest TEXT NOT NULL, frame INTEGER NOT NULL, variant TEXT NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (variant, digest, frame)) WITHOUT ROWID;
"""


class Index:
    """Rows, failures and known files of one store.

    Args:
        path: the database file; made by :meth:`create`.
        read_only: remember nothing.
    """

    def __init__(self, path: Path, read_only: bool = False):
        self.path, self.read_only = path, read_only

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
            yield connection

    def create(self) -> None:
        """Creates the tables where they are missing, and checks the file.

        Raises:
            sqlite3.DatabaseError: the file is damaged or is no such database.
        """
        with self._connect() as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            connection.executescript(_SCHEMA)
            columns = {row[1] for row in connection.execute("PRAGMA table_info(images)")}
            if "checksum" not in columns:  # an index from before there were checksums
                connection.execute("ALTER TABLE images ADD COLUMN checksum INTEGER")

    def remove(self) -> None:
        """Deletes the database with its journal."""
        for name in (self.path, self.path.with_name(self.path.name + "-journal")):
            name.unlink(missing_ok=True)

    def count(self) -> int:
        """Number of records that the index knows: one more than the last row."""
        with self._connect() as connection:
            return connection.execute("SELECT COALESCE(MAX(row) + 1, 0) FROM images").fetchone()[0]

    def drop_from(self, row: int) -> int:
        """Forgets the images from a row on; returns how many."""
        with self._connect() as connection:
            return connection.execute("DELETE FROM images WHERE row >= ?", (row,)).rowcount

    def files(self) -> dict[str, tuple[int, int, str]]:
        """Size, time of change and digest of each file seen so far."""
        with self._connect() as connection:
            rows = connection.execute("SELECT path, size, mtime_ns, digest FROM files")
            return {path: (size, mtime, digest) for path, size, mtime, digest in rows}

    def remember_files(self, rows: Iterable[tuple[str, int, int, str]]) -> None:
        """Records path, size, time of change and digest."""
        if self.read_only:
            return
        with self._connect() as connection:
            connection.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", rows)

    def images(self, variant: str) -> dict[Key, tuple[int, str]]:
        """Row and corrections (names joined by spaces) of each image of a variant."""
        with self._connect() as connection:
            rows = connection.execute(
                "SELECT digest, frame, row, corrections FROM images WHERE variant = ?", (variant,)
            )
            return {(digest, frame): (row, corrections) for digest, frame, row, corrections in rows}

    def checksums(self, variant: str) -> dict[int, int | None]:
        """Checksum of each row of a variant; None where it was written before there were checksums."""
        with self._connect() as connection:
            return dict(connection.execute("SELECT row, checksum FROM images WHERE variant = ?", (variant,)))

    def remember_checksums(self, checksums: Mapping[int, int]) -> None:
        """Records the checksums of rows that have none."""
        with self._connect() as connection:
            connection.executemany(
                "UPDATE images SET checksum = ? WHERE row = ? AND checksum IS NULL",
                [(value, row) for row, value in checksums.items()],
            )

    def retire(self, rows: Iterable[int]) -> None:
        """Takes rows out of use.  Their places stay taken: who has mapped the file may still read it."""
        with self._connect() as connection:
            connection.executemany(
                "UPDATE images SET variant = ?, digest = '', frame = row WHERE row = ?",
                [(_RETIRED, row) for row in rows],
            )

    def failures(self, variant: str) -> dict[Key, str]:
        """The reason of each failure of a variant."""
        with self._connect() as connection:
            rows = connection.execute("SELECT digest, frame, reason FROM failures WHERE variant = ?", (variant,))
            return {(digest, frame): reason for digest, frame, reason in rows}

    def add(
        self,
        variant: str,
        images: Iterable[tuple[int, Key, str, int]],
        failures: Iterable[tuple[Key, str]],
    ) -> None:
        """Commits records (row, key, corrections, checksum) and failures (key, reason) of a variant at once."""
        with self._connect() as connection:
            connection.executemany(
                "INSERT INTO images (row, digest, frame, variant, corrections, checksum) VALUES (?, ?, ?, ?, ?, ?)",
                [(row, *key, variant, corrections, checksum) for row, key, corrections, checksum in images],
            )
            connection.executemany(
                "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)",
                [(digest, frame, variant, reason) for (digest, frame), reason in failures],
            )

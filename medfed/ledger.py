"""The ledger: an append-only record of every message that left a client, or reached a server.

One JSON line a message: when, in which round, for which task, the name, type and shape of each tensor, the plain
values themselves, the bytes and their SHA-256.  Each line carries the hash of the one before it, so that a changed,
inserted or removed line shows.  (A tail that was cut off shows only beside the other side's ledger.)  A line is on disk
before its message is handed over, so that nothing leaves unrecorded: where it cannot be written, a refusal that says so
goes in the message's place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from medfed.errors import DataError, FederationError
from medfed.federation.messages import Message

if TYPE_CHECKING:
    from rich.table import Table

LEDGER = "ledger.jsonl"
START = "0" * 64
PATIENCE = 30.0
Entry = dict[str, Any]


class Ledger:
    """Appends to one ledger, as others may too: an old and a new job of one run at a site.

    Args:
        path: the file; made with its folder where it is not there.

    Raises:
        DataError: what is there already is not a sound ledger.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        self._read()

    def append(self, data: bytes, message: Message | None = None, **facts: Any) -> Entry:
        """Writes down one message, durably.

        Args:
            data: the bytes that are handed over, or that came.
            message: their content; None where they could not be read.
            **facts: plain values: client, kind, task, round, step, ...

        Returns:
            The entry as written.

        Raises:
            FederationError: it cannot be written; the ledger is as before.
            DataError: another wrote to it since, and it is no sound ledger any more.
        """
        content, digest = Message() if message is None else message, hashlib.sha256(data).hexdigest()
        try:
            with self._lock.acquire(timeout=PATIENCE):
                if (self.path.stat().st_size if self.path.exists() else 0) != self._size:
                    self._read()
                entry: Entry = {
                    "number": self._count + 1,
                    "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                    **facts,
                    "tensors": [
                        [name, str(t.dtype).removeprefix("torch."), list(t.shape)]
                        for name, t in content.tensors.items()
                    ],
                    "values": dict(content.values),
                    "bytes": len(data),
                    "sha256": digest,
                    "previous": self._previous,
                }
                entry["hash"] = _seal(entry)
                self._write(entry)
        except OSError as error:
            why = "another process keeps it locked" if isinstance(error, Timeout) else error.strerror
            raise FederationError(
                f"the ledger cannot be written ({why}).",
                where=str(self.path),
                fix="What it holds is intact: make room or give the right to write there, then go on.",
            ) from None
        return entry

    def _read(self) -> None:
        data = self.path.read_bytes() if self.path.exists() else b""
        entries = _check(data, self.path)
        self._size, self._count = len(data), len(entries)
        self._previous = entries[-1]["hash"] if entries else START
        # A kill in the middle of a line: its message was never handed over. The torn text stays, as a line alone.
        self._torn = not data.endswith(b"\n") and self._size > 0

    def _write(self, entry: Entry) -> None:
        line = ("\n" * self._torn + json.dumps(entry) + "\n").encode()
        try:
            with open(self.path, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # else the size tells the next one to read what is there
                os.truncate(self.path, self._size)
            raise
        self._previous, self._count = entry["hash"], self._count + 1
        self._size, self._torn = self._size + len(line), False


def read_ledger(path: Path) -> list[Entry]:
    """Reads a ledger and checks its chain.

    Raises:
        DataError: there is none, or a line was changed, inserted or removed.
    """
    if not path.is_file():
        raise DataError("there is no ledger.", where=str(path), fix=f"Give a folder that holds a {LEDGER}.")
    return _check(path.read_bytes(), path)


def _check(data: bytes, path: Path) -> list[Entry]:
    entries: list[Entry] = []
    previous = START
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill; were it anything else, the next line would not follow
        sound = isinstance(entry, dict) and entry.get("previous") == previous and entry.get("hash") == _seal(entry)
        if not sound or entry.get("number") != len(entries) + 1:
            raise DataError(
                f"line {number} does not follow from the one before it: the ledger was changed.",
                where=str(path),
                fix="Compare it with a copy, or with the server's ledger.",
            )
        entries.append(entry)
        previous = entry["hash"]
    return entries


def find_ledgers(folder: Path) -> list[Path]:
    """The ledgers in a folder and below it: a run's own first, then those of its clients.

    Raises:
        DataError: there is none.
    """
    found = [folder] if folder.is_file() else sorted(folder.rglob(LEDGER), key=lambda p: (len(p.parts), str(p)))
    if not found:
        raise DataError("no ledger is here or below.", where=str(folder), fix=f"Give a folder that holds a {LEDGER}.")
    return found


def differences(sent: Iterable[Entry], received: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """What one ledger has and the other lacks, by the hash of the bytes.

    Args:
        sent: of a client.
        received: of a server, from that client.

    Returns:
        Sent and never received (a reply that came too late is withheld by NVFlare); received and never sent.
    """
    sent, received = list(sent), list(received)
    return _without(sent, received), _without(received, sent)


def ledger_table(entries: Sequence[Entry], title: str) -> Table:
    """A ledger as a table, one line a message."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("time", "client", "round", "request", "task", "kind", "tensors", "values", "bytes", "sha256"):
        numeric = column in ("round", "request", "tensors", "bytes")
        side: Literal["right", "left"] = "right" if numeric else "left"
        table.add_column(column, justify=side, overflow="fold", no_wrap=column not in ("client", "values"))
    for e in entries:
        told = e.get("reason") or ", ".join(e["values"])
        kind = f"{e.get('kind', '?')}{' (late)' if e.get('late') else ''}"
        cells = (e["time"][:19], e.get("client"), e.get("round"), e.get("step"), e.get("task"), kind)
        row = (*cells, len(e["tensors"]), told, e["bytes"], e["sha256"][:12])
        table.add_row(*("" if cell is None else Text(str(cell)) for cell in row))
    return table


def tensor_lines(entry: Mapping[str, Any]) -> list[str]:
    """The tensors of one entry, one line each: name, type and shape."""
    return [f"{name} {dtype} {'x'.join(map(str, shape)) or 'scalar'}" for name, dtype, shape in entry["tensors"]]


def _seal(entry: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in entry.items() if k != "hash"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _without(entries: list[Entry], others: list[Entry]) -> list[Entry]:
    left = Counter(e["sha256"] for e in others)
    missing = []
    for entry in entries:
        if left[entry["sha256"]]:
            left[entry["sha256"]] -= 1
        else:
            missing.append(entry)
    return missing

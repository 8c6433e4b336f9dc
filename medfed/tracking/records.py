"""The record of a run: one line of strict JSON a round, on disk before anything else hears of the round."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medfed.durable import sync_folder, write_atomically
from medfed.errors import DataError, FederationError

NON_FINITE = "non_finite"


class RecordLog:
    """``records.jsonl``: appended by the run alone, read by anybody at any time.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._last: int | None = None

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Adds one round, durably; repairs a torn last line first.

        Args:
            record: plain values (NumPy scalars too) with an integer ``round`` above the last one.  The time of
                writing is added as ``time`` (seconds since 1970) where it is not given.

        Returns:
            What was written: numbers that are not finite are null there and are named under ``non_finite``.

        Raises:
            ValueError: the round is not above the last one.
            TypeError: a value that JSON cannot hold.
            FederationError: the disk is full or cannot be written; the file is as before.
        """
        round_ = record.get("round")
        if isinstance(round_, bool) or not isinstance(round_, int):
            raise ValueError(f"a record needs an integer 'round', not {round_!r}")
        if self._last is None:
            self._last = self.repair()
        if round_ <= self._last:
            raise ValueError(f"round {round_} cannot follow round {self._last}")
        strict = strict_json({"time": round(time.time(), 3), **record})
        line = json.dumps(strict, allow_nan=False, ensure_ascii=False) + "\n"
        self._write(line.encode())
        self._last = round_
        return strict

    def read(self, after: int = 0) -> list[dict[str, Any]]:
        """The records of rounds after ``after``, in order.  A torn last line is left out (and left alone).

        Raises:
            DataError: a line before the last is not a record.
        """
        return [r for r in self.tail(0)[0] if r["round"] > after]

    def tail(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The records from a byte offset on, and the offset behind the last complete one.

        Raises:
            DataError: as :meth:`read`.
        """
        if not self.path.exists() or self.path.stat().st_size <= offset:
            return [], offset
        with open(self.path, "rb") as handle:
            handle.seek(offset)
            lines = handle.read().splitlines(keepends=True)
        records = []
        for number, line in enumerate(lines, start=1):
            record = _parse(line)
            if record is not None:
                records.append(record)
            elif number < len(lines):
                raise DataError(
                    f"line {number} from byte {offset} on is not a round record.",
                    where=self.path.name,
                    fix="The file was changed by hand or the disk is damaged: restore it, or remove that line.",
                )
            else:
                return records, offset + sum(map(len, lines[:-1]))
        return records, offset + sum(map(len, lines))

    def repair(self) -> int:
        """Cuts a torn last line off (a kill in the middle of a write); only the run itself may call this.

        Returns:
            The last recorded round, 0 where there is none.
        """
        records, end = self.tail(0)
        if self.path.exists() and self.path.stat().st_size > end:
            with open(self.path, "rb+") as handle:
                handle.truncate(end)
                os.fsync(handle.fileno())
        return records[-1]["round"] if records else 0

    def truncate_after(self, round_: int) -> list[int]:
        """Drops the rounds after ``round_``, atomically; for a resume from the checkpoint of that round.

        Returns:
            The rounds dropped.
        """
        self.repair()
        records = self.read()
        kept = [r for r in records if r["round"] <= round_]
        if len(kept) < len(records):
            text = "".join(json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in kept)
            write_atomically(self.path, text.encode())
        self._last = kept[-1]["round"] if kept else 0
        return [r["round"] for r in records if r["round"] > round_]

    def _write(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        before = 0 if fresh else self.path.stat().st_size
        try:
            with open(self.path, "ab", buffering=0) as handle:
                view = memoryview(line)
                while view:
                    view = view[handle.write(view) :]
                os.fsync(handle.fileno())
            if fresh:
                sync_folder(self.path.parent)
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, before)
            full = error.errno == errno.ENOSPC
            raise FederationError(
                "the disk is full." if full else f"cannot be written ({error.strerror}).",
                where=self.path.name,
                fix="The rounds before are intact: make room, then resume the run.",
            ) from None


def strict_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that strict JSON can hold; what is not finite becomes null and is named under ``non_finite``.

    Raises:
        TypeError: a value that JSON cannot hold, or a key that is no text; names it.
    """
    found: list[str] = []
    out = {name: _strict(value, name, found) for name, value in record.items()}
    if found:
        out[NON_FINITE] = [*(out.get(NON_FINITE) or []), *found]
    return out


def _strict(value: Any, name: str, found: list[str]) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, Mapping):
        wrong = next((k for k in value if not isinstance(k, str)), None)
        if wrong is not None:
            raise TypeError(f"{name}: keys are text, not {wrong!r}")
        return {k: _strict(v, f"{name}/{k}", found) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v, f"{name}/{i}", found) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(name)
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name}: {type(value).__name__} is not a plain value")


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("round")) is int else None

"""Text in CSV files that people open in a spreadsheet.

A file or patient may be named like a formula, and a spreadsheet runs what looks like one, whoever named it so (OWASP,
CSV Injection). Such text is written with an apostrophe before it, by which spreadsheets know text.
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

# Where a cell may begin: at the start, or behind a semicolon, which splits cells where the comma is a decimal mark.
_FORMULA = re.compile(r"(^|[;\n\t])(?=\s*[=+\-@＝＋－＠])")


def inert(value: Any) -> Any:
    """Text that no spreadsheet takes for a formula; numbers, also as text, and whatever is no text stay as they are.

    A carriage return, which pandas does not quote and which would begin a row, becomes a space.
    """
    if not isinstance(value, str) or _is_number(value):
        return value
    return _FORMULA.sub(r"\1'", value.replace("\r", " "))


def inert_table(table: pd.DataFrame) -> pd.DataFrame:
    """A copy of a table whose text and column names are :func:`inert`."""
    return table.apply(lambda column: column if column.dtype.kind in "biuf" else column.map(inert)).rename(
        columns=inert
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""Errors that a user can act on.

Every fault of the input ends in one message that says what is wrong, where, and what to do about it.  The
command line prints that message without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MedfedError(Exception):
    """A fault of the input, the configuration or the environment.

    Args:
        what: what is wrong, in one sentence.
        where: the file, key or argument that it is about.
        fix: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, where, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text = f"{self.where}: {text}"
        if self.fix:
            text = f"{text} {self.fix}"
        return text


class ConfigError(MedfedError):
    """The experiment file or an override does not describe an experiment."""


class DataError(MedfedError):
    """The images, labels or tables cannot be used as they are."""


class FederationError(MedfedError):
    """The federation cannot go on: no client left, a contract broken by the program itself, storage full."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Says which known word was probably meant.

    Args:
        word: what was given.
        known: what is allowed.

    Returns:
        ``"Did you mean 'x'?"`` when one is close, otherwise the list of allowed words.
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(known)}."

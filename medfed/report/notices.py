"""What a reader of the numbers must know first: collapsed models, clients left out, undefined metrics."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medfed.report.metrics import COLUMN_LABELS, COLUMNS, metric
from medfed.report.runs import LAST, Run

if TYPE_CHECKING:
    from medfed.report.compare import Comparison

_COLLAPSED = re.compile(r"predicts (?:only )?\d+ of \d+ |of the samples to 1 of \d+ |every sample the same")
"""The warnings of evaluation that say that a model has collapsed."""


@dataclass(frozen=True)
class Notice:
    """One remark.

    Args:
        level: ``"serious"`` (the numbers cannot be taken at face value), ``"note"`` otherwise.
        text: the remark.
        detail: where it holds, e.g. the rounds.
    """

    level: str
    text: str
    detail: str = ""


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``[1, 2, 3, 7]`` gives ``"1–3, 7"``."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def few(items: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """The first of them by name, and how many more there are."""
    more = len(items) - most
    return separator.join(items[:most]) + (f" and {more} more" if more > 0 else "")


def in_rounds(numbers: Iterable[int]) -> str:
    """``"round 4"`` or ``"rounds 1–3, 7"``."""
    numbers = sorted(set(numbers))
    return f"round{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def collapse(run: Run, last: int = LAST) -> str | None:
    """The newest warning, within the last rounds, that the model predicts few of the classes; None without one."""
    texts = [str(w) for record in run.records[-last:] for w in record.get("warnings") or []]
    return next((t for t in reversed(texts) if _COLLAPSED.search(t)), None)


def refusals(run: Run) -> dict[str, dict[str, list[int]]]:
    """Who was left out: rounds by client and reason."""
    table: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in run.records:
        for entry in record.get("refused") or []:
            table[str(entry.get("client"))][str(entry.get("reason"))].append(record["round"])
    return {c: dict(table[c]) for c in sorted(table)}


def notices(run: Run, last: int = LAST) -> list[Notice]:
    """The remarks on a run, the serious ones first.

    Args:
        run: the run.
        last: the rounds that its final numbers are taken from.
    """
    found: list[Notice] = []
    done, planned = len(run.records), run.planned
    if not done:
        found.append(Notice("serious", "No round was recorded yet.", f"status: {run.status}"))
    elif not run.finished:
        of = f"{done} of {planned} rounds recorded" if planned else f"{done} rounds recorded"
        found.append(Notice("serious", "This run is not finished.", f"status: {run.status}; {of}"))
    if run.meta.get("error"):
        found.append(Notice("serious", f"The run failed: {run.meta['error']}"))
    if (few := collapse(run, last)) is not None:
        why = "accuracy near chance and a small gap then say nothing about fairness"
        found.append(Notice("serious", f"The model has collapsed ({few}).", why))
    if alone := [r["round"] for r in run.records if r.get("asked") and not r.get("admitted")]:
        found.append(Notice("serious", "No client was admitted, so the model did not change.", in_rounds(alone)))
    if done and (gaps := set(range(1, run.rounds[-1] + 1)) - set(run.rounds)):
        found.append(Notice("serious", "Some rounds have no record.", in_rounds(gaps)))
    warned: dict[str, list[int]] = defaultdict(list)
    for record in run.records:
        for text in record.get("warnings") or []:
            warned[str(text)].append(record["round"])
    found += [Notice("note", text, in_rounds(r)) for text, r in warned.items()]
    found += _left_out(run) + _undefined(run)
    found += [Notice("note", str(text), "known before the first round") for text in run.meta.get("warnings") or []]
    return found + [Notice("note", text) for text in run.problems]


def _undefined(run: Run) -> list[Notice]:
    """One remark for each reason and test set, and one for each metric of single clients."""
    sets: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    shares: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    reasons: dict[str, str] = {}
    for record in run.records:
        for key, reason in (record.get("undefined") or {}).items():
            group, _, name = str(key).partition("/")
            if group == "clients":
                client, _, name = name.rpartition("/")
                shares[name][client].append(record["round"])
                reasons.setdefault(name, str(reason))
            else:
                sets[group, str(reason)][name].append(record["round"])
    found = []
    for (group, reason), names in sets.items():
        where = in_rounds(r for rounds in names.values() for r in rounds)
        found.append(Notice("note", f"Not defined on the {group} test set: {', '.join(names)} ({reason}).", where))
    for name, clients in shares.items():
        where = in_rounds(r for rounds in clients.values() for r in rounds)
        who = next(iter(clients)) if len(clients) == 1 else f"{len(clients)} clients"
        found.append(Notice("note", f"{name} is not defined for {who}, e.g. {reasons[name]}.", where))
    return found


def _left_out(run: Run) -> list[Notice]:
    """One remark for each reason for which clients were left out."""
    by_reason: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for client, reasons in refusals(run).items():
        for why, rounds in reasons.items():
            by_reason[why][client] = rounds
    found = []
    for why, clients in sorted(by_reason.items(), key=lambda item: -sum(map(len, item[1].values()))):
        who = next(iter(clients)) + " was" if len(clients) == 1 else f"{len(clients)} clients were"
        times = sum(map(len, clients.values()))
        where = in_rounds(r for rounds in clients.values() for r in rounds)
        found.append(Notice("note", f"{who} left out: {why}", where if times == 1 else f"{times} times, in {where}"))
    return found


def _not_always_defined(runs: Sequence[Run], result: Comparison) -> list[str]:
    """What is not defined in all of the last rounds: one note a metric, for the columns that share their runs."""
    by_runs: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, column in itertools.product(result.metrics, COLUMNS):
        finals = [(run, run.final(f"{column}/{name}", result.last)) for run in runs]
        part = [
            f"{run.folder} ({final.defined} of {len(final.rounds)} rounds)"
            for run, final in finals
            if final.rounds and not final.complete
        ]
        if part:
            by_runs[name, tuple(part)].append(COLUMN_LABELS[column])
    notes = []
    for (name, short), columns in by_runs.items():
        where = f"{len(short)} of {len(runs)} runs"
        notes.append(f"{metric(name).label}, {', '.join(columns)}: not always defined in {where}: {few(short)}")
    return notes


def notes_on(result: Comparison, unlike: list[str]) -> list[str]:
    """What a reader of a comparison must know, after the reasons for which its runs are not paired."""
    notes = [f"not paired, so there are no differences: {reason}" for reason in unlike]
    everyone = [run for members in result.runs.values() for run in members]
    seeds = {m: {str(r.seed) for r in members} for m, members in result.runs.items()}
    if len({frozenset(s) for s in seeds.values()}) > 1:
        have = "; ".join(f"{m}: {', '.join(sorted(s))}" for m, s in seeds.items())
        notes.append(f"methods have different seeds, differences use those in common ({have})")
    if len({run.meta.get("data_hash") for run in everyone}) > 1:
        notes.append("the data of the runs differ (data hash)")
    going = [f"{r.folder} ({r.status}, {len(r.records)} of {r.planned} rounds)" for r in everyone if not r.finished]
    if going:
        notes.append(f"not finished: {few(going)}")
    if torn := [f"{r.folder} ({few(r.problems, 2, '; ')})" for r in everyone if r.problems]:
        notes.append(f"not read as a whole: {few(torn)}")
    if fallen := [f"{r.folder} ({why})" for r in everyone if (why := collapse(r, result.last)) is not None]:
        notes.append(f"collapsed, and the gap of the method is not ranked: {few(fallen)}")
    notes += _not_always_defined(everyone, result)
    lengths = {len(run.records) for run in everyone}
    if len(lengths) > 1:
        notes.append(f"runs have different lengths ({', '.join(map(str, sorted(lengths)))} rounds)")
    return notes

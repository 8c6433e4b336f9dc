"""Whether methods differ beyond chance: paired tests over conditions and seeds, corrected, and mean ranks.

A pair is one condition and seed, on which both methods have finished.  Pairs of one seed share images and partition, so
that they are not independent of each other; the test over seeds alone, of each seed's mean, does without that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medfed.report.compare import gain
from medfed.report.grid_cells import GridCells
from medfed.report.metrics import COLUMN_LABELS, metric
from medfed.report.paper.entries import Place, number
from medfed.report.paper.facts import chosen_metrics, settings
from medfed.report.paper.sheets import Line, Sheet, Written
from medfed.report.paper.statistics import (
    Friedman,
    friedman,
    holm,
    paired_t,
    sign_flip,
    signed_rank,
    smallest_sign_flip,
)

LEVEL = 0.05
SETS = ("clean", "corrupted", "average")


@dataclass(frozen=True)
class Test:
    """A method against the baseline; differences as recorded (fractions).

    Args:
        method: label of the method.
        differences: by condition and seed.
        better: in how many of them the method is better.
        p: of the sign-flip test over all pairs.
        p_holm: the same, corrected for the number of methods.
        p_seeds: of the sign-flip test over the means of each seed.
        p_rank: of Wilcoxon's signed-rank test over all pairs.
        p_t: of the paired t test over all pairs.
    """

    __test__ = False  # pytest takes it for a test otherwise

    method: str
    differences: dict[Place, float]
    better: int
    p: float | None
    p_holm: float | None
    p_seeds: float | None
    p_rank: float | None
    p_t: float | None

    @property
    def seeds(self) -> int:
        """Seeds among the pairs."""
        return len({s for _, s in self.differences})


@dataclass(frozen=True)
class Family:
    """The tests of one quantity, which are corrected together.

    Args:
        key: a quantity of the round record, e.g. ``clean/accuracy``.
        baseline: what methods are tested against.
        tests: by method.
        ranks: Friedman's test over the pairs that all its methods have; None for too few.
        ranked: labels of the methods in the order of the ranks.
        unranked: methods that have not finished on all of those pairs.
    """

    key: str
    baseline: str
    tests: tuple[Test, ...]
    ranks: Friedman | None
    ranked: tuple[str, ...]
    unranked: tuple[str, ...]

    @property
    def label(self) -> str:
        """The quantity for people."""
        part, _, name = self.key.partition("/")
        return f"{metric(name).label}, {COLUMN_LABELS[part]}"


def families(cells: GridCells) -> list[Family]:
    """The tests of a grid: of each metric on each test set, every method against the baseline."""
    known = settings(cells)
    # Runs on clean images and true labels are references and no part of the claim, unless there is nothing else.
    claimed = [c for c in cells.conditions if not known[c].reference] or list(cells.conditions)
    places = [(c, s) for c in claimed for s in cells.seeds]
    found = [family(cells, f"{part}/{name}", places) for name in chosen_metrics(cells) for part in SETS]
    return [f for f in found if f is not None]


def family(cells: GridCells, key: str, places: Sequence[Place]) -> Family | None:
    """The tests of one quantity; None where no method has a pair with the baseline."""
    values: dict[str, dict[Place, float]] = {m: {} for m in cells.methods}
    for method, own in values.items():
        for place in places:
            run = cells.finished.get((place[0], method, place[1]))
            if run is not None and (value := number(run, key, cells.last)) is not None:
                own[place] = value
    base = values[cells.baseline]
    pairs = {m: {p: v - base[p] for p, v in own.items() if p in base} for m, own in values.items()}
    pairs = {m: d for m, d in pairs.items() if d and m != cells.baseline}
    if not pairs:
        return None
    p = {m: sign_flip(list(d.values())) for m, d in pairs.items()}
    corrected = dict(zip(p, holm(list(p.values()))))
    part, _, name = key.partition("/")
    tests = tuple(
        Test(
            m,
            d,
            sum(gain(name, part, base[place] + x, base[place]) > 0 for place, x in d.items()),
            p[m],
            corrected[m],
            sign_flip(list(by_seed(d).values())),
            signed_rank(list(d.values())),
            paired_t(list(d.values())),
        )
        for m, d in pairs.items()
    )
    most = max((set(v) for v in values.values()), key=len)
    ranked = tuple(m for m, v in values.items() if set(v) == most)
    blocks = np.array([[values[m][place] for m in ranked] for place in sorted(most)])
    ranks = friedman(blocks, metric(name).higher) if blocks.ndim == 2 else None
    return Family(key, cells.baseline, tests, ranks, ranked, tuple(m for m in values if m not in ranked))


def by_seed(differences: dict[Place, float]) -> dict[int, float]:
    """Mean difference of each seed over its conditions."""
    seeds = dict.fromkeys(s for _, s in differences)
    return {seed: statistics.fmean(d for (_, s), d in differences.items() if s == seed) for seed in seeds}


def difference_sheet(one: Family) -> Sheet:
    """The tests of a family as a table."""
    shown = metric(one.key.partition("/")[2])
    lines = []
    for test in one.tests:
        values = list(test.differences.values())
        spread = f" ± {shown.text(statistics.stdev(values))}" if len(values) > 1 else ""
        lines.append(
            Line(
                test.method,
                (
                    Written(f"{shown.text(statistics.fmean(values), signed=True)}{spread}"),
                    Written(f"{test.better}/{len(values)}"),
                    Written(p_text(test.p)),
                    Written(p_text(test.p_holm)),
                    Written(p_text(test.p_rank)),
                    Written(p_text(test.p_t)),
                    Written(p_text(test.p_seeds)),
                ),
            )
        )
    most = max(len(t.differences) for t in one.tests)
    return Sheet(
        f"tests-{one.key.replace('/', '-')}",
        "",
        f"{one.label}: paired difference to {one.baseline}{' in percentage points' if shown.percent else ''}, mean ± "
        f"sample standard deviation (n - 1) over pairs of condition and seed; two-sided p.",
        "method",
        ("difference", "better", "sign-flip", "Holm", "signed-rank", "t", "sign-flip"),
        ("", "", *["p over pairs"] * 4, "p over seeds"),
        tuple(lines),
        tuple(_reach(one, most)),
    )


def _reach(one: Family, pairs: int) -> list[str]:
    """What so few pairs can show at all."""
    tests, seeds = len(one.tests), max(t.seeds for t in one.tests)
    least = smallest_sign_flip(pairs)
    notes = [
        f"with {pairs} pair{'s' if pairs != 1 else ''} the smallest p that the sign-flip test can give is "
        f"{p_text(least)}, after Holm's correction for {tests} method{'s' if tests != 1 else ''} "
        f"{p_text(min(1.0, tests * least))}"
        + (f": no difference can be told from chance at {LEVEL}" if tests * least > LEVEL else "")
    ]
    if pairs > seeds:
        notes.append(
            f"pairs of one seed share images and partition and are not independent; over {seeds} "
            f"seed{'s' if seeds != 1 else ''} alone the smallest p is {p_text(smallest_sign_flip(seeds))}"
        )
    return notes


def rank_sheet(one: Family) -> Sheet | None:
    """Mean ranks with Nemenyi's critical difference as a table; None where there are none."""
    if one.ranks is None:
        return None
    found = one.ranks
    order = np.argsort(found.ranks, kind="stable")
    best = float(found.ranks[order[0]])
    rejected = found.p is not None and found.p < LEVEL
    lines = []
    for k in order:
        apart = rejected and float(found.ranks[k]) - best > found.critical
        verdict = "best" if found.ranks[k] == best else "differs from the best" if apart else "not told from it"
        lines.append(Line(one.ranked[k], (Written(f"{found.ranks[k]:.2f}"), Written(verdict))))
    notes = [] if rejected else ["Friedman's test does not reject that all are alike, so no rank is told from another"]
    if found.blocks > max(t.seeds for t in one.tests):
        notes.append("blocks of one seed share images and partition and are not independent")
    if one.unranked:
        notes.append(f"not ranked, for want of finished cells: {', '.join(one.unranked)}")
    return Sheet(
        f"ranks-{one.key.replace('/', '-')}",
        "",
        f"{one.label}: mean rank over {found.blocks} pairs of condition and seed, 1 is best; Friedman's test p = "
        f"{p_text(found.p)}; Nemenyi's critical difference at 0.05 is {found.critical:.2f}.",
        "method",
        ("mean rank", "against the best"),
        ("", ""),
        tuple(lines),
        tuple(notes),
    )


def rows(found: Sequence[Family]) -> list[dict[str, Any]]:
    """One line a family and method, for CSV; differences in the unit shown."""
    lines = []
    for one in found:
        shown = metric(one.key.partition("/")[2])
        ranks = {} if one.ranks is None else dict(zip(one.ranked, one.ranks.ranks.tolist()))
        for test in one.tests:
            values = [shown.shown(v) for v in test.differences.values()]
            lines.append(
                {
                    "quantity": one.key,
                    "method": test.method,
                    "baseline": one.baseline,
                    "unit": shown.unit or "1",
                    "pairs": len(values),
                    "seeds": test.seeds,
                    "mean_difference": round(statistics.fmean(values), 8),
                    "sample_std_of_differences": round(statistics.stdev(values), 8) if len(values) > 1 else "",
                    "pairs_better": test.better,
                    "p_sign_flip": _csv(test.p),
                    "p_sign_flip_holm": _csv(test.p_holm),
                    "p_sign_flip_smallest_possible": _csv(smallest_sign_flip(len(values))),
                    "p_signed_rank": _csv(test.p_rank),
                    "p_paired_t": _csv(test.p_t),
                    "p_sign_flip_over_seeds": _csv(test.p_seeds),
                    "mean_rank": round(ranks[test.method], 6) if test.method in ranks else "",
                    "friedman_p": "" if one.ranks is None else _csv(one.ranks.p),
                    "friedman_blocks": "" if one.ranks is None else one.ranks.blocks,
                    "nemenyi_critical_difference": "" if one.ranks is None else round(one.ranks.critical, 6),
                }
            )
    return lines


def p_text(p: float | None) -> str:
    """A probability for people."""
    if p is None:
        return "n/a"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def _csv(p: float | None) -> float | str:
    return "" if p is None else float(f"{p:.6g}")

"""The work list of one client: which of its observed labels are worth a look, best first, and why.

Made from what the client itself has: sample ids, observed labels and the evidence in its memory.  These criteria may
speak, each on its own:

- ``representative`` (S_R): how much of a sample's features lies along each class's reference direction; the largest
  wins (OCT-FedSIR, stage III; see :mod:`medfed.reliability.relabelling`);
- ``residual`` (S_N): how much lies in each class's residual directions; the smallest wins;
- ``left_out``: the class predicted for a sample from the client's other samples (leave-one-out);
- ``posterior`` (with ``relabelling: posterior``): the most probable class given features and observed label.  It
  weighs the features against the label already, so that where it speaks its margin alone is the strength, which goes
  before the number of criteria, and its class is the one proposed.

A criterion *contradicts* an observed label where its margin is above 0.  The order of the list is, first to last:
how many criteria contradict; the strength, which is the mean over the criteria of a margin's mid-rank among all of
the client's samples (0 to 1, so that criteria of different scale count alike); the share of relabelling checkpoints
at which both spectral criteria agreed on the proposed label; the sample id.  None of the three falls when a criterion
speaks more strongly against the label.  Strength goes before agreement because agreement is made of two of the
criteria again: on OCT with 40 % symmetric noise and frozen features the other order has fewer wrong labels among the
first twenty (0.85 to 0.90 against 0.95 to 1.00 at three clients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from medfed.report.audit_signals import CRITERIA, Evidence, check, signals, strength, without_reference


@dataclass(frozen=True)
class WorkList:
    """The list and what it was made from.

    Args:
        table: the listed samples, best first; see :func:`work_list`.
        classes: class names.
        observed: samples by observed class ``[C]``, listed or not.
        checkpoints: rounds of the relabelling checkpoints.
        criteria: the criteria that could speak.
        changed: samples whose training target differs from the observed label.
        without_reference: observed classes that have no reference, so that the spectral criteria cannot compare.
    """

    table: pd.DataFrame
    classes: tuple[str, ...]
    observed: np.ndarray
    checkpoints: tuple[int, ...]
    criteria: tuple[str, ...]
    changed: int
    without_reference: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def summary(self) -> list[tuple[str, list[int], int, int]]:
        """By observed class: name, listed samples by proposed class ``[C]``, samples not listed, samples."""
        number = {name: k for k, name in enumerate(self.classes)}
        counts = np.zeros((len(self.classes), len(self.classes)), np.int64)
        rows, columns = (self.table[c].map(number).to_numpy(np.int64) for c in ("observed", "proposed"))
        np.add.at(counts, (rows, columns), 1)
        rest = self.observed - counts.sum(axis=1)
        return list(zip(self.classes, counts.tolist(), rest.tolist(), self.observed.tolist()))

    def of_class(self, name: str) -> pd.DataFrame:
        """The rows of one observed class; ranks stay those of the whole list."""
        return self.table[self.table["observed"] == name]


def work_list(
    samples: Sequence[str],
    observed: np.ndarray,
    classes: Sequence[str],
    evidence: Evidence,
    files: Mapping[str, tuple[str, int]] | None = None,
) -> WorkList:
    """Lists the samples whose label at least one criterion contradicts, now or at an earlier checkpoint.

    Samples whose training target differs from the observed label are always listed.  The proposed label is the class
    that most criteria point to, then that of most checkpoints, then the training target.

    Args:
        samples: ids ``[N]``.
        observed: int64 ``[N]``.
        classes: class names.
        evidence: in the same order.
        files: path and frame by sample, to find the image.

    Returns:
        A list whose table has the columns ``rank`` (from 1), ``sample``, ``path``, ``frame``, ``observed``,
        ``training_target``, ``proposed``, ``contradicting`` (criteria), ``criteria`` (that could compare), label and
        margin of each criterion, ``checkpoints_proposing`` (the proposed label), ``checkpoints_other`` (another label
        than the observed one), ``checkpoints``, ``always_same``, ``strength``, ``reason``, and the scores
        ``S_R class`` and ``S_N class``.

    Raises:
        DataError: the evidence is of other samples or classes.
    """
    observed, classes = np.asarray(observed, np.int64), tuple(classes)
    count, size = len(samples), len(classes)
    check(evidence, count, size)
    found = signals(evidence, observed)
    points = np.stack([s.points for s in found.values()]) if found else np.zeros((0, count), np.int64)
    margins = np.stack([s.margin for s in found.values()]) if found else np.zeros((0, count))
    targets = observed if evidence.targets is None else evidence.targets
    proposals = evidence.proposals if len(evidence.proposals) else np.zeros((0, count), np.int64)
    contrary = np.where(proposals == observed, -1, proposals)
    decisive = "posterior" in found
    if decisive:
        points = np.concatenate([points, np.repeat(points[-1:], len(points), axis=0)])
    proposed = _proposed(points, contrary, targets, observed, size)
    contradicting = (margins > 0).sum(axis=0)
    same = ((contrary == proposed) & (proposed >= 0)).sum(axis=0)
    other = (contrary >= 0).sum(axis=0) - same
    listed = (contradicting > 0) | (targets != observed) | (same + other > 0)
    names = np.array([*classes, ""], dtype=object)  # -1 is the empty one
    ids = np.array([str(s) for s in samples], dtype=object)
    places = [(files or {}).get(s, ("", 0)) for s in ids]
    table = pd.DataFrame(
        {
            "sample": ids,
            "path": [str(p) for p, _ in places],
            "frame": [int(f) for _, f in places],
            "observed": names[observed],
            "training_target": names[targets],
            "proposed": names[proposed],
            "contradicting": contradicting,
            "criteria": np.isfinite(margins).sum(axis=0),
            **{f"{n}_{k}": v for n, s in found.items() for k, v in (("label", names[s.points]), ("margin", s.margin))},
            "checkpoints_proposing": same,
            "checkpoints_other": other,
            "checkpoints": len(proposals),
            "always_same": np.where(same + other == 0, "", np.where(other == 0, "yes", "no")),
            "strength": strength(margins[-1:] if decisive else margins),
        }
    )[listed]
    share = table["checkpoints_proposing"] / max(len(proposals), 1)
    order_by = ["strength", "contradicting"] if decisive else ["contradicting", "strength"]
    table = table.assign(share=share).sort_values(
        [*order_by, "share", "sample"], ascending=[False, False, False, True], kind="stable"
    )
    order = table.index.to_numpy()
    table = table.drop(columns="share").reset_index(drop=True)
    table.insert(0, "rank", np.arange(1, len(table) + 1))
    bare = without_reference(evidence, observed, size)
    table["reason"] = [reason(row, {classes[c] for c in bare}) for row in table.to_dict("records")]
    scores = {
        f"{name} {c}": values[order, k]
        for name, values in (("S_R", evidence.representative), ("S_N", evidence.residual))
        if values is not None
        for k, c in enumerate(classes)
    }
    return WorkList(
        table=pd.concat([table, pd.DataFrame(scores, index=table.index)], axis=1),
        classes=classes,
        observed=np.bincount(observed, minlength=size),
        checkpoints=evidence.rounds,
        criteria=tuple(found),
        changed=int((targets != observed).sum()),
        without_reference=tuple(classes[c] for c in bare),
    )


def reason(row: Mapping[str, Any], without_reference: set[str] | frozenset[str] = frozenset()) -> str:
    """Why a sample is listed, in plain language.

    Args:
        row: a row of the table.
        without_reference: classes that the spectral criteria cannot compare.
    """
    observed, parts = row["observed"], []
    against: dict[str, list[str]] = {}
    confirms: list[str] = []
    silent: list[str] = []
    for name, words in CRITERIA.items():
        if f"{name}_margin" not in row:
            continue
        margin = row[f"{name}_margin"]
        if margin > 0:
            against.setdefault(row[f"{name}_label"], []).append(words)
        else:
            (confirms if np.isfinite(margin) else silent).append(words)
    parts += [f"{_listing(who)} {_verb('point', who)} to {what}, not {observed}" for what, who in against.items()]
    if confirms:
        parts.append(f"{_listing(confirms)} {_verb('confirm', confirms)} {observed}")
    if observed in without_reference:
        parts.append(f"there is no reference for {observed}, so the spectral criteria cannot compare")
    elif silent:
        parts.append(f"{_listing(silent)} cannot compare")
    if row["checkpoints"]:
        parts.append(_checkpoints(row))
    target = row["training_target"]
    parts.append(f"training {'still uses' if target == observed else 'now uses'} {target}")
    return _sentence("; ".join(parts))


def _checkpoints(row: Mapping[str, Any]) -> str:
    same, other, total = row["checkpoints_proposing"], row["checkpoints_other"], row["checkpoints"]
    spectral = "representative_margin" in row and "posterior_margin" not in row
    who = "the two spectral criteria agreed on" if spectral else "relabelling proposed"
    of = f"of {total} checkpoint{'' if total == 1 else 's'}"
    if not same + other:
        return f"{who} another label at none {of}"
    said = f"{who} {row['proposed']} at {same} {of}"
    return f"{said}, on yet another label at {other}" if other else said


def _proposed(
    points: np.ndarray, contrary: np.ndarray, targets: np.ndarray, observed: np.ndarray, size: int
) -> np.ndarray:
    """The class other than the observed one with most criteria, then checkpoints, then as target; -1 without any."""
    classes = np.arange(size)[:, None, None]
    support, times = (points == classes).sum(axis=1), (contrary == classes).sum(axis=1)  # [C, N]
    key = support * (len(contrary) + 1) + times
    # The last criterion decides what is still open: the leave-one-out prediction where there is one.
    last = (points[-1] == classes[:, 0]) if len(points) else np.zeros_like(key, bool)
    key = (key * 2 + (targets == classes[:, 0])) * 2 + last
    key[observed, np.arange(len(observed))] = 0
    return np.where(key.max(axis=0, initial=0) > 0, key.argmax(axis=0), -1)


def _listing(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _verb(verb: str, who: Sequence[str]) -> str:
    plural = len(who) > 1 or who[0].endswith("directions")
    return verb if plural else f"{verb}s"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."

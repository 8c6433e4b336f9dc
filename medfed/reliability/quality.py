"""How good a judgement of clients, and a correction of labels, was: measured against the truth, in simulation.

The definitions are those of OCT-FedSIR (2026), section "Evaluation". Every ratio comes with the counts it is made
of, so that ratios of several clients, rounds or runs are pooled by adding counts, never by averaging ratios.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

Numbers = dict[str, float | int | None]

REASONS = {
    "accuracy": "no client was judged",
    "clean_precision": "no client was judged clean",
    "clean_recall": "no client is clean",
    "clean_f1": "no client is clean, nor was one judged clean",
    "noisy_precision": "no client was judged noisy",
    "noisy_recall": "no client is noisy",
    "noisy_f1": "no client is noisy, nor was one judged noisy",
    "edit_rate": "there is no sample",
    "recovery": "no observed label is wrong",
    "correction_precision": "no label was edited",
    "false_correction_rate": "no observed label is right",
    "residual_noise": "there is no sample",
    "noise_rate": "there is no sample",
}
"""Why a ratio is not defined, by name."""

COUNTED = ("samples", "mislabelled", "edited", "recovered", "false_edits", "remaining")


def identification_quality(status: Mapping[str, str], noisy: Collection[str]) -> Numbers:
    """How well clients with wrong labels were told from the others.

    A client that is ``undetermined`` counts as judged noisy, since methods treat it so: its labels are not relied on.
    How many these are is in ``undetermined``; ``accused`` leaves them out.

    Args:
        status: by client ``clean``, ``noisy`` or ``undetermined``; who has no status is not counted at all.
        noisy: the clients that do have wrong labels.

    Returns:
        ``accuracy``, and ``precision``, ``recall`` and ``f1`` of ``clean_`` and ``noisy_``; None where not defined
        (:data:`REASONS`). The counts ``clients``, ``clean``, ``noisy`` (in truth), ``judged_clean``, ``judged_noisy``
        (without the undetermined), ``undetermined``, ``accused`` (clean, judged noisy) and ``missed`` (noisy, judged
        clean).
    """
    wrong = {name: name in noisy for name in status}
    trusted = {name: given == "clean" for name, given in status.items()}
    both_clean = sum(trusted[n] and not wrong[n] for n in status)
    both_noisy = sum(wrong[n] and not trusted[n] for n in status)
    is_noisy, is_trusted = sum(wrong.values()), sum(trusted.values())
    clients = len(status)
    return {
        "accuracy": _ratio(both_clean + both_noisy, clients),
        "clean_precision": _ratio(both_clean, is_trusted),
        "clean_recall": _ratio(both_clean, clients - is_noisy),
        "clean_f1": _ratio(2 * both_clean, is_trusted + clients - is_noisy),
        "noisy_precision": _ratio(both_noisy, clients - is_trusted),
        "noisy_recall": _ratio(both_noisy, is_noisy),
        "noisy_f1": _ratio(2 * both_noisy, clients - is_trusted + is_noisy),
        "clients": clients,
        "clean": clients - is_noisy,
        "noisy": is_noisy,
        "judged_clean": is_trusted,
        "judged_noisy": sum(s == "noisy" for s in status.values()),
        "undetermined": sum(s == "undetermined" for s in status.values()),
        "accused": sum(s == "noisy" and not wrong[n] for n, s in status.items()),
        "missed": is_noisy - both_noisy,
    }


def relabelling_quality(true: np.ndarray, observed: np.ndarray, current: np.ndarray) -> Numbers:
    """How well labels were corrected.

    The ratios obey ``edit_rate * correction_precision = noise_rate * recovery`` and ``residual_noise =
    noise_rate * (1 - recovery) + (1 - noise_rate) * false_correction_rate``.

    Args:
        true: true classes ``[N]``.
        observed: the labels as the client got them ``[N]``.
        current: the labels trained on now ``[N]``.

    Returns:
        Of all samples: ``edit_rate``, ``noise_rate`` (wrong at first), ``residual_noise`` (wrong now); of the wrong
        ones: ``recovery`` (right now); of the edited ones: ``correction_precision`` (right now); of the right ones:
        ``false_correction_rate`` (wrong now). None where not defined (:data:`REASONS`). The counts ``samples``,
        ``mislabelled``, ``edited``, ``recovered``, ``false_edits`` (right at first, wrong now) and ``remaining``
        (wrong now).

    Raises:
        ValueError: several labels a sample, or arrays of different length.
    """
    true, observed, current = np.asarray(true), np.asarray(observed), np.asarray(current)
    if not true.ndim == observed.ndim == current.ndim == 1:
        raise ValueError("relabelling is measured with one label a sample")
    if not len(true) == len(observed) == len(current):
        raise ValueError(f"{len(true)} true, {len(observed)} observed and {len(current)} current labels")
    right, now = observed == true, current == true
    counts = (len(true), ~right, current != observed, ~right & now, right & ~now, ~now)
    return _relabelling({k: int(np.sum(v)) for k, v in zip(COUNTED, counts)})


def pooled(parts: Iterable[Mapping[str, float | int | None]]) -> Numbers:
    """The relabelling quality of several clients together, from their counts."""
    parts = list(parts)
    return _relabelling({name: sum(int(part[name] or 0) for part in parts) for name in COUNTED})


def undefined(values: Mapping[str, object]) -> dict[str, str]:
    """Why a ratio is None, by its name."""
    return {name: REASONS[name] for name, value in values.items() if value is None and name in REASONS}


def _relabelling(n: Mapping[str, int]) -> Numbers:
    return {
        "edit_rate": _ratio(n["edited"], n["samples"]),
        "recovery": _ratio(n["recovered"], n["mislabelled"]),
        "correction_precision": _ratio(n["recovered"], n["edited"]),
        "false_correction_rate": _ratio(n["false_edits"], n["samples"] - n["mislabelled"]),
        "residual_noise": _ratio(n["remaining"], n["samples"]),
        "noise_rate": _ratio(n["mislabelled"], n["samples"]),
        **n,
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

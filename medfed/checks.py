"""What is refused, and what a person is told, before a run starts."""

from __future__ import annotations

from medfed.config import Experiment
from medfed.data.cohort import Cohort
from medfed.data.condition import Condition
from medfed.data.splits import straddling_patients
from medfed.errors import ConfigError, DataError
from medfed.federation.method import Method, MethodSettings
from medfed.methods.registry import resolve_method


def check_method(experiment: Experiment, method: Method, kind: str | None = None) -> None:
    """Refuses a method that an experiment does not admit.

    Args:
        experiment: the validated experiment.
        method: its method.
        kind: kind of the labels; None where it is not known yet.
    """
    if kind is not None and kind not in method.task_kinds:
        raise ConfigError(
            f"{method.name} does not admit {kind} labels.",
            where="method",
            fix="Use a multiclass reading of the labels, or another method.",
        )
    if (method.public or method.personal) and experiment.engine.kind == "nvflare":
        raise ConfigError(
            f"{method.name} runs on the local engine alone.", where="engine.kind", fix="Set engine.kind to local."
        )
    if method.public and experiment.condition.public is None:
        raise ConfigError(
            f"{method.name} needs public images.",
            where="condition.public",
            fix="Set some apart for all methods of the comparison, e.g. with condition.public: {fraction: 0.1}.",
        )


def advice(experiment: Experiment, settings: MethodSettings) -> list[str]:
    """What a person is told of a method's settings, and of what the engine does to them.

    Args:
        experiment: the validated experiment.
        settings: the settings of its method.
    """
    found = settings.check(experiment.rounds)
    if experiment.engine.amp and getattr(settings, "salt", None) is not None:
        found.append(
            "engine.amp rounds the weights of every pass to 8 (CPU) or 11 (CUDA) bits, and with them the small steps "
            "of sharpness-aware training (method.salt): they are partly lost and partly noise; prefer engine.amp: false"
        )
    method, _ = resolve_method(experiment.method)
    clients, part = len(experiment.condition.partition.client_names()), experiment.participation
    if method.together and (part.fraction < 1 or part.dropout > 0):
        found.append(
            f"{method.name} is made for all clients in every round, and participation.fraction or "
            "participation.dropout leaves some out: what it learns of a client is then older than the round"
        )
    if 0 < clients < method.together:
        found.append(f"{method.name} needs {method.together} clients: with {clients} it has nothing to compare")
    return found


def check_parts(train: Cohort, test: Cohort) -> None:
    """Refuses a cohort from which nothing can be learnt, or on which nothing can be measured."""
    for part, name in ((train, "train"), (test, "test")):
        if not len(part):
            raise DataError(
                f"no usable sample is in the {name} split.",
                where="cohort",
                fix="Check the split column or folders; without any split a test part is drawn.",
            )
    if train.task.kind == "multiclass" and (train.class_counts() > 0).sum() < 2:
        present = train.task.classes[int(train.class_counts().argmax())]
        raise DataError(
            f"the training samples are all of one class ({present!r}), so that nothing can be learnt.",
            where="cohort",
            fix="Check the labels with `medfed inspect`.",
        )


def check_condition(experiment: Experiment, condition: Condition) -> None:
    """Refuses what cannot be trained on, before anything starts."""
    truth = condition.truth
    empty = [c for c in condition.clients if not (truth.clients == c).any()]
    if empty:
        raise DataError(
            f"{len(empty)} clients have no training sample, first '{empty[0]}'.",
            where="condition",
            fix="Leave their rows out, or check the split column.",
        )
    check_clients(experiment, len(condition.clients))


def check_clients(experiment: Experiment, clients: int) -> None:
    """Refuses what so many clients cannot be asked for."""
    if experiment.condition.partition.corrupted and experiment.condition.corruption is None:
        raise ConfigError(
            "clients are to be corrupted, but no corruption is given.",
            where="condition.corruption",
            fix="Add e.g. corruption: {kind: gaussian_noise, severity: 3}.",
        )
    quorum = experiment.participation.quorum
    asked = max(1, int(experiment.participation.fraction * clients + 0.5))
    if quorum > asked:
        raise ConfigError(
            f"a quorum of {quorum} can never be reached: {asked} of {clients} clients are asked in a round.",
            where="participation.quorum",
            fix="Lower the quorum or raise the fraction.",
        )


def cautions(cohort: Cohort, rows: dict[str, int]) -> list[str]:
    """What is odd about patients, pictures and names; ``rows`` are equal where pictures are identical."""
    found = []
    straddling = straddling_patients(cohort)
    if len(straddling):
        found.append(f"{len(straddling)} patients are on more than one side of the split")
    if alone := int((cohort.table["patient"] == cohort.table["sample"]).sum()):
        found.append(
            f"{alone} of {len(cohort)} samples name no patient and count as one each: "
            "images of one person may be on both sides of the split"
        )
    unused = int(cohort.table["split"].eq("val").sum())
    if unused:
        found.append(f"{unused} validation samples are used neither for training nor for testing")
    sides: dict[int, set[str]] = {}
    labels: dict[int, set[str]] = {}
    for sample, split, label in zip(cohort.table["sample"], cohort.table["split"], cohort.labels.tolist()):
        sides.setdefault(rows[sample], set()).add(split)
        labels.setdefault(rows[sample], set()).add(str(label))
    if both := sum({"train", "test"} <= s for s in sides.values()):
        found.append(f"{both} identical pictures are in both training and test set")
    if torn := sum(len(s) > 1 for s in labels.values()):
        found.append(f"{torn} identical pictures carry different labels")
    spellings: dict[str, set[str]] = {}
    for client in cohort.table["client"].unique():
        spellings.setdefault("".join(client.casefold().split()), set()).add(client)
    if wrapped := cohort.findings.corrections.get("rsna_12bit_wrap_suspected"):
        found.append(
            f"{wrapped} CT slices may have wrapped at 12 bits: look at them with `medfed inspect`, and consider "
            "'load::fix_12bit_wrap: true' under overrides"
        )
    found += [
        f"clients {' and '.join(map(repr, sorted(s)))} differ in capitals or blanks alone"
        for s in spellings.values()
        if len(s) > 1
    ]
    return found

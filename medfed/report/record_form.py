"""The form of what a run wrote down, as far as reports rely on it: everything that they read has been checked by this.

Numbers among metrics and among what clients report may be anything: what is no number counts as not recorded
(:func:`medfed.report.runs.quantity`). Only what is counted over clients, samples and edited targets, must be numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Optional

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

Number = Optional[FiniteFloat]  # noqa: UP045
Object = Optional[dict[str, Any]]  # noqa: UP045
Objects = Optional[dict[str, Object]]  # noqa: UP045
Names = Optional[list[str]]  # noqa: UP045
Text = Optional[str]  # noqa: UP045

MOST_ROUNDS = 1_000_000


class Form(BaseModel):
    """Further keys may hold anything; a key may be absent."""

    model_config = ConfigDict(strict=True)


class Client(Form):
    """What a client reported, as far as it is counted."""

    samples: Number = None
    edited: Number = None


class Shares(Form):
    """The shares of a relabelling; see :data:`medfed.report.reliability.RELABELLING`."""

    edit_rate: Number = None
    recovery: Number = None
    correction_precision: Number = None
    false_correction_rate: Number = None
    residual_noise: Number = None
    noise_rate: Number = None


class Relabelling(Shares):
    """How right corrected labels are, pooled and by client."""

    edited: Number = None
    clients: Optional[dict[str, Optional[Shares]]] = None  # noqa: UP045


class Identification(Form):
    """How right verdicts are."""

    clients: Objects = None


class Evaluation(Form):
    """The global model on the test sets."""

    clean: Object = None
    corrupted: Object = None
    clients: Objects = None
    identification: Optional[Identification] = None  # noqa: UP045
    relabelling: Optional[Relabelling] = None  # noqa: UP045


class RoundRecord(Form):
    """A line of ``records.jsonl``."""

    round: Annotated[int, Field(ge=1, le=MOST_ROUNDS)]
    seconds: Object = None
    asked: Names = None
    admitted: Names = None
    refused: Optional[list[dict[str, Any]]] = None  # noqa: UP045
    bytes: Object = None
    server: Object = None
    clients: Optional[dict[str, Optional[Client]]] = None  # noqa: UP045
    evaluation: Optional[Evaluation] = None  # noqa: UP045
    undefined: Object = None
    warnings: Optional[list[Any]] = None  # noqa: UP045


class RunFacts(Form):
    """``run.json``."""

    seed: Optional[int] = None  # noqa: UP045
    rounds: Number = None
    classes: Names = None
    clients: Names = None
    method_settings: Object = None
    condition_hash: Text = None
    partition_hash: Text = None
    initial_model_hash: Text = None
    data_hash: Text = None
    warnings: Optional[list[Any]] = None  # noqa: UP045


_KINDS = {"dict_type": "an object", "model_type": "an object", "list_type": "a list", "string_type": "text"}


def fault(form: type[Form], value: Any) -> str:
    """What is wrong with the form of a value, e.g. ``clients/ward_3 is not an object``; empty where nothing is."""
    try:
        form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = "/".join(map(str, first["loc"])) or "it"
        if first["type"] == "missing":
            return f"{where} is missing"
        if where == "round":
            return f"round is not a whole number from 1 to {MOST_ROUNDS}"
        return f"{where} is not {_KINDS.get(first['type'], 'a number')}"
    return ""

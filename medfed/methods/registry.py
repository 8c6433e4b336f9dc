"""Which methods there are, and where."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from medfed.errors import ConfigError, nearest
from medfed.federation.method import Method, MethodSettings

METHODS: dict[str, str] = {
    "fedavg": "medfed.methods.fedavg:METHOD",
    "fedprox": "medfed.methods.fedprox:METHOD",
    "agnostic_fl": "medfed.methods.agnostic_fl:METHOD",
    "q_fedavg": "medfed.methods.q_fedavg:METHOD",
    "fairfed": "medfed.methods.fairfed:METHOD",
    "fedce": "medfed.methods.fedce:METHOD",
    "fedga": "medfed.methods.fedga:METHOD",
    "fedism": "medfed.methods.fedism:METHOD",
    "fedism_plus": "medfed.methods.fedism:PLUS",
    "fednoro": "medfed.methods.fednoro:METHOD",
    "fedlsr": "medfed.methods.fedlsr:METHOD",
    "fedelc": "medfed.methods.fedelc:METHOD",
    "fedcorr": "medfed.methods.fedcorr:METHOD",
    "rofl": "medfed.methods.rofl:METHOD",
    "rhfl": "medfed.methods.rhfl:METHOD",
    "fedned": "medfed.methods.fedned:METHOD",
    "fedsir": "medfed.methods.fedsir:METHOD",
    "oct_fedsir": "medfed.methods.oct_fedsir:METHOD",
    "pruning": "medfed.methods.pruning:METHOD",
    "fedmerit": "medfed.methods.fedmerit:METHOD",
}


def get_method(name: str) -> Method:
    """The method of a name.

    Raises:
        ConfigError: there is no such method; names the nearest one.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method '{name}'.", where="method.name", fix=nearest(name, METHODS))
    module, attribute = METHODS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def resolve_method(section: Mapping[str, Any]) -> tuple[Method, MethodSettings]:
    """A method and its validated settings from the ``method`` section of an experiment.

    Raises:
        ConfigError: unknown method, unknown or bad settings.
    """
    from medfed.config import explain

    method = get_method(section["name"])
    given = {k: v for k, v in section.items() if k != "name"}
    try:
        return method, method.settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n  ".join(explain(error, method.settings)), where=f"method {method.name}") from None

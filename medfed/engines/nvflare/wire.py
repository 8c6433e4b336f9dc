"""Messages as bytes: safetensors with a JSON header, in one field. NVFlare sees bytes and text; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from medfed.errors import FederationError
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal, check_plain
from medfed.federation.state import unshared

SCHEMA = 1
TASK = "medfed"  # the one task that NVFlare knows; which task of the method is meant stands in the header
BODY, OWN = "medfed", "own"  # keys of NVFlare's Shareable
MEGABYTE = 1 << 20


class WireError(FederationError):
    """Bytes that are no message of this schema, or too many of them."""


def pack(message: Message, **header: Any) -> bytes:
    """A message as bytes.

    Args:
        message: tensors on any device, and plain values. NaN is allowed: it is refused at the door, with a reason.
        **header: plain values that say what the message is.
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in message.tensors.items()}
    head = {"schema": SCHEMA, **header, "values": dict(message.values), "names": list(tensors)}
    return save(unshared(tensors), metadata={"medfed": json.dumps(head)})


def unpack(data: Any, limit: int | None = None) -> tuple[dict[str, Any], Message]:
    """The header and the message of :func:`pack`.

    Args:
        data: what came.
        limit: most bytes that are accepted.

    Raises:
        WireError: not bytes, too many, damaged, or of another schema.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise WireError(f"no message: {type(data).__name__} instead of bytes")
    if limit is not None and len(data) > limit:
        raise WireError(too_large("a message", len(data), limit))
    data = bytes(data)
    header = _header(data)
    if header.get("schema") != SCHEMA:
        raise WireError(f"a message of schema {header.get('schema')!r}, not {SCHEMA}: the versions of medfed differ")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        raise WireError("no message: its tensors are damaged") from None
    values, names = header.pop("values", None), header.pop("names", None)
    if not isinstance(values, dict) or not isinstance(names, list) or sorted(map(str, names)) != sorted(tensors):
        raise WireError("no message: its header does not describe its content")
    return header, Message({name: tensors[name] for name in names}, values)


def too_large(what: str, size: int, limit: int) -> str:
    """Says how much too large something is."""
    return f"{what} of {_size(size)} is larger than the agreed {_size(limit)}"


def _size(count: int) -> str:
    return f"{count} bytes" if count < MEGABYTE // 10 else f"{count / MEGABYTE:.4g} MB"


def pack_request(request: Request, run: str) -> bytes:
    """A request without what is meant for one client alone (see :func:`own_values`): the same bytes for everybody."""
    return pack(
        request.message,
        kind="request",
        run=run,
        task=request.task,
        round=request.round,
        step=request.step,
        confirmed=request.confirmed,
    )


def own_values(request: Request, client: str) -> str:
    """The values for one client alone, as JSON."""
    return json.dumps(dict(request.each.get(client, {})))


def read_request(data: Any, own: Any, client: str, run: str, limit: int | None) -> Request:
    """A request as a client reads it.

    Args:
        data: the request.
        own: the values for this client alone.
        client: this client.
        run: the run that this client takes part in.
        limit: most bytes that are accepted.

    Raises:
        WireError: it is none, or not of this run.
    """
    header, message = unpack(data, limit)
    texts, numbers = ("run", "task"), ("round", "step", "confirmed")
    whole = all(type(header.get(k)) is int for k in numbers) and all(isinstance(header.get(k), str) for k in texts)
    if header.get("kind") != "request" or not whole:
        raise WireError("no request")
    if header["run"] != run:
        raise WireError("the request belongs to another run")
    try:
        values = json.loads(own)
        check_plain(values)
    except (TypeError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise WireError("the values for this client are no mapping of names to plain values")
    return Request(header["task"], header["round"], header["step"], header["confirmed"], message, {client: values})


def pack_answer(answer: Message | Refusal, client: str, request: Mapping[str, Any]) -> bytes:
    """A reply or a refusal as bytes.

    Args:
        answer: the client's.
        client: who answers.
        request: run, task, round and step of what is answered, as far as they are known.
    """
    facts = {k: request.get(k) for k in ("run", "task", "round", "step")}
    if isinstance(answer, Refusal):
        return pack(Message(), kind="refusal", client=client, reason=answer.reason, **facts)
    return pack(answer, kind="reply", client=client, **facts)


def read_answer(data: Any, client: str, run: str, step: int, limit: int | None) -> Message | Refusal:
    """An answer as a server reads it; what is no proper one is the client's refusal, with the reason.

    Args:
        data: what came.
        client: who sent it, as NVFlare has authenticated it.
        run: this run.
        step: the request that it must answer.
        limit: most bytes that are accepted.
    """
    try:
        header, message = unpack(data, limit)
    except WireError as error:
        return Refusal(client, f"sent {error.what}")
    kind = header.get("kind")
    if header.get("client") != client or header.get("run") != run:
        return Refusal(client, "sent an answer of another client or run")
    if kind == "refusal":
        return Refusal(client, str(header.get("reason")))
    if kind != "reply" or header.get("step") != step:
        return Refusal(client, "sent no answer to this request")
    return message


def _header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["medfed"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WireError("no message: it has no header of medfed") from None
    if not isinstance(header, dict):
        raise WireError("no message: it has no header of medfed")
    return header

"""A site's side: reads requests, runs the client's task, writes the ledger, answers. Knows nothing of NVFlare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from medfed.engines.nvflare.wire import TASK, WireError, pack_answer, read_request, too_large
from medfed.errors import MedfedError
from medfed.federation.messages import Message, Refusal

if TYPE_CHECKING:
    from medfed.engines.host import ClientHost
    from medfed.federation.client import Request
    from medfed.ledger import Ledger


class Desk:
    """Answers every request of one client, with a reply or with a refusal that says why; never raises.

    Args:
        client: the client's name.
        run: the run that it takes part in.
        make_host: builds the client, on the first request.
        limit: most bytes of a message.
        ledger: where everything that leaves is written down first; None keeps none.
        log: told what went wrong, in words that stay at the site.
    """

    def __init__(
        self,
        client: str,
        run: str,
        make_host: Callable[[], ClientHost],
        limit: int,
        ledger: Ledger | None,
        log: Callable[[str], object] = lambda _: None,
    ):
        self._client, self._run, self._make_host = client, run, make_host
        self._limit, self._ledger, self._log = limit, ledger, log
        self._host: ClientHost | None = None

    def answer(self, task: str, data: Any, own: Any) -> bytes:
        """The answer to one task of NVFlare, as bytes.

        Args:
            task: NVFlare's name of the task.
            data: the request.
            own: values for this client alone, as JSON.
        """
        request: Request | None = None
        answer: Message | Refusal
        try:
            if task != TASK:
                raise WireError(f"knows no task '{task}' of NVFlare")
            request = read_request(data, own, self._client, self._run, self._limit)
            answer = self._serve(request)
        except WireError as error:
            answer = Refusal(self._client, f"refused: {error.what}")
        except Exception as error:
            answer = self._failed(error)
        return self._send(answer, request)

    def _failed(self, error: Exception) -> Refusal:
        if isinstance(error, MedfedError):  # the site is not what was agreed on; where and how is for its own eyes
            self._tell(str(error))
            return Refusal(self._client, f"cannot take part: {error.what}")
        self._tell(f"{type(error).__name__}: {error}")
        return Refusal(self._client, f"failed with {type(error).__name__}")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk takes no words either
            self._log(text)

    def _serve(self, request: Request) -> Message | Refusal:
        if self._host is None:
            self._host = self._make_host()
        return self._host.serve(self._client, request)

    def _send(self, answer: Message | Refusal, request: Request | None) -> bytes:
        facts: dict[str, Any] = {"run": self._run}
        if request is not None:
            facts |= {"task": request.task, "round": request.round, "step": request.step}
        try:
            data = pack_answer(answer, self._client, facts)
        except Exception as error:  # a type of number that safetensors does not know, say
            self._tell(f"{type(error).__name__}: {error}")
            answer = Refusal(self._client, f"its reply cannot be sent ({type(error).__name__})")
            data = pack_answer(answer, self._client, facts)
        if len(data) > self._limit and isinstance(answer, Message):
            answer = Refusal(self._client, too_large("its reply", len(data), self._limit))
            data = pack_answer(answer, self._client, facts)
        try:
            self._record(answer, data, facts)
        except Exception as error:
            answer = self._failed(error)
            data = pack_answer(answer, self._client, facts)
            with contextlib.suppress(Exception):  # unrecorded then, it tells nothing of the client's data
                self._record(answer, data, facts)
        return data

    def _record(self, answer: Message | Refusal, data: bytes, facts: dict[str, Any]) -> None:
        if self._ledger is None:
            return
        told = {"kind": "refusal", "reason": answer.reason} if isinstance(answer, Refusal) else {"kind": "reply"}
        known = {k: v for k, v in facts.items() if k != "run"}
        content = answer if isinstance(answer, Message) else None
        self._ledger.append(data, content, direction="sent", client=self._client, **known, **told)

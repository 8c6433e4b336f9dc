"""What a method is: a server program and a set of client tasks.

The program is plain sequential code, a generator over a ``server`` that yields once a round. A task is a function of
(client, message) that returns a message. Both halves of a method stand in one file under :mod:`medfed.methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from medfed.federation.messages import Message

if TYPE_CHECKING:
    from medfed.federation.client import Client
    from medfed.federation.server import RoundReport, Server

ClientTask = Callable[["Client", Message], Message]
Program = Callable[["Server", Any], Iterator["RoundReport"]]


class MethodSettings(BaseModel):
    """Base of a method's settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def depends_on_rounds(self) -> bool:
        """Whether what happens in a round depends on how many rounds there are in all."""
        return False

    def check(self, rounds: int) -> list[str]:
        """What a person should know of these settings before a run of so many rounds; asked before anything slow.

        Args:
            rounds: of the run.

        Raises:
            ConfigError: they cannot work in so many rounds.
        """
        return []

    def idle(self, names: Collection[str], when: str) -> list[str]:
        """A caution that settings which were given have no effect; none where none of them was.

        Args:
            names: the settings.
            when: under which other setting that is so.
        """
        given = [name for name in type(self).model_fields if name in names and name in self.model_fields_set]
        return [f"no effect with method.{when}: {', '.join(f'method.{name}' for name in given)}"] if given else []


@dataclass(frozen=True)
class Method:
    """One method.

    Args:
        name: as written in an experiment file.
        title: one line for ``medfed methods``.
        paper: where it was published.
        program: the server's half.
        tasks: the clients' half, by task name.
        settings: class of the method's settings.
        sends: what a client sends besides its model.
        keeps: what a client keeps between rounds.
        needs: what the method needs beyond labelled images.
        task_kinds: kinds of labels that it admits.
        public: whether it needs public unlabelled images (``condition.public``), which every client then has as
            ``client.public`` and the server as ``server.public``.
        personal: whether every client has a model of its own and there is no global one. Clients keep theirs in their
            memories under ``model/``, and these are evaluated.
        together: fewest clients of a method that needs all of them in every round; 0 where any part of them will do.
    """

    name: str
    title: str
    paper: str
    program: Program
    tasks: Mapping[str, ClientTask]
    settings: type[MethodSettings] = MethodSettings
    sends: str = "-"
    keeps: str = "-"
    needs: str = "-"
    task_kinds: tuple[str, ...] = field(default=("multiclass", "multilabel"))
    public: bool = False
    personal: bool = False
    together: int = 0

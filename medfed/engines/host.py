"""Serves requests for the clients that live in this process: the client half of every engine."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from medfed.data.cohort import Task
from medfed.errors import MedfedError
from medfed.federation.client import Client, Request
from medfed.federation.memory import ClientMemory, client_folder
from medfed.federation.messages import Message, Refusal, check_plain, check_tensors
from medfed.federation.method import ClientTask

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.local import LocalTrainer


class ClientHost:
    """Builds clients by name and runs tasks on them.

    Args:
        clients: names of the clients that live here.
        tasks: the method's client tasks.
        task: classes and kind of labels.
        data: gives a client's images and observed labels.
        trainer: the trainer that the clients share one after another.
        folder: where client memories and error logs are kept, one folder a client; None keeps nothing.
        seed: seed of the run.
        public: images that everybody may see, without labels; None where there are none.
    """

    def __init__(
        self,
        clients: tuple[str, ...],
        tasks: Mapping[str, ClientTask],
        task: Task,
        data: Callable[[str], ArrayDataset],
        trainer: LocalTrainer,
        folder: Path | None,
        seed: int,
        public: ArrayDataset | None = None,
    ):
        self.clients = clients
        self._tasks, self._task, self._data, self._trainer = tasks, task, data, trainer
        self._folder, self._seed, self._public = folder, seed, public
        self._built: dict[str, Client] = {}

    def client(self, name: str) -> Client:
        """The client of a name, built on first use."""
        if name not in self._built:
            memory = ClientMemory(self._folder / client_folder(name) if self._folder else None)
            data = self._data(name)
            self._built[name] = Client(name, data, self._trainer, self._task, memory, self._seed, self._public)
        return self._built[name]

    def serve(self, name: str, request: Request) -> Message | Refusal:
        """Runs one task of one client.

        A failure is that client's refusal. Its traceback stays at the client, in ``errors.log``; the reason that
        leaves it names the kind of error and, for medfed's own errors, what was wrong, but no file.
        """
        try:
            client = self.client(name)
            client.round = request.round
            client.memory.open(request.step, request.confirmed)
            answer = self._tasks[request.task](client, request.message_for(name))
            if not isinstance(answer, Message):
                raise TypeError(f"task '{request.task}' returned {type(answer).__name__}, not a Message")
            check_plain(dict(answer.values))
            check_tensors(answer.tensors)
            client.memory.save(request.step)
            return answer
        except KeyError as error:
            if error.args == (request.task,) and request.task not in self._tasks:
                return Refusal(name, f"knows no task '{request.task}'")
            return self._failed(name, request, error)
        except Exception as error:
            return self._failed(name, request, error)

    def _failed(self, name: str, request: Request, error: Exception) -> Refusal:
        if self._folder is not None:
            folder = self._folder / client_folder(name)
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "errors.log", "a", encoding="utf-8") as log:
                log.write(f"round {request.round}, task {request.task}\n{traceback.format_exc()}\n")
        told = f": {error.what}" if isinstance(error, MedfedError) else ""
        return Refusal(name, f"failed with {type(error).__name__}{told}")

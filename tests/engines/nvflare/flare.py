"""NVFlare without its network: its real task management and serialisation, and threads in place of sites."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "federation"))

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.utils import fobs
from toy import TASK, TASKS, ToyData, make_server

from medfed.engines.host import ClientHost
from medfed.engines.nvflare.controller import MedfedController, NVFlarePost
from medfed.engines.nvflare.engine import NVFlareEngine
from medfed.engines.nvflare.executor import MedfedExecutor
from medfed.engines.nvflare.site import Desk
from medfed.federation.memory import client_folder
from medfed.federation.server import Server
from medfed.ledger import LEDGER, Ledger

flare_decomposers.register()
LIMIT = 1 << 20
RUN = "run-1"


class FakeEngine:
    """What NVFlare's task management asks of the server's process."""

    def __init__(self, sites: list[str]):
        self.sites = sites
        self._contexts = FLContextManager(
            engine=self, identity_name="server", job_id="job", public_stickers={}, private_stickers={}
        )

    def new_context(self) -> FLContext:
        return self._contexts.new_context()

    def get_clients(self) -> list[Client]:
        return [Client(name, f"token-{name}") for name in self.sites]

    def fire_event(self, *_: Any, **__: Any) -> None:
        """Nobody listens."""


class Site(threading.Thread):
    """A site: asks for tasks, lets its executor work, hands in what it says.

    Args:
        flare: the server's side.
        name: the site's name.
        executor: does the work.
        delay: seconds before each answer.
        tamper: changes a result on its way; may return None to stay silent.
    """

    def __init__(self, flare: Flare, name: str, executor: Any, delay: float = 0.0, tamper: Any = None):
        super().__init__(daemon=True)
        self.flare, self.site, self.executor, self.delay, self.tamper = flare, name, executor, delay, tamper
        self.sent: list[bytes] = []
        self.over = False

    def run(self) -> None:
        while not self.over:
            if not self.turn():
                time.sleep(0.01)

    def turn(self) -> bool:
        client, engine = Client(self.site, f"token-{self.site}"), self.flare.engine
        with engine.new_context() as context:
            task, number, data = self.flare.communicator.process_task_request(client, context)
            if not task:
                return False
            # As NVFlare's ServerRunner does before it hands a task out.
            context.set_prop(FLContextKey.TASK_ID, number, private=True, sticky=False)
            context.set_prop(FLContextKey.TASK_DATA, data, private=True, sticky=False)
            self.flare.controller.handle_event(EventType.BEFORE_TASK_DATA_FILTER, context)
        request = fobs.loads(fobs.dumps(data))
        try:
            with self.flare.turns:
                reply = self.executor.execute(task, request, SimpleNamespace(), Signal())
        except Exception:
            reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        if self.tamper is not None:
            reply = self.tamper(reply)
        time.sleep(self.delay)
        if reply is None:
            return True
        if isinstance(reply.get("medfed"), bytes):
            self.sent.append(reply["medfed"])
        arrived = fobs.loads(fobs.dumps(reply))
        with engine.new_context() as context:
            self.flare.communicator.process_submission(client, task, number, arrived, context)
        return True


class Flare:
    """A federation of toy clients over NVFlare's task management.

    Args:
        sizes: samples of each client.
        folder: where memories and ledgers are kept.
        delays: seconds before the answers of a site.
        tampers: changes to the results of a site.
        absent: sites that are not connected.
        limit: most bytes of a message.
        limits: a site's own limit.
        runs: the run that a site believes to be in.
        tasks: further client tasks.
        one_at_a_time: sites work in turn: what trains for real shares no process in a real federation.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        folder: Path,
        *,
        delays: dict[str, float] | None = None,
        tampers: dict[str, Any] | None = None,
        absent: tuple[str, ...] = (),
        limit: int = LIMIT,
        limits: dict[str, int] | None = None,
        runs: dict[str, str] | None = None,
        tasks: dict[str, Any] | None = None,
        one_at_a_time: bool = False,
    ):
        self.engine = FakeEngine([name for name in sizes if name not in absent])
        self.communicator = WFCommServer(task_check_period=0.02)
        self.controller = MedfedController()
        self.controller.set_communicator(self.communicator)
        self.controller._engine = self.engine
        with self.engine.new_context() as context:
            self.communicator._job_policy_violated = lambda: False
            self.communicator.initialize_run(context)
        self.abort = Signal()
        self.server_ledger = folder / "server" / LEDGER
        post = self.controller._post = NVFlarePost(self.controller, self.abort)
        self.medfed = NVFlareEngine(
            {name: name for name in sizes}, post, run=RUN, limit=limit, ledger=Ledger(self.server_ledger)
        )
        self.controller._medfed, self.controller._clients = self.medfed, {name: name for name in sizes}
        self.turns: Any = threading.Lock() if one_at_a_time else nullcontext()
        self.sites: dict[str, Site] = {}
        self.folder = folder
        known = {**TASKS, **(tasks or {})}
        for name in self.engine.sites:

            def make_host(name: str = name) -> ClientHost:
                data = ToyData(name, sizes[name])
                return ClientHost((name,), known, TASK, lambda _: data, None, folder / "clients", 0)  # type: ignore

            executor = MedfedExecutor()
            ledger = Ledger(self.ledger_of(name))
            own = (limits or {}).get(name, limit)
            executor._desk = Desk(name, (runs or {}).get(name, RUN), make_host, own, ledger)
            site = Site(self, name, executor, (delays or {}).get(name, 0.0), (tampers or {}).get(name))
            self.sites[name] = site
            site.start()

    def ledger_of(self, name: str) -> Path:
        return self.folder / "clients" / client_folder(name) / LEDGER

    def server(self, sizes: dict[str, int], **options: Any) -> Server:
        return make_server(sizes, engine=self.medfed, **options)

    def close(self) -> None:
        for site in self.sites.values():
            site.over = True
        for site in self.sites.values():
            site.join(timeout=5)
        with self.engine.new_context() as context:
            self.communicator.finalize_run(context)


@contextmanager
def flare(sizes: dict[str, int], folder: Path, **options: Any) -> Any:
    made = Flare(sizes, folder, **options)
    try:
        yield made
    finally:
        made.close()


__all__ = ["LIMIT", "RUN", "Flare", "Shareable", "flare"]

"""NVFlare's server side: a controller that runs medfed's server, and sends what it asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from medfed.engines.nvflare.engine import Aborted, Arrived, NVFlareEngine
from medfed.engines.nvflare.plan import ServerPlan, read_plan
from medfed.engines.nvflare.serving import serve
from medfed.engines.nvflare.wire import BODY, OWN, TASK
from medfed.errors import MedfedError

EMPTY = "sent no answer"


class MedfedController(Controller):
    """Runs medfed's server as the job's only workflow.

    It takes no arguments, because NVFlare loses some: everything stands in the plan.
    """

    def __init__(self) -> None:
        super().__init__(task_check_period=0.1)
        self._medfed: NVFlareEngine | None = None
        self._post: NVFlarePost | None = None
        self._clients: dict[str, str] = {}

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to end."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Runs all rounds; a failure ends the job with its reason."""
        workspace = fl_ctx.get_engine().get_workspace()
        try:
            plan = read_plan(ServerPlan, workspace.get_app_config_dir(fl_ctx.get_job_id()))
            self._clients = plan.sites
            self._post = NVFlarePost(self, abort_signal)

            def say(text: str) -> None:
                self.log_info(fl_ctx, text)

            serve(plan, self._post, Path(workspace.get_root_dir()), say, opened=self._opened)
        except Aborted:
            self.log_info(fl_ctx, "the job was stopped; submit it again to go on after the last checkpoint")
        except MedfedError as error:
            self.system_panic(str(error), fl_ctx)
        except Exception as error:
            self.log_exception(fl_ctx, "medfed's server failed")
            self.system_panic(f"{type(error).__name__}: {error}", fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Hears of every task that goes out."""
        if event_type == EventType.BEFORE_TASK_DATA_FILTER and self._post is not None:
            self._post.address(fl_ctx)

    def _opened(self, engine: NVFlareEngine) -> None:
        self._medfed = engine

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A late answer: written down and ignored."""
        if self._medfed is not None and client.name in self._clients:
            self._medfed.note(self._clients[client.name], result.get(BODY), late=True)


class NVFlarePost:
    """Sends to sites by one task of NVFlare a request.

    One, because NVFlare loses track of a task that it sends again while others stand beside it. What one site alone is
    told is added to its copy of the task on the way out.

    Args:
        controller: schedules the tasks.
        abort_signal: says when the job is stopped.
    """

    def __init__(self, controller: Controller, abort_signal: Signal):
        self._controller, self._abort_signal = controller, abort_signal
        self._own: Mapping[str, str] = {}

    def connected(self) -> Collection[str]:
        """The sites that take part in the job and are not known to be gone."""
        gone = self._controller.get_client_disconnect_time
        return {c.name for c in self._controller._engine.get_clients() if gone(c.name) is None}

    def send(self, data: bytes, own: Mapping[str, str], arrived: Arrived) -> Task:
        """See :class:`medfed.engines.nvflare.engine.Post`."""

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            code = result.get_return_code()
            failed = code != ReturnCode.OK
            arrived(
                client_task.client.name, None if failed else result.get(BODY), f"failed ({code})" if failed else EMPTY
            )

        shareable = Shareable()
        shareable[BODY] = data
        self._own = own
        task = Task(name=TASK, data=shareable, result_received_cb=received, task_done_cb=_forget)
        with self._controller._engine.new_context() as fl_ctx:
            self._controller.broadcast(task, fl_ctx, targets=list(own), min_responses=0)
        return task

    def address(self, fl_ctx: FLContext) -> None:
        """Adds to a task on its way out what its site alone is told; the site is the one NVFlare has authenticated."""
        data = fl_ctx.get_prop(FLContextKey.TASK_DATA)
        sent = self._controller.communicator.process_task_check(fl_ctx.get_prop(FLContextKey.TASK_ID), fl_ctx)
        if sent is not None and isinstance(data, Shareable) and BODY in data:
            data[OWN] = self._own.get(sent.client.name, "{}")

    def cancel(self, sent: object) -> None:
        """Takes back a task; nothing happens where it is over."""
        assert isinstance(sent, Task)
        if sent.completion_status is None:
            self._controller.cancel_task(sent)

    def aborted(self) -> bool:
        """Whether the job is being stopped."""
        return self._abort_signal.triggered


def _forget(task: Task, fl_ctx: FLContext) -> None:
    """Frees a task that is over: it and its client tasks refer to each other, and would keep the model until Python
    looks for such rings.
    """
    task.client_tasks = []
    task.last_client_task_map = {}
    task.data = Shareable()

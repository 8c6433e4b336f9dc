"""NVFlare's client side: one executor for every task of a job.

An executor rather than the Client API: no script travels with the job (so that sites admit it by a class allow-list),
and a failure is an answer, where an in-process script that failed once would stay dead.
"""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from medfed.engines.nvflare.hosting import open_desk
from medfed.engines.nvflare.plan import SitePlan, read_plan
from medfed.engines.nvflare.site import Desk
from medfed.engines.nvflare.wire import BODY, OWN


class MedfedExecutor(Executor):
    """Hands every task to the site's desk. It takes all names of tasks, because NVFlare stops a whole job when one
    site does not know a task. It takes no arguments: everything stands in the plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self._desk: Desk | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answers a task; see :class:`Executor`."""
        if self._desk is None:
            self._desk = self._open(fl_ctx)
        data = self._desk.answer(task_name, shareable.get(BODY), shareable.get(OWN))
        if abort_signal.triggered:
            return make_reply(ReturnCode.TASK_ABORTED)
        reply = Shareable()
        reply[BODY] = data
        return reply

    def _open(self, fl_ctx: FLContext) -> Desk:
        workspace = fl_ctx.get_engine().get_workspace()
        plan = read_plan(SitePlan, workspace.get_app_config_dir(fl_ctx.get_job_id()))
        return open_desk(plan, fl_ctx.get_identity_name(), Path(workspace.get_root_dir()))

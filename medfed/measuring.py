"""What is measured after a round: assembly of models, test sets and the judgement of labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.federation.memory import client_folder, newest_memory
from medfed.federation.messages import State
from medfed.judging import joined
from medfed.training.evaluation import Evaluation, averaged

if TYPE_CHECKING:
    from medfed.experiment import Prepared
    from medfed.federation.server import Server
    from medfed.training.local import LocalTrainer
    from medfed.training.predictions import PredictionFiles


def evaluation(
    prepared: Prepared,
    trainer: LocalTrainer,
    predictions: PredictionFiles,
    judge: Callable[[Server], dict[str, Any]],
    clients: Path,
) -> Callable[[Server], dict[str, Any]]:
    """What is measured after a round: the model in rounds with an evaluation, what the method says of labels always.

    Of a method without a global model it is the mean over the clients' models, see
    :func:`~medfed.training.evaluation.averaged`.
    """
    plan = prepared.experiment.evaluation
    evaluator = prepared.evaluator()

    def of(model: State) -> Evaluation:
        trainer.load(model)
        return evaluator.evaluate(lambda data: trainer.predict(data, plan.batch_size))

    def measure(server: Server) -> Evaluation:
        if not prepared.method.personal:
            return of(server.model)
        models = personal_models(clients, server)
        return averaged({c: of(m) for c, m in models.items()}) if models else of(server.model)

    def evaluate(server: Server) -> dict[str, Any]:
        last = server.round > server.num_rounds - plan.last
        if server.round % plan.every and not last:
            return judge(server)
        found = measure(server)
        if plan.keep_predictions:
            score = found.evaluation["clean"].get("balanced_accuracy")
            predictions.write(server.round, evaluator.predictions(found), score)
        return joined(found.record(), judge(server))

    return evaluate


def personal_models(folder: Path, server: Server) -> dict[str, State]:
    """The models that clients keep for themselves, of those that have one.

    Args:
        folder: of the clients' memories.
        server: says who there is, and up to which request memories count.
    """
    found = {}
    for client in server.clients:
        kept = newest_memory(folder / client_folder(client), server.state.step)
        model = {n.removeprefix("model/"): t for n, t in kept.items() if n.startswith("model/")}
        if model:
            found[client] = model
    return found

"""The bundles in MONAI's stock federated client, without NVFlare."""

import logging

import pytest
import torch
from monai.fl.client import MonaiAlgo
from monai.fl.utils.constants import ExtraItems, FlStatistics, WeightType
from monai.fl.utils.exchange_object import ExchangeObject

from medfed.training.bundle import TrainingBundle, find_bundle

NAMES = ["oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"]


def algo(name, given, overlays=("federated",), **more):
    """A client that reads YAML: MonaiAlgo itself looks for train.json."""
    client = MonaiAlgo(
        bundle_root=str(find_bundle(name)),
        config_train_filename=[f"configs/{f}.yaml" for f in ("train", *overlays)],
        config_evaluate_filename=["configs/train.yaml", "configs/evaluate.yaml"],
        train_kwargs=dict(given),
        eval_kwargs=dict(given),
        **more,
    )
    client.initialize({ExtraItems.CLIENT_NAME: "site_a", ExtraItems.APP_ROOT: ""})
    return client


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "overlays"),
    [
        (NAMES[0], ["federated"]),
        (NAMES[0], ["federated", "sharpness_aware"]),
        (NAMES[1], ["federated", "noise_robust"]),
        (NAMES[2], ["federated"]),
    ],
)
def test_two_rounds(name, overlays, small, tmp_path):
    given = {k: v for k, v in small(name).items() if k not in ("bundle_root", "epochs")}
    client = algo(name, given, overlays, send_weight_diff=False)
    start = TrainingBundle.load(name, {"network_name": "squeezenet1_1"}).build_network(5).state_dict()
    weights = {k: v.numpy() for k, v in start.items()}
    for _ in range(2):
        client.train(ExchangeObject(weights=weights))
        sent = client.get_weights()
        assert sent.weight_type == WeightType.WEIGHTS
        steps = sent.statistics[FlStatistics.NUM_EXECUTED_ITERATIONS]
        assert steps == len(client.trainer.data_loader)
        # On a CPU these are views of the live network, which the next round changes.
        weights = {k: v.detach().clone() for k, v in sent.weights.items()}
        # Momentum begins anew in every round, as in a federation of medfed.
        assert {int(s["step"]) for s in client.trainer.optimizer.state.values()} == {steps}
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[k], start[k]) for k in start)
    found = client.evaluate(ExchangeObject(weights={k: v.numpy() for k, v in weights.items()})).metrics
    assert 0 <= found["balanced_accuracy"] <= 1
    client.finalize()
    assert not (tmp_path / "models").exists()  # the server keeps the model


@pytest.mark.filterwarnings("ignore")
def test_evaluation_is_of_the_weights_that_came(small):
    """No checkpoint of an earlier training replaces them, and the evaluator's own network is set."""
    name = NAMES[0]
    given = {k: v for k, v in small(name).items() if k not in ("bundle_root", "epochs")}
    client = algo(name, given)
    network = TrainingBundle.load(name, {"network_name": "squeezenet1_1"}).build_network(5)
    with torch.no_grad():
        list(network.parameters())[-1].copy_(torch.tensor([0.0, 0.0, 0.0, 100.0]))  # says NORMAL, whatever comes
    found = client.evaluate(ExchangeObject(weights={k: v.numpy() for k, v in network.state_dict().items()})).metrics
    labels = [int(item["label"]) for item in client.eval_workflow.parser.get_parsed_content("validate::dataset::data")]
    assert found["accuracy"] == pytest.approx(labels.count(3) / len(labels))
    logging.getLogger("ignite").setLevel(logging.WARNING)

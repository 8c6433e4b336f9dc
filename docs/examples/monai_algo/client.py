"""A site of a stock NVFlare job: MONAI's own client trains a bundle, NVFlare's Client API moves the weights.

Needs nvflare and what the bundle needs; nothing of medfed's federation takes part.  ``job.py`` beside this file makes a
job of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nvflare.client as flare
from monai.fl.client import MonaiAlgo
from monai.fl.utils.constants import ExtraItems, FlStatistics
from monai.fl.utils.exchange_object import ExchangeObject

from medfed.bundle_check import check_bundle
from medfed.bundle_cli import parse_sets


def main() -> None:
    """Joins, trains in every round, and ends with the job."""
    parser = argparse.ArgumentParser(description="A site of a stock NVFlare job that trains a bundle.")
    parser.add_argument("--bundle", required=True, help="folder of the bundle at this site, or a name")
    parser.add_argument("--hash", help="hash of the bundle that was agreed on, as `medfed bundle check` shows it")
    parser.add_argument("--data", required=True, help="folder of the images; {site} becomes the name of the site")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs a round")
    parser.add_argument("--overlay", action="append", default=[], help="e.g. sharpness_aware; may be given often")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of the bundle")
    given = parser.parse_args()

    flare.init()
    site = flare.get_site_name()
    own = {**parse_sets(given.set), "dataset_dir": given.data.format(site=site)}
    # MONAI executes what stands in a bundle: read it as text first.
    folder = check_bundle(given.bundle, given.hash, own).folder.absolute()
    # MonaiAlgo has no argument for the folder of results; two sites on one machine must not share one.
    own["output_dir"] = str(Path.cwd() / "eval")
    client = MonaiAlgo(
        bundle_root=str(folder),
        local_epochs=given.epochs,
        send_weight_diff=False,
        config_train_filename=[f"configs/{name}.yaml" for name in ("train", "federated", *given.overlay)],
        config_evaluate_filename=["configs/train.yaml", "configs/evaluate.yaml"],
        train_kwargs=dict(own),
        eval_kwargs=dict(own),
    )
    client.initialize({ExtraItems.CLIENT_NAME: site, ExtraItems.APP_ROOT: ""})
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        # Of the global model as it came: NVFlare chooses its best model by this.
        metrics = client.evaluate(ExchangeObject(weights=dict(received.params))).metrics
        client.train(ExchangeObject(weights=dict(received.params)))
        trained = client.get_weights()
        flare.send(
            flare.FLModel(
                # Tensors: NVFlare leaves out everything else, and the site with it.  Copies: on a CPU MonaiAlgo gives
                # views of the live network.
                params={name: value.detach().cpu().clone() for name, value in trained.weights.items()},
                metrics={name: float(value) for name, value in metrics.items()},
                # The weight of this site in the mean.
                meta={"NUM_STEPS_CURRENT_ROUND": trained.statistics[FlStatistics.NUM_EXECUTED_ITERATIONS]},
            )
        )
    client.finalize()


if __name__ == "__main__":
    main()

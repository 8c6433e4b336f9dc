"""A stock NVFlare job (FedAvg) for sites that run ``client.py``: exported for submission, or run in the simulator.

python job.py --bundle oct_bscan_classification --data /data/OCT2017 --job jobs
python job.py --bundle oct_bscan_classification --data "shares/{site}" --simulate workspace --sites 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from medfed.bundle_check import check_bundle
from medfed.bundle_cli import parse_sets
from medfed.training.bundle import TrainingBundle


def main() -> None:
    """Writes the job, or runs it."""
    parser = argparse.ArgumentParser(description="A stock NVFlare job that trains a bundle with MONAI's own client.")
    parser.add_argument("--bundle", required=True, help="folder of the bundle, the same at every site, or a name")
    parser.add_argument("--data", required=True, help="folder of the images; {site} becomes the name of the site")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1, help="local epochs a round")
    parser.add_argument("--sites", type=int, default=2, help="fewest sites of a round")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of the bundle")
    parser.add_argument("--overlay", action="append", default=[], help="e.g. sharpness_aware; may be given often")
    parser.add_argument("--script", default=str(Path(__file__).with_name("client.py")), help="what a site runs")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--job", help="folder to write the job into")
    where.add_argument("--simulate", help="workspace of the simulator")
    given = parser.parse_args()

    checked = check_bundle(given.bundle, overrides=parse_sets(given.set))
    config = TrainingBundle.load(given.bundle, parse_sets(given.set)).config
    words = ["--bundle", given.bundle, "--hash", checked.hash, "--data", given.data, "--epochs", str(given.epochs)]
    words += [word for text in given.set for word in ("--set", text)]
    words += [word for text in given.overlay for word in ("--overlay", text)]
    if spoilt := [word for word in words if len(word.split()) != 1]:
        parser.error(f"NVFlare takes arguments apart at blanks: write these without any: {spoilt}")
    recipe = FedAvgRecipe(
        name=checked.folder.name,
        min_clients=given.sites,
        num_rounds=given.rounds,
        # The network that all begin with; it is built at the server.
        model={
            "class_path": "medfed.training.networks.build_network",
            "args": {
                "name": config["network_name"],
                "num_classes": len(config["classes"]),
                "in_channels": config["in_channels"],
                "weights": config["weights"],
                "seed": config["seed"],
            },
        },
        train_script=given.script,
        train_args=" ".join(words),
        key_metric="balanced_accuracy",
    )
    if given.job:
        recipe.export(given.job)
    else:
        recipe.execute(SimEnv(num_clients=given.sites, workspace_root=given.simulate))


if __name__ == "__main__":
    main()

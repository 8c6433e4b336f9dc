"""Round time of the local engine against a bare PyTorch loop with the same optimiser steps.

One process, the same threads, tensors in memory.  The bare loop has images that are already normalised; medfed takes
bytes from the store and normalises every batch.  Both must end in the same model.
"""

from __future__ import annotations

import torch
from common import (
    SMALL,
    SQUEEZENET,
    Bare,
    BareSharpnessAware,
    Case,
    Federation,
    arguments,
    difference_after_a_round,
    in_turn,
    machine,
    smaller,
    table,
    torchvision_network,
)

RESNET_224 = Case("images of 224x224, ResNet-18", torchvision_network("resnet18"), (3, 224, 224), 2, 64, 32)
METHODS = {
    "FedAvg": ({"name": "fedavg", "logit_adjustment": False}, Bare),
    "FedISM": ({"name": "fedism", "logit_adjustment": False}, BareSharpnessAware),
}


def main() -> None:
    options = arguments(__doc__, rounds=15, threads=1)
    torch.set_num_threads(options.threads)
    on_gpu = options.device.startswith("cuda")
    cases = [RESNET_224] if on_gpu else [smaller(SMALL, clients=15), smaller(SQUEEZENET, clients=1)]
    rows = []
    for case in cases:
        for name, (method, bare) in METHODS.items():
            for amp in (False, True) if on_gpu and name == "FedAvg" else (False,):
                ours = Federation.of(case, method, device=options.device, threads=options.threads, amp=amp)
                hand = bare(case, options.device, amp)
                differ = difference_after_a_round(ours, hand)
                times = in_turn({"hand": hand.round, "medfed": ours.round}, options.rounds, quiet=options.quiet)
                ratio = times["medfed"].over(times["hand"])
                rows.append(
                    [
                        name + (" with AMP" if amp else ""),
                        case.title,
                        min(times["hand"].wall),
                        min(times["medfed"].wall),
                        *ratio.values(),
                        differ,
                    ]
                )
    columns = ["method", "clients", "bare, s", "medfed, s", "ratio of medians", "of minima", "of CPU time"]
    table([*columns, "models differ by"], rows)
    print(machine())


if __name__ == "__main__":
    main()

"""How well labels are repaired: the published rule and the posterior of features and label, on real images.

    python benchmarks/relabelling.py --oct OCT2017 --derm HAM10000 --weights squeezenet1_0.pth --out relabelling

Ten clients, of which the three clean ones are known here; frozen features (pooled SqueezeNet with ImageNet weights,
images of 128x128), in the conditions of ``benchmarks/identification.py``.  Counts of each condition and rule go to
``results.csv`` in the output folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from identification import READERS, Cell, Images, arguments, load

from medfed.data.condition import generate
from medfed.reliability.posterior import class_moments, pooled, posterior, proposals
from medfed.reliability.quality import pooled as together
from medfed.reliability.quality import relabelling_quality
from medfed.reliability.references import ClassReference, class_reference, consensus
from medfed.reliability.relabelling import agreement, relabel, scores

Part = tuple[torch.Tensor, torch.Tensor]


def by_agreement(clean: Sequence[Part], parts: Sequence[Part], classes: int) -> list[torch.Tensor]:
    """Proposals of the published rule at each client."""
    references: dict[int, ClassReference] = {}
    for c in range(classes):
        found = [r for x, y in clean if (r := class_reference(x[y == c])) is not None]
        if found:
            references[c] = consensus(found)
    return [agreement(*scores(x, references, classes)) for x, _ in parts]


def by_posterior(clean: Sequence[Part], parts: Sequence[Part], classes: int) -> list[torch.Tensor]:
    """Proposals of the posterior at each client."""
    moments = pooled([class_moments(x, y, classes) for x, y in clean])
    return [proposals(posterior(x, y, moments).probability) for x, y in parts]


RULES = {"published": by_agreement, "posterior": by_posterior}


def measure(images: Images, cell: Cell) -> list[dict[str, object]]:
    """Counts of both rules at all noisy clients of one condition."""
    condition = generate(*images.parts(cell.seed), cell.spec())
    data: dict[str, Part] = {}
    for client in condition.clients:
        view = condition.view(client)
        features = torch.stack([images.features[s] for s in view.samples])
        data[client] = features, torch.tensor(view.labels, dtype=torch.int64)
    noisy = [c for c in condition.clients if c in condition.truth.noisy]
    clean = [data[c] for c in condition.clients if c not in condition.truth.noisy]
    rows = []
    for name, rule in RULES.items():
        found = rule(clean, [data[c] for c in noisy], condition.task.num_classes)
        parts = []
        for client, proposed in zip(noisy, found):
            observed, true = data[client][1], np.asarray(condition.truth.of_client(client)[1])
            parts.append(relabelling_quality(true, observed.numpy(), relabel(observed, proposed).numpy()))
        rows.append({**vars(cell), "rule": name, **together(parts)})
    return rows


def tables(results: pd.DataFrame) -> str:
    """A table a data set: ratios from the counts of all seeds together, ``published / posterior``."""
    lines = []
    for name, block in results.groupby("data"):
        lines += [f"\n{name}, {block['seed'].nunique()} seeds\n"]
        lines += ["| noise | alpha | wrong before | wrong after | recovery | precision | false corrections |"]
        lines += ["|---|---|---|---|---|---|---|"]
        order = block.sort_values(["kind", "alpha", "rate"], ascending=[False, False, True])
        for (kind, alpha, rate), rows in order.groupby(["kind", "alpha", "rate"], sort=False):
            told = [together(rows[rows["rule"] == rule].to_dict("records")) for rule in RULES]
            shown = ("residual_noise", "recovery", "correction_precision", "false_correction_rate")
            pairs = [" / ".join("-" if t[key] is None else f"{t[key]:.2f}" for t in told) for key in shown]
            lines.append(f"| {kind} {rate:g} | {alpha:g} | {told[0]['noise_rate']:.2f} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__, range(100, 105), (0.2, 0.4, 0.6, 0.9), (2.0, 0.5)).parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in (n for n in READERS if getattr(args, n) is not None):
        images = load(name, getattr(args, name), args.weights, args.cache or args.out / "cache", 128, False)
        for seed in args.seeds:
            for alpha in args.alphas:
                for kind in ("symmetric", "asymmetric"):
                    for rate in args.rates:
                        rows += measure(
                            images, Cell(data=name, clients=10, clean=3, kind=kind, rate=rate, alpha=alpha, seed=seed)
                        )
    results = pd.DataFrame(rows)
    results.to_csv(args.out / "results.csv", index=False)
    report = tables(results)
    (args.out / "results.md").write_text(report + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()

"""Who has wrong labels: the published identification and medfed's own on real images, without any training.

    python benchmarks/identification.py --oct OCT2017 --derm HAM10000 --weights squeezenet1_0.pth --out identification

All look at the same frozen features (pooled SqueezeNet with ImageNet weights, images of 128x128 or ``--side``) in the
same conditions; ``peers`` is medfed's own with clients compared among those of like image quality.  With
``--corrupted N`` that many clients have images with Gaussian noise of severity 3.  The published method trains each
client's network before it takes features, which this does not measure.
Results go to ``results.csv`` in the output folder, one row a federation and method; what is there is not computed
again.  Features are kept in ``--cache``.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from medfed.data.arrays import ArrayDataset
from medfed.data.cohort import Cohort
from medfed.data.condition import Condition, ConditionSpec, generate
from medfed.data.corruption import Corruption
from medfed.data.readers import get_reader
from medfed.data.splits import split_cohort
from medfed.data.store import ImageStore
from medfed.experiment import united
from medfed.reliability.evidence import Evidence, evidence
from medfed.reliability.identification import Verdict, published
from medfed.reliability.peers import judge_among_peers
from medfed.reliability.quality import identification_quality
from medfed.reliability.spectra import Descriptors, class_directions, descriptors, similarity
from medfed.reliability.verdicts import judge
from medfed.training.bundle import TrainingBundle
from medfed.training.local import LocalTrainer

READERS = {"oct": ("kermany", "oct_bscan_classification"), "derm": ("isic", "isic_dermoscopy_classification")}
MAPS = {
    "oct": {"CNV": "DME", "DME": "CNV", "DRUSEN": "NORMAL", "NORMAL": "DRUSEN"},
    "derm": {"mel": "nv", "nv": "mel", "bcc": "akiec", "akiec": "bcc", "bkl": "nv"},
}
RATES, ALPHAS = (0.2, 0.3, 0.4, 0.6, 0.9), (2.0, 0.5, 0.1)
FEDERATIONS = ("10/3", "10/10", "30/3", "30/30", "10/7")
BAD = Corruption("gaussian_noise", 3)
KEYS = ["data", "clients", "clean", "corrupted", "kind", "rate", "alpha", "seed"]
MEASURES = [
    "f1",
    "noisy_recall",
    "accused",
    "accused_corrupted",
    "missed",
    "missed_corrupted",
    "undetermined",
    "auc",
    "sample_auc",
    "sample_ap",
    "wrong_samples",
    "seconds",
]


@dataclass(frozen=True)
class Cell:
    """One condition."""

    data: str
    clients: int
    clean: int
    kind: str
    rate: float
    alpha: float
    seed: int
    corrupted: int = 0

    def key(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, k)) for k in KEYS)

    def spec(self) -> ConditionSpec:
        noise: dict[str, Any] | None = {"kind": self.kind, "rate": self.rate, "clean": self.clean}
        if self.kind == "none":
            noise = None
        elif self.kind == "asymmetric":
            noise["map"] = MAPS[self.data]
        partition = {"kind": "dirichlet", "clients": self.clients, "alpha": self.alpha, "corrupted": self.corrupted}
        spec = {"seed": self.seed, "partition": partition, "label_noise": noise}
        return ConditionSpec.model_validate(
            spec | ({"corruption": {"kind": BAD.kind, "severity": BAD.severity}} if self.corrupted else {})
        )


@dataclass(frozen=True)
class Images:
    """A cohort and the feature of each of its samples, as it is and corrupted (empty where that is not wanted)."""

    cohort: Cohort
    features: dict[str, torch.Tensor]
    corrupted: dict[str, torch.Tensor]

    @functools.lru_cache(maxsize=4)  # noqa: B019 (lives as long as the script)
    def parts(self, seed: int) -> tuple[Cohort, Cohort]:
        cohort = split_cohort(self.cohort, test_fraction=0.2, seed=seed)
        return cohort.where(lambda t: t["split"] == "train"), cohort.where(lambda t: t["split"] == "test")

    def __hash__(self) -> int:
        return id(self)


def load(name: str, root: Path, weights: Path, cache: Path, side: int = 128, corrupted: bool = False) -> Images:
    """Reads a cohort and its pooled features, computed once."""
    reader, bundle_name = READERS[name]
    module = get_reader(reader)
    cohort = module.read(root, module.Options())
    overrides = {
        **{"classes": list(cohort.task.classes), "network_name": "squeezenet1_0", "weights": str(weights)},
        "image_size": [side, side],
    }
    bundle = TrainingBundle.load(bundle_name, overrides)
    store = ImageStore.open(cache, bundle.pipeline())
    built = store.ensure(cohort, workers=1)
    cohort = united(cohort.where(lambda t: t["sample"].isin(built.rows)), built.rows, store.images)
    # What the layout marks as test is divided again: here all images are training images.
    cohort = replace(cohort, table=cohort.table.assign(split=pd.array([""] * len(cohort), dtype="str")))
    samples = list(cohort.table["sample"])

    def features(rows: np.ndarray, kind: str) -> dict[str, torch.Tensor]:
        file = cache / f"features-{name}{kind}-{bundle.content_hash()[:12]}-{len(cohort)}.npy"
        if not file.exists():
            data = ArrayDataset(store.images, rows, torch.as_tensor(cohort.labels))
            np.save(file, LocalTrainer(bundle, device="cpu", threads=1).features(data).numpy())
        return dict(zip(samples, torch.from_numpy(np.load(file))))

    good = features(built.rows_of(samples), "")
    if not corrupted:
        return Images(cohort, good, {})
    worse = store.ensure(cohort, corruption=BAD, samples=samples)
    return Images(cohort, good, features(worse.rows_of(samples), "-corrupted"))


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All conditions, seed by seed, so that whatever exists at any time is balanced."""
    for seed, federation, name in itertools.product(args.seeds, args.federations, args.data):
        clients, clean = map(int, federation.split("/"))
        noises = [("none", 0.0)] if clean == clients else itertools.product(("symmetric", "asymmetric"), args.rates)
        for (kind, rate), alpha in itertools.product(list(noises), args.alphas):
            yield Cell(name, clients, clean, kind, rate, alpha, seed, args.corrupted)


def ranking(score: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve; NaN where a side is empty."""
    a, b = score[positive], score[~positive]
    if not len(a) or not len(b):
        return np.nan
    return float((a[:, None] > b).mean() + 0.5 * (a[:, None] == b).mean())


def average_precision(score: np.ndarray, positive: np.ndarray) -> float:
    hits = positive[np.argsort(-score, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean()) if hits.any() else np.nan


def measure(images: Images, cell: Cell) -> dict[str, dict[str, float]]:
    """All methods in one condition."""
    condition = generate(*images.parts(cell.seed), cell.spec())
    classes = condition.task.num_classes
    data = {}
    for client in condition.clients:
        view = condition.view(client)
        known = images.corrupted if client in condition.truth.corrupted else images.features
        x = torch.stack([known[s] for s in view.samples])
        data[client] = (x, torch.tensor(view.labels, dtype=torch.int64))
    results = {}
    start = time.process_time()
    found: dict[str, Descriptors] = {
        c: descriptors(similarity(class_directions(x, y, classes), classes)) for c, (x, y) in data.items()
    }
    verdict = published(found)
    spent = time.process_time() - start
    results["published"] = {**_judged(condition, verdict, {c: d.mean for c, d in found.items()}), "seconds": spent}
    start = time.process_time()
    sent: dict[str, Evidence] = {c: evidence(x, y, classes) for c, (x, y) in data.items()}
    verdict, state = judge(sent)
    spent = time.process_time() - start
    shares = {c: s["raw"] if s["raw"] is not None else np.nan for c, s in state["shares"].items()}
    results["evidence"] = {**_judged(condition, verdict, shares), **_samples(condition, sent), "seconds": spent}
    start = time.process_time()
    verdict, state = judge_among_peers(sent)
    spent += time.process_time() - start
    shares = {c: s["raw"] if s["raw"] is not None else np.nan for c, s in state["shares"].items()}
    results["peers"] = {**_judged(condition, verdict, shares), "seconds": spent}
    return results


def _judged(condition: Condition, verdict: Verdict, score: dict[str, float]) -> dict[str, float]:
    quality = identification_quality(verdict.status, condition.truth.noisy)
    worst = np.array([score[c] for c in condition.clients])
    # Who cannot be ranked stands in the middle.
    worst = np.where(np.isnan(worst), np.nanmedian(worst), worst)
    noisy = np.array([c in condition.truth.noisy for c in condition.clients])
    nan = float("nan")
    bad, guilty = set(condition.truth.corrupted), set(condition.truth.noisy)
    accused = {c for c, s in verdict.status.items() if s == "noisy" and c not in guilty}
    missed = {c for c in verdict.clean if c in guilty}
    return {
        "accused_corrupted": float(len(accused & bad)),
        "missed": float(len(missed)),
        "missed_corrupted": float(len(missed & bad)),
        "f1": nan if (f1 := quality["clean_f1"]) is None else f1,
        "noisy_recall": nan if (recall := quality["noisy_recall"]) is None else recall,
        "accused": float(quality["accused"] or 0),
        "undetermined": float(quality["undetermined"] or 0),
        "auc": ranking(worst, noisy),
    }


def _samples(condition: Condition, sent: dict[str, Evidence]) -> dict[str, float]:
    """How well the margins of single samples rank those with wrong labels, over all noisy clients."""
    margins, wrong = [], []
    for client in condition.truth.noisy:
        _, truth = condition.truth.of_client(client)
        samples = sent[client].samples
        known = samples.predicted.numpy() >= 0
        margins.append(samples.margin.numpy()[known])
        wrong.append((np.asarray(condition.view(client).labels) != truth)[known])
    if not margins:
        return {}
    margin, bad = np.concatenate(margins), np.concatenate(wrong)
    return {
        "sample_auc": ranking(margin, bad),
        "sample_ap": average_precision(margin, bad),
        "wrong_samples": float(bad.mean()) if len(bad) else float("nan"),
    }


def tables(results: pd.DataFrame) -> str:
    """Means over seeds, a table a federation."""
    lines = []
    for (name, clients, clean, bad), block in results.groupby(["data", "clients", "clean", "corrupted"]):
        lines += [f"\n{name}: {clean} of {clients} clients clean, {bad} corrupted, {block['seed'].nunique()} seeds\n"]
        none = clean == clients
        shown = ["accused", "undetermined"] if none else ["f1", "noisy_recall", "accused", "auc"]
        shown += ["accused_corrupted", *(() if none else ("missed", "missed_corrupted"))] if bad else []
        ways = ("published", "evidence", "peers") if bad else ("published", "evidence")
        heads = [f"{m} {w}" for m in shown for w in ways]
        lines += [f"| noise | alpha | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
        order = block.sort_values(["kind", "rate", "alpha"], ascending=[False, True, False])
        for (kind, rate, alpha), rows in order.groupby(["kind", "rate", "alpha"], sort=False):
            means = rows.groupby("method")[shown].mean()
            numbers = [f"{means[m].get(w, np.nan):.2f}" for m in shown for w in ways]
            lines.append(f"| {'none' if none else f'{kind} {rate:g}'} | {alpha:g} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def arguments(
    doc: str | None, seeds: range, rates: Sequence[float], alphas: Sequence[float]
) -> argparse.ArgumentParser:
    """What every benchmark on these features can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oct", type=Path)
    parser.add_argument("--derm", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--rates", type=float, nargs="+", default=list(rates))
    parser.add_argument("--alphas", type=float, nargs="+", default=list(alphas))
    return parser


def main() -> None:
    parser = arguments(__doc__, range(100, 110), RATES, ALPHAS)
    parser.add_argument("--federations", nargs="+", default=list(FEDERATIONS), help="clients/clean")
    parser.add_argument("--corrupted", type=int, default=0, help="clients with bad images")
    parser.add_argument("--side", type=int, default=128, help="of the images, in pixels")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    roots = {name: getattr(args, name) for name in READERS if getattr(args, name) is not None}
    args.data = list(roots)
    cache = args.cache or args.out / "cache"
    images = {n: load(n, root, args.weights, cache, args.side, args.corrupted > 0) for n, root in roots.items()}
    file = args.out / "results.csv"
    done = set()
    fresh = not file.exists() or not file.stat().st_size
    if not fresh:
        with file.open(newline="") as old:
            done = {tuple(row[k] for k in KEYS) for row in csv.DictReader(old)}
    with file.open("a", newline="") as out:
        writer = csv.DictWriter(out, [*KEYS, "method", *MEASURES])
        if fresh:
            writer.writeheader()
        for cell in cells(args):
            if cell.key() in done:
                continue
            for method, row in measure(images[cell.data], cell).items():
                writer.writerow({**dict(zip(KEYS, cell.key())), "method": method, **row})
            out.flush()
    report = tables(pd.read_csv(file, keep_default_na=True, na_values=[""]).query("seed in @args.seeds"))
    (args.out / "results.md").write_text(report + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()

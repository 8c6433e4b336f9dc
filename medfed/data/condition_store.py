"""The condition as a record: what clients may know, the truth, the hash, and both on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medfed.data.cohort import Task
from medfed.data.condition_spec import ConditionSpec
from medfed.data.corruption import Corruption
from medfed.errors import ConfigError, DataError, nearest

FORMAT, WITH_LABEL_NOISE, WITH_PUBLIC = 1, 2, 3
"""A condition without label noise or public images is stored and hashed as before there were any."""

NOBODY = np.zeros(0, dtype=np.int64)
TABLES = ("clients.parquet", "truth.parquet", "test.parquet")


@dataclass(frozen=True, eq=False)
class ClientView:
    """What one client knows: its samples, sorted by id, and the labels it was given.  Nothing else."""

    name: str
    samples: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, eq=False)
class Truth:
    """What evaluation alone may read.

    Args:
        samples: training samples, sorted by id.
        clients: the client of each.
        labels: the true label of each, ``[N]`` or ``[N, C]``.
        corrupted: names of the corrupted clients, sorted.
        test_samples: test samples, sorted by id.
        test_labels: the true label of each.
        test_clients: the client whose share of the test set each belongs to.
        noisy: names of the clients with label noise, sorted; also where it is not applied.
    """

    samples: np.ndarray
    clients: np.ndarray
    labels: np.ndarray
    corrupted: tuple[str, ...]
    test_samples: np.ndarray
    test_labels: np.ndarray
    test_clients: np.ndarray
    noisy: tuple[str, ...] = ()

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Positions of each client's training samples, ascending."""
        return _rows_by(self.clients)

    @cached_property
    def test_rows(self) -> dict[str, np.ndarray]:
        """Positions of each client's test samples, ascending."""
        return _rows_by(self.test_clients)

    def of_client(self, client: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Training samples and true labels of a client, in the order of its view."""
        rows = self.rows.get(client, NOBODY)
        return tuple(self.samples[rows]), self.labels[rows]

    def test_of(self, client: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Samples and labels of a client's share of the test set."""
        rows = self.test_rows.get(client, NOBODY)
        return tuple(self.test_samples[rows]), self.test_labels[rows]


@dataclass(frozen=True, eq=False)
class Condition:
    """One condition; see :func:`generate`.

    Args:
        spec: what it was generated from.
        task: classes and kind of labels.
        clients: all client names, sorted.
        observed: the label each training sample carries at its client, in the order of ``truth.samples``.
        truth: what evaluation alone may read.
        digests: content digest by sample, where given.
        public: samples that everybody may see, without labels; at no client.
    """

    spec: ConditionSpec
    task: Task
    clients: tuple[str, ...]
    observed: np.ndarray
    truth: Truth
    digests: Mapping[str, str]
    public: tuple[str, ...] = ()

    def view(self, client: str) -> ClientView:
        """What one client knows; its arrays are its own copies.

        Raises:
            ConfigError: no such client.
        """
        if client not in self.clients:
            raise ConfigError(f"There is no client {client!r}.", fix=nearest(client, self.clients))
        rows = self.truth.rows.get(client, NOBODY)
        labels = self.observed[rows]  # by an index array: a copy, which leads nowhere
        labels.setflags(write=False)
        return ClientView(client, tuple(self.truth.samples[rows]), labels)

    @property
    def corruption(self) -> Corruption | None:
        """What is done to the images of corrupted clients and to the corrupted test set."""
        return self.spec.corruption.build(self.spec.seed) if self.spec.corruption else None

    @cached_property
    def hash(self) -> str:
        """sha256 of the content: samples, digests, labels, assignment, corruption and seed; never of paths."""
        return _hash(self._header(), {name: _table_digest(table) for name, table in self._tables().items()})

    @cached_property
    def partition_hash(self) -> str:
        """sha256 as :attr:`hash`, but without the label noise: equal for noisy labels and their true reference."""
        return self.hash if self.spec.label_noise is None else replace(self, **self._without_noise()).hash

    @cached_property
    def mislabelled(self) -> dict[str, int]:
        """How many labels of a client are not the true ones; clients without any are not in it."""
        wrong = self.observed != self.truth.labels
        wrong = wrong.any(axis=1) if wrong.ndim == 2 else wrong
        found = {name: int(wrong[self.truth.rows.get(name, NOBODY)].sum()) for name in self.clients}
        return {name: count for name, count in found.items() if count}

    def label_noise_line(self) -> str:
        """What the label noise has done, in a line; empty where there is none."""
        noise = self.spec.label_noise
        if noise is None:
            return ""
        if not noise.apply:
            return f"Label noise is not applied: all labels are true ({len(self.truth.noisy)} clients would be noisy)"
        count, clients = sum(self.mislabelled.values()), len(self.mislabelled)
        return (
            f"Label noise ({noise.describe(self.task)}): {count} of {len(self.observed)} labels "
            f"at {clients} of {len(self.clients)} clients are wrong"
        )

    def _without_noise(self) -> dict[str, Any]:
        return {
            "spec": self.spec.model_copy(update={"label_noise": None}),
            "observed": self.truth.labels,
            "truth": replace(self.truth, noisy=()),
        }

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and worth knowing: empty clients, one-class clients, empty cells, absent classes."""
        counts, classes = self._counts(), self.task.classes
        test = _per_class(self.truth.test_labels, self.task)
        small = self.spec.partition.min_samples
        found = []
        for name, row in zip(self.clients, counts):
            size = len(self.truth.rows.get(name, NOBODY))
            if size == 0:
                found.append(f"{name} has no training samples")
            elif size < small:
                found.append(f"{name} has {size} training samples, fewer than {small}")
            if size and (row > 0).sum() == 1 and self.task.num_classes > 1:
                found.append(f"{name} holds one class only ({classes[int(row.argmax())]})")
            if name not in self.truth.test_rows:
                found.append(f"{name} has no share of the test set")
        empty = [f"{self.clients[k]}/{classes[c]}" for k, c in np.argwhere(counts == 0)]
        if empty:
            listed = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
            found.append(f"{len(empty)} of {counts.size} (client, class) cells are empty: {listed}")
        found += [f"class {c} is absent from training" for c, n in zip(classes, counts.sum(axis=0)) if not n]
        found += [f"class {c} is absent from the test set" for c, n in zip(classes, test) if not n]
        return (*found, *self._noise_warnings())

    def _noise_warnings(self) -> Iterator[str]:
        """Clients that are noisy in name only, and classes for which no annotator can be trusted."""
        noise = self.spec.label_noise
        if noise is None or not noise.apply:
            return
        untouched = [name for name in self.truth.noisy if name not in self.mislabelled]
        if untouched:
            yield f"the label noise changes no label at {', '.join(untouched)}: too few samples of these classes"
        trusted = _per_class(self.truth.labels[~np.isin(self.truth.clients, self.truth.noisy)], self.task)
        for name, at_clean, at_all in zip(self.task.classes, trusted, _per_class(self.truth.labels, self.task)):
            if at_all and not at_clean:
                yield f"class {name} is at no client with clean labels"

    def summary(self) -> pd.DataFrame:
        """A table for people: a row a client with samples per observed class, sizes and status.

        Returns:
            Columns ``samples``, ``test_samples``, ``corrupted``, ``empty_classes``, with label noise also ``noisy``
            and ``noise_rate`` (share of observed labels that are wrong), then one a class.
        """
        counts = self._counts()
        sizes = pd.DataFrame(
            {
                "samples": [len(self.truth.rows.get(c, NOBODY)) for c in self.clients],
                "test_samples": [len(self.truth.test_rows.get(c, NOBODY)) for c in self.clients],
                "corrupted": [c in self.truth.corrupted for c in self.clients],
                "empty_classes": (counts == 0).sum(axis=1),
            }
        )
        if self.spec.label_noise is not None:
            wrong = [self.mislabelled.get(c, 0) for c in self.clients]
            sizes["noisy"] = [c in self.truth.noisy for c in self.clients]
            sizes["noise_rate"] = np.array(wrong) / np.maximum(sizes["samples"], 1)
        table = pd.concat([sizes, pd.DataFrame(counts, columns=list(self.task.classes))], axis=1)
        table.index = pd.Index(self.clients, name="client")
        return table

    def save(self, folder: Path | str) -> Path:
        """Writes ``condition.json``, ``clients.parquet``, ``truth.parquet`` and ``test.parquet``.

        Each file is replaced atomically and ``condition.json`` comes last, so that a folder without it, or
        with one that does not fit, is recognised by :func:`load`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tables = self._tables()
        for name, table in tables.items():
            _replace(folder / name, partial(table.to_parquet, index=False))
        digests = {name: _table_digest(table) for name, table in tables.items()}
        content = {"hash": self.hash, **self._header(), "spec": self.spec.model_dump(mode="json"), "files": digests}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        _replace(folder / "condition.json", lambda file: file.write_text(text, encoding="utf-8"))
        return folder

    def _counts(self) -> np.ndarray:
        counts = [_per_class(self.observed[self.truth.rows.get(name, NOBODY)], self.task) for name in self.clients]
        return np.stack(counts)

    def _header(self) -> dict[str, Any]:
        header = {
            "format": FORMAT,
            "task": {"kind": self.task.kind, "classes": list(self.task.classes)},
            "clients": list(self.clients),
            "seed": self.spec.seed,
            "corruption": self.corruption.key() if self.corruption else None,
        }
        if self.spec.label_noise is not None:
            header |= {"format": WITH_LABEL_NOISE, "noisy": list(self.truth.noisy)}
        if self.spec.public is not None:
            header |= {"format": WITH_PUBLIC, "public": [[s, self.digests.get(s, "")] for s in self.public]}
        return header

    def _tables(self) -> dict[str, pd.DataFrame]:
        truth = self.truth

        def table(samples: np.ndarray, **columns: Any) -> pd.DataFrame:
            lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in columns.items()}
            return pd.DataFrame({"sample": samples.tolist(), **lists})

        def digests(samples: np.ndarray) -> list[str]:
            return [self.digests.get(s, "") for s in samples]

        corrupted = np.isin(truth.clients, truth.corrupted)
        return {
            "clients.parquet": table(
                truth.samples, client=truth.clients, observed=self.observed, digest=digests(truth.samples)
            ),
            "truth.parquet": table(truth.samples, label=truth.labels, corrupted=corrupted),
            "test.parquet": table(
                truth.test_samples,
                label=truth.test_labels,
                client=truth.test_clients,
                digest=digests(truth.test_samples),
            ),
        }


def load(folder: Path | str) -> Condition:
    """Reads a stored condition and verifies it.

    Raises:
        DataError: a file is missing, was altered since it was stored, or comes from a newer version.
    """
    folder = Path(folder)
    missing = [n for n in ("condition.json", *TABLES) if not (folder / n).is_file()]
    if missing:
        raise DataError(f"{', '.join(missing)} is missing.", where=str(folder), fix="Generate the condition again.")
    file = folder / "condition.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] not in (FORMAT, WITH_LABEL_NOISE, WITH_PUBLIC):
            raise DataError(f"Format {content['format']} is not known here.", where=str(file), fix="Update medfed.")
        tables = {name: pd.read_parquet(folder / name) for name in TABLES}
        digests = {name: _table_digest(table) for name, table in tables.items()}
        altered = [name for name in TABLES if digests[name] != content["files"][name]]
        condition = None if altered else _assemble(content, tables)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The stored condition cannot be read ({type(error).__name__}).",
            where=str(folder),
            fix="Generate it again.",
        ) from error
    if condition is None or condition.hash != content["hash"]:
        raise DataError(
            f"{', '.join(altered) or 'condition.json'} was altered since the condition was stored.",
            where=str(folder),
            fix="Restore the file, or generate the condition again.",
        )
    return condition


def _assemble(content: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Condition:
    task = Task(content["task"]["kind"], tuple(content["task"]["classes"]))
    clients, truth, test = (tables[name] for name in TABLES)

    def labels(column: pd.Series) -> np.ndarray:
        if task.kind == "multiclass":
            return column.to_numpy(dtype=np.int64)
        return np.array([list(row) for row in column], dtype=np.float32).reshape(len(column), task.num_classes)

    def text(column: pd.Series) -> np.ndarray:
        return column.astype(str).to_numpy(dtype=object)

    owners = text(clients["client"])
    public = [(str(sample), str(digest)) for sample, digest in content.get("public", ())]
    pairs = [*zip(clients["sample"], clients["digest"]), *zip(test["sample"], test["digest"]), *public]
    return Condition(
        spec=ConditionSpec.model_validate(content["spec"]),
        task=task,
        clients=tuple(content["clients"]),
        observed=labels(clients["observed"]),
        truth=Truth(
            samples=text(truth["sample"]),
            clients=owners,
            labels=labels(truth["label"]),
            corrupted=tuple(sorted(set(owners[truth["corrupted"].to_numpy(dtype=bool)]))),
            test_samples=text(test["sample"]),
            test_labels=labels(test["label"]),
            test_clients=text(test["client"]),
            noisy=tuple(content.get("noisy", ())),
        ),
        digests={sample: digest for sample, digest in pairs if digest},
        public=tuple(sample for sample, _ in public),
    )


def _rows_by(clients: np.ndarray) -> dict[str, np.ndarray]:
    return {str(k): v for k, v in pd.Series(range(len(clients))).groupby(clients).indices.items()}


def _per_class(labels: np.ndarray, task: Task) -> np.ndarray:
    if task.kind == "multilabel":
        return labels.sum(axis=0).astype(np.int64)
    return np.bincount(labels, minlength=task.num_classes)


def _table_digest(table: pd.DataFrame) -> str:
    """sha256 over the values, column by column, whatever the file format made of their types."""
    digest = hashlib.sha256()
    for name in table.columns:
        values = [v.tolist() if isinstance(v, np.ndarray) else v for v in table[name].tolist()]
        digest.update(json.dumps([name, values], ensure_ascii=False).encode())
    return digest.hexdigest()


def _hash(header: Mapping[str, Any], tables: Mapping[str, str]) -> str:
    text = json.dumps([header, tables], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

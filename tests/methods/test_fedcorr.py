"""FedCorr: mixtures against scikit-learn, all stages against NumPy, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise_oracle import adam, followed, mean_of, ones, softmax, theta_of
from planted import memories, watch
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import NearestNeighbors
from test_fednoro import six_clients
from tiny_federation import Federation, client_data, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.fedcorr import FedCorrSettings, Mixed, measured
from medfed.methods.registry import resolve_method
from medfed.reliability.identification import split_by_score, suspicious
from medfed.seeding import numpy_generator, torch_generator
from medfed.training.objectives import ClassificationObjective

SECTION = {"name": "fedcorr", "iterations": 2, "fine_tuning": 1, "local_epochs": 2, "neighbours": 4, "confidence": 0.3}


def mixture(values):
    """Members of the component with the higher mean."""
    points = np.asarray(values, float)[:, None]
    fitted = GaussianMixture(2, random_state=0).fit(points)
    return fitted.predict(points) == fitted.means_[:, 0].argmax()


def test_clients_and_samples_are_split_as_by_scikit_learn():
    generator = np.random.default_rng(0)
    scores = {f"c{k}": float(s) for k, s in enumerate(np.r_[generator.normal(2, 0.1, 5), generator.normal(5, 1, 3)])}
    high = dict(zip(scores, mixture(list(scores.values()))))
    verdict = split_by_score(scores)
    assert verdict.noisy == tuple(c for c, h in high.items() if h)
    assert all((p > 0.5) == (not high[c]) for c, p in verdict.posterior.items())
    losses = generator.gamma(2, 1, 40).astype(np.float32)
    assert np.array_equal(suspicious(torch.tensor(losses)).numpy(), mixture(losses))


def test_what_cannot_be_split():
    assert split_by_score({"a": 1.0, "b": 1.0}).clean == ("a", "b")
    assert split_by_score({"a": 1.0, "b": float("nan")}).status == {"a": "clean", "b": "undetermined"}
    assert split_by_score({}).status == {}
    assert not suspicious(torch.ones(5)).any()
    assert not suspicious(torch.tensor([3.0])).any()
    assert suspicious(torch.tensor([0.1, 0.2, float("inf"), 5.0])).tolist() == [False, False, True, True]


def test_losses_of_the_released_form_are_those_of_a_second_softmax():
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 4.0], [1.0, 0.0]]), torch.tensor([0, 0, 1])
    _, plain = measured(logits, labels, 2)
    _, twice = measured(logits, labels, 2, released=True)
    p = softmax(logits.double().numpy())
    rows = np.arange(3)
    assert np.allclose(plain, -np.log(p[rows, labels]))
    assert np.allclose(twice, -np.log(softmax(p)[rows, labels]))


@pytest.mark.parametrize("first_of", [None, 4])
def test_way_back_has_the_gradient_of_a_norm_and_none_at_its_beginning(first_of):
    network = torch.nn.Linear(2, 2, dtype=torch.float64)
    anchor = {k: t.clone() for k, t in network.state_dict().items()}
    batch = {"image": torch.zeros(2, 2, dtype=torch.float64), "label": torch.tensor([0, 1])}
    objective = Mixed(ClassificationObjective("multiclass"), 0.0, anchor, 3.0, first_of, (0,))
    objective(network, batch).backward()
    assert torch.isfinite(network.weight.grad).all()
    assert not network.weight.grad.any()
    with torch.no_grad():
        network.weight += torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    network.zero_grad()
    objective(network, batch).backward()  # second batch of an epoch of four samples
    assert torch.allclose(network.weight.grad, torch.tensor([[1.8, 0.0], [0.0, 2.4]], dtype=torch.float64))
    network.zero_grad()
    objective(network, batch).backward()
    assert bool(network.weight.grad.any()) == (first_of is None)


def numpy_train(theta, client, name, round, y, *, weight, released):
    x, classes = ones(client), np.eye(3)
    shares, pairs = numpy_generator("mixup", 0, round, name), torch_generator("mixup", 0, round, name)
    seen = [0]

    def gradient(local, batch):
        share = shares.beta(1.0, 1.0)
        other = batch[torch.randperm(len(batch), generator=pairs).numpy()]
        mixed = share * x[batch] + (1 - share) * x[other]
        target = share * classes[y[batch]] + (1 - share) * classes[y[other]]
        g = (softmax(mixed @ local.T) - target).T @ mixed / len(batch)
        way, first = local - theta, seen[0] % len(y) == 0
        seen[0] += len(batch)
        if weight and way.any() and not (released and first):
            g = g + weight * way / np.linalg.norm(way)
        return g

    return adam(theta, followed(client, name, round, 2), gradient)


def numpy_lid(p, released, k=4):
    apart = NearestNeighbors(n_neighbors=k + 1).fit(p).kneighbors(p)[0][:, 1:]
    if released:
        return (-k / (np.log(apart / (apart[:, -1:] + 1e-6)).sum(axis=1) + 1e-6)).mean()
    return (-1 / np.log(apart / apart[:, -1:]).mean(axis=1)).mean()


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_all_stages_are_those_of_the_equations(form, tmp_path):
    released, data = form == "as_released", six_clients()
    done = Federation({**SECTION, "form": form}, data, rounds=4, folder=tmp_path).run()
    theta, sizes, names = theta_of(done.initial), {c: len(d) for c, d in data.items()}, list(data)
    labels = {c: d.labels.numpy().copy() for c, d in data.items()}
    dimensions, levels = dict.fromkeys(names, 0.0), {}
    for round in (1, 2):
        losses = {}
        for c in numpy_generator(0, "visits", round).permutation(names).tolist():
            weight = 5.0 * levels.get(c, 0.0)
            theta = numpy_train(theta, data[c], c, round, labels[c], weight=weight, released=released)
            p = softmax(ones(data[c]) @ theta.T)
            dimensions[c] += numpy_lid(p, released)
            losses[c] = -np.log((softmax(p) if released else p)[np.arange(len(p)), labels[c]])
        assert np.abs(theta_of(done.models[round - 1]) - theta).max() < 1e-5
        noisy = [c for c, high in zip(names, mixture(list(dimensions.values()))) if high]
        assert {c for c, s in done.column("status", round).items() if s == "noisy"} == set(noisy)
        levels = {c: mixture(losses[c].astype(np.float32)).mean() for c in noisy}
        assert done.column("noise_level", round) == pytest.approx(levels)
        for c in noisy:
            p = softmax(ones(data[c]) @ theta.T)
            chosen = np.argsort(-losses[c], kind="stable")[: int(len(p) * levels[c] * 0.5)]
            chosen = chosen[p[chosen].max(axis=1) > 0.3]
            labels[c][chosen] = p[chosen].argmax(axis=1)
        edited = {c: int((labels[c] != data[c].labels.numpy()).sum()) for c in noisy}
        assert done.column("edited", round) == edited
    few = [c for c in names if levels.get(c, 0.0) <= 0.1]
    assert done.records[2]["admitted"] == few
    models = {c: numpy_train(theta, data[c], c, 3, labels[c], weight=0, released=released) for c in few}
    theta = mean_of(models, sizes)
    assert np.abs(theta_of(done.models[2]) - theta).max() < 1e-5
    for c in noisy:
        p = softmax(ones(data[c]) @ theta.T)
        labels[c] = np.where(p.max(axis=1) > 0.3, p.argmax(axis=1), labels[c])
    models = {c: numpy_train(theta, data[c], c, 4, labels[c], weight=0, released=released) for c in names}
    assert np.abs(theta_of(done.models[3]) - mean_of(models, sizes)).max() < 1e-5
    kept = memories(done, tmp_path)
    for c in names:
        assert np.array_equal(kept[c].get("labels", data[c].labels).numpy(), labels[c])
        assert "losses" not in kept[c]


def test_first_stage_is_one_client_after_another():
    done = Federation({**SECTION, "correct": False}, three_clients(), rounds=3)
    seen = watch(done)
    done.run()
    visits = [options["clients"] for task, options, _ in seen if task == "train" and len(options["clients"] or ()) == 1]
    first = [c for (c,) in visits[:3]]
    assert sorted(first) == ["c0", "c1", "c2"]
    assert [c for (c,) in visits[3:6]] != first  # another order, with this seed
    sent = [options["message"].group("model") for task, options, _ in seen[:3]]
    came = [replies.replies[0].group("model") for _, _, replies in seen[:2]]
    assert same_state(sent[1], came[0])
    assert same_state(sent[2], came[1])
    asked = [options["message"].values["ratio"] for task, options, _ in seen if task == "correct"]
    assert asked == [0.0] * len(asked)


def test_noise_levels_are_estimated_also_where_no_label_is_corrected(tmp_path):
    def run(correct):
        section = {**SECTION, "iterations": 1, "correct": correct}
        return Federation(section, six_clients(), rounds=2, folder=tmp_path / str(correct)).run()

    kept, corrected = run(False), run(True)
    assert kept.column("noise_level", 1) == corrected.column("noise_level", 1) != {}
    assert kept.server.notes["levels"].values == corrected.server.notes["levels"].values
    assert set(kept.column("edited", 1).values()) == {0} != set(corrected.column("edited", 1).values())
    assert [r["server"].get("relabelled") for r in kept.records] == [False, None]
    for client, memory in memories(kept, tmp_path / "False").items():
        assert torch.equal(memory.get("labels", six_clients()[client].labels), six_clients()[client].labels)


def test_edges(tmp_path):
    """One client, clients that are alike, clients that drop out, workers, a client of two samples."""
    alone = Federation(SECTION, {"only": client_data([0, 1, 2, 0, 1, 2], seed=4)}, rounds=4).run()
    assert alone.column("status", 1) == {"only": "clean"}
    data = {**six_clients(), "c6": client_data([0, 1], seed=8)}
    options = {"network": "Normed", "rounds": 5, "fraction": 0.5, "dropout": 0.3, "seed": 1}
    one = Federation(SECTION, data, **options).run()
    two = Federation(SECTION, data, workers=2, folder=tmp_path, **options).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert [r["clients"] for r in one.records] == [r["clients"] for r in two.records]
    assert one.records[0]["refused"]
    assert one.column("status", 2)["c6"] == "undetermined"
    assert one.column("dimension", 1).get("c6") is None
    assert len(one.records[4]["asked"]) >= 4


def test_settings():
    _, settings = resolve_method({"name": "fedcorr"})
    assert (settings.iterations, settings.beta, settings.relabel_ratio, settings.clean_level) == (5, 5.0, 0.5, 0.1)
    assert FedCorrSettings().tuned(100) == 55
    assert FedCorrSettings(fine_tuning=0).tuned(100) == 5
    assert FedCorrSettings(fine_tuning=200).tuned(100) == 100
    with pytest.raises(ConfigError, match="leave none of 3 rounds"):
        Federation("fedcorr", three_clients()).run()

"""FedMerit: images of two qualities and wrong labels in one federation, with known features and truth."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from planted import federation, memories, planted, watch
from tiny_federation import PIXELS, Federation, client_data, distance, three_clients

from medfed.data.arrays import ArrayDataset
from medfed.federation.state import load_state, same_state, save_state
from medfed.methods.fedmerit import FedMeritSettings

SIZES = {f"c{k}": (14 + k, 19 - k, 15) for k in range(9)}
DARK = ("c5", "c6", "c7", "c8")
NOISY = ("c1", "c2", "c7", "c8")
SECTION = {"name": "fedmerit", "period": 2, "start": "initial", "salt": {"rho": 0.02}, "measure": None, "beta": 0.4}


def dark(data):
    """Images of another quality: half of them inverted, and all darker."""
    flip = np.arange(PIXELS) % 2 == 0
    pixels = data.images.reshape(len(data.images), -1).astype(float)
    pixels = np.where(flip, 255 - pixels, pixels) * 0.7
    return ArrayDataset(pixels.round().astype(np.uint8).reshape(data.images.shape), data.rows, data.labels)


def world(noisy=NOISY, bad=DARK, rate=0.5):
    made = planted(SIZES, noisy=noisy, rate=rate).data
    return {c: dark(d) if c in bad else d for c, d in made.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = federation(SECTION, world(), rounds=4, folder=folder)
    seen = watch(done)
    return done.run(), seen, memories(done, folder)


def test_verdicts_are_right_under_both_qualities(whole):
    done, _, _ = whole
    assert {c for c, s in done.column("status", 1).items() if s != "clean"} == set(NOISY)
    assert done.server.notes["evidence"].values["peers"] == [["c0", "c1", "c2", "c3", "c4"], list(DARK)]


def test_only_clean_clients_are_measured(whole):
    _, seen, _ = whole
    asked = [options["clients"] for task, options, _ in seen if task == "need"]
    assert asked == [["c0", "c3", "c4", "c5", "c6"]] * 4


def numpy_need(theta, data, rho):
    """Loss and sharpness of a linear model with cross-entropy, by hand."""
    x = (data.images[data.rows].reshape(len(data), PIXELS) / np.float32(255) - 0.5) / 0.5
    x, y = np.hstack([x, np.ones((len(x), 1))]).astype(float), np.eye(3)[data.labels.numpy()]

    def loss(at):
        z = x @ at.T
        z = z - z.max(axis=1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        return -(y * np.log(p)).sum(axis=1).mean(), (p - y).T @ x / len(x)

    at, gradient = loss(theta)
    return at, loss(theta + rho * gradient / np.linalg.norm(gradient))[0] - at


@pytest.mark.parametrize("follow", ["perturbed_loss", "sharpness"])
def test_weights_of_two_rounds_by_hand(follow):
    """N_k (1 - 3/2 wrong_k) need_g^q; the need of a group is that of its clean members, averaged over rounds."""
    data = world()
    done = federation({**SECTION, "q": 1.5, "follow": follow, "relabel": False}, data, rounds=2).run()
    needs = None
    for number, model in ((1, done.initial), (2, done.models[0])):
        theta = np.hstack([model["head.weight"].numpy(), model["head.bias"].numpy()[:, None]])
        own = {}
        for c in ("c0", "c3", "c4", "c5", "c6"):
            loss, rise = numpy_need(theta, data[c], 0.02)
            own[c] = rise + (loss if follow == "perturbed_loss" else 0)
        mean = {g: np.average([own[c] for c in g], weights=[len(data[c]) for c in g]) for g in
                (("c0", "c3", "c4"), ("c5", "c6"))}  # fmt: skip
        now = np.array(list(mean.values()))
        needs = now if needs is None else 0.4 * now + 0.6 * needs
        wrong = done.column("wrong_share", number)
        assert set(wrong) == set(NOISY)
        raw = {
            c: len(d) * max(1 - 1.5 * wrong.get(c, 0.0), 0.0) * needs[int(c in DARK)] ** 1.5 for c, d in data.items()
        }
        expected = {c: w / sum(raw.values()) for c, w in raw.items()}
        assert done.column("weight", number) == pytest.approx(expected, rel=1e-4)
        assert {round(v, 6) for v in done.column("need", number).values()} == {round(float(n), 6) for n in needs}


def test_the_model_is_the_mean_by_these_weights_and_the_reference_that_of_clean_clients():
    done = federation({**SECTION, "relabel": False}, world(), rounds=1)
    trained = {}
    train = done.method.tasks["train"]

    def noting(client, message):
        reply = train(client, message)
        trained[client.name] = {k: t.clone() for k, t in reply.group("model").items()}
        return reply

    done.server.engine.host._tasks = {**done.method.tasks, "train": noting}
    done.run()
    weights = done.column("weight", 1)
    mean = {k: sum(weights[c] * trained[c][k] for c in trained) for k in done.initial}
    assert distance(mean, done.models[0]) < 1e-9
    sizes = {c: len(world()[c]) for c in trained if c not in NOISY}
    clean = {k: sum(n * trained[c][k] for c, n in sizes.items()) / sum(sizes.values()) for k in done.initial}
    assert distance(clean, done.server.notes["reference"].group("model")) < 1e-9


def test_targets_are_corrected_among_peers(whole):
    done, seen, kept = whole
    made = planted(SIZES, noisy=NOISY, rate=0.5)
    for c in NOISY:
        right = (kept[c]["labels"].numpy() == made.true[c]).mean()
        assert right > 0.9 > (made.observed(c) == made.true[c]).mean()
    told = [set(o["clients"]) for task, o, _ in seen if task == "describe"]
    assert told == [{"c0", "c3", "c4"}, {"c5", "c6"}] * 2  # before the first round and before the third
    assert set(done.column("edited", 1)) == set(done.column("edited", 3)) == set(NOISY)
    assert done.records[2]["server"]["relabelled"]
    assert done.records[2]["server"]["referenced_classes"] == 3


def test_a_group_without_a_clean_client_keeps_its_labels_and_is_measured_with_a_limit(tmp_path):
    noisy = DARK
    done = federation(SECTION, world(noisy, rate=0.66), rounds=3, folder=tmp_path)
    seen = watch(done)
    done.run()
    assert {c for c, s in done.column("status", 1).items() if s != "clean"} == set(noisy)
    assert not any("labels" in memory for memory in memories(done, tmp_path).values())
    measured = [options["clients"] for task, options, _ in seen if task == "need"]
    assert set(measured[0]) == {"c0", "c1", "c2", "c3", "c4", *DARK}
    first = done.records[0]["clients"]
    own = {c: v["sharpness"] + v["received_loss"] for c, v in first.items()}
    mean = {
        c: np.average([own[c] for c in g], weights=[len(world()[c]) for c in g])
        for g in (("c0", "c1", "c2", "c3", "c4"), DARK)
        for c in g
    }
    assert done.column("need", 1) == pytest.approx({c: min(mean[c], mean["c0"]) for c in SIZES})


def silent_at_first(client, message):
    raise RuntimeError("not there yet")


def test_who_was_not_there_is_judged_at_the_next_checkpoint_by_the_initial_model():
    done = federation(SECTION, world(), rounds=5)
    host, tasks = done.server.engine.host, done.method.tasks
    host._tasks = {
        **tasks,
        "identify": lambda c, m: (silent_at_first if c.name in ("c3", "c8") else tasks["identify"])(c, m),
    }
    seen = watch(done)
    done.run()
    first, later = done.column("status", 1), done.column("status", 3)
    assert {c for c, s in first.items() if s == "undetermined"} == {"c3", "c8"} & set(first)
    assert {c for c, s in later.items() if s != "clean"} == set(NOISY)
    reviews = [options for task, options, _ in seen if task == "review"]
    assert len(reviews) == 1
    assert same_state(reviews[0]["message"].group("reference"), done.initial)
    assert "initial" not in done.server.notes
    assert done.server.notes["evidence"].values["peers"] == [["c0", "c1", "c2", "c3", "c4"], list(DARK)]


def test_verdicts_are_judged_again_where_wanted():
    done = federation({**SECTION, "revise": True}, world(), rounds=3)
    seen = watch(done)
    done.run()
    assert [set(o["clients"]) for task, o, _ in seen if task == "review"] == [set(SIZES)]
    assert {s["calls"] for s in done.server.notes["evidence"].values["shares"].values()} == {2}
    assert {c for c, s in done.column("status", 3).items() if s != "clean"} == set(NOISY)


def test_with_nobody_noisy_weights_follow_need_alone():
    done = federation(SECTION, world(noisy=()), rounds=2).run()
    assert set(done.column("status", 1).values()) == {"clean"}
    weights, need = done.column("weight", 2), done.column("need", 2)
    sizes = {c: sum(n) for c, n in SIZES.items()}
    total = sum(sizes[c] * need[c] for c in sizes)
    assert weights == pytest.approx({c: sizes[c] * need[c] / total for c in sizes})


@pytest.mark.parametrize("noisy", [(), ("c0", "c1", "c6")])
def test_with_one_quality_it_is_oct_fedsir_where_its_own_settings_are_off(noisy):
    data = world(noisy, bad=())
    common = {"period": 2, "identification": "evidence", "revise": True, "teacher_weight": 0.3}
    common |= {"relabelling": "published"}
    usual = federation({"name": "oct_fedsir", **common}, data, rounds=4)
    merit = federation({"name": "fedmerit", **common, "daagg": True, "at_once": False}, data, rounds=4)
    seen = watch(merit)
    usual.run(), merit.run()
    assert "need" not in {task for task, _, _ in seen}
    assert usual.column("status", 4) == merit.column("status", 4)
    for one, other in zip(usual.models, merit.models, strict=True):
        assert distance(one, other) < 1e-9


@pytest.mark.parametrize(("salt_with", "sharp"), [("peers", False), ("always", True)])
def test_sharpness_aware_steps_are_taken_where_images_differ_or_always(salt_with, sharp):
    for bad, expected in ((DARK, True), ((), sharp)):
        done = federation({**SECTION, "salt_with": salt_with}, world(bad=bad), rounds=1)
        seen = watch(done)
        done.run()
        request = next(options["message"] for task, options, _ in seen if task == "train")
        assert ("salt" in request.values) is expected


def test_with_nobody_clean_all_count_by_their_samples():
    """Labels drawn at random everywhere: nobody can be relied on, and training goes on."""
    draw = np.random.default_rng(2)
    data = {
        c: ArrayDataset(d.images, d.rows, torch.from_numpy(draw.integers(0, 3, len(d)))) for c, d in world(()).items()
    }
    done = federation(SECTION, data, rounds=3).run()
    status = done.column("status", 1)
    assert "clean" not in set(status.values())
    assert sum(done.column("weight", 3).values()) == pytest.approx(1)
    assert set(done.column("teacher", 1).values()) == {0.0}
    assert json.dumps(done.records)


def test_one_client_and_clients_of_one_class():
    done = Federation(SECTION, {"only": three_clients()["c0"]}, rounds=3).run()
    assert [done.column("weight", t) for t in (1, 2, 3)] == [{"only": 1.0}] * 3
    data = {"c0": client_data([1] * 6, 1), "c1": client_data([0, 2] * 4, 2), "c2": client_data([0] * 5, 3)}
    for network in ("Softmax", "Normed"):
        done = Federation(SECTION, data, network=network, rounds=3).run()
        assert [r["admitted"] for r in done.records] == [["c0", "c1", "c2"]] * 3
        assert all(torch.isfinite(t).all() for t in done.models[-1].values() if t.is_floating_point())


def test_clients_that_miss_rounds():
    done = federation(SECTION, world(), rounds=7, fraction=0.6, dropout=0.2, seed=3)
    seen = watch(done)
    done.run()
    trained = [tuple(r["admitted"]) for r in done.records]
    assert len(set(trained)) > 3
    for number, record in enumerate(done.records, 1):
        weights = done.column("weight", number)
        assert set(weights) == set(record["admitted"])
        assert sum(weights.values()) == pytest.approx(1)
    measured = [set(o["clients"]) for task, o, _ in seen if task == "need"]
    assert all(len(m) < 5 for m in measured)
    assert {c for m in measured for c in m} <= set(SIZES)


class Killed(BaseException):
    pass


def untimed(records):
    return [{**r, "seconds": 0} for r in records]


@pytest.mark.parametrize(
    ("task", "round"),
    [("identify", 0), ("need", 1), ("train", 2), ("relabel", 1), ("describe", 3), ("relabel", 3), ("train", 3)],
)
def test_a_run_killed_in_any_stage_goes_on_bitwise(whole, tmp_path, task, round):
    done, _, kept = whole
    first = federation(SECTION, world(), rounds=4, folder=tmp_path)
    ask = first.server.ask

    def dying(name, *args, **options):
        replies = ask(name, *args, **options)
        if name == task and first.server.round == round:
            raise Killed
        return replies

    first.server.ask = dying
    with pytest.raises(Killed):
        first.run()
    second = federation(SECTION, world(), rounds=4, folder=tmp_path).run()
    models = [*first.models, *second.models]
    assert all(same_state(a, b) for a, b in zip(models, done.models, strict=True))
    assert untimed([*first.records, *second.records]) == untimed(done.records)
    again = memories(second, tmp_path)
    for client, memory in kept.items():
        assert memory.keys() == again[client].keys()
        if "labels" in memory:
            assert torch.equal(memory["labels"], again[client]["labels"])


def test_needs_are_part_of_the_checkpoint(tmp_path):
    done = federation(SECTION, world(), rounds=2, folder=tmp_path).run()
    save_state(done.server.state, tmp_path / "again")
    assert load_state(tmp_path / "again").notes["needs"].values.keys() == {"c0", "c5"}


def test_worker_processes_give_bitwise_the_same(whole, tmp_path):
    done = federation(SECTION, world(), rounds=4, folder=tmp_path, workers=2).run()
    assert all(same_state(a, b) for a, b in zip(done.models, whole[0].models, strict=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"saga": False, "q": 2.0}, "method.q"),
        ({"compare": "all", "beta": 1.0}, "method.beta"),
        ({"identification": "published", "follow": "sharpness"}, "method.follow"),
        ({"daagg": True, "purity": True}, "method.purity"),
    ],
)
def test_settings_without_effect_are_named(given, said):
    found = FedMeritSettings.model_validate({"period": 2, **given}).check(8)
    assert any("no effect" in line and said in line for line in found)

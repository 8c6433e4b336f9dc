"""What leaves a client in each method, against what ``medfed methods`` says of it."""

from __future__ import annotations

import pytest
import torch
from planted import watch
from test_every_method_at_the_edges import SECTIONS
from test_fednoro import six_clients
from test_rhfl import public
from tiny_federation import Federation

from medfed.federation.messages import Refusal
from medfed.federation.state import same_state
from medfed.methods.registry import METHODS, get_method

TRAINING = {"samples", "loss", "steps", "skipped"}
"""How local training went; every method sends it."""
EVIDENCE = {"observed_classes", "descriptor_mean", "descriptor_energy", "descriptor_max"}
MORE: dict[str, tuple[set[str], set[str], str]] = {
    "fedavg": (set(), {"model"}, "sample count"),
    "fedprox": (set(), {"model"}, "sample count"),
    "agnostic_fl": (set(), {"model"}, "mini-batch loss"),
    "q_fedavg": ({"received_loss", "loss_power", "update_norm"}, {"model"}, "loss of the received model, length of"),
    "fairfed": ({"received_accuracy"}, {"model"}, "accuracy of the received model"),
    "fedce": ({"minus_score", "validation_samples", "trainable"}, {"model"}, "score of the model without it"),
    "fedga": ({"own_validation", "aggregated_validation"}, {"model"}, "two losses on its validation data"),
    "fedism": ({"sharpness", "received_loss"}, {"model"}, "sharpness, loss of the received model"),
    "fedism_plus": ({"sharpness", "received_loss"}, {"model"}, "sharpness, loss of the received model"),
    "fednoro": ({"observed_classes", "class_losses", "class_loss"}, {"model"}, "once, its mean loss by class"),
    "fedlsr": (set(), {"model"}, "sample count"),
    "fedelc": (
        {"observed_classes", "class_losses", "class_loss", "edited"},
        {"model"},
        "labels changed (number); once, its mean loss by class",
    ),
    "fedcorr": (
        {"dimension", "noise_level", "proposed", "edited"},
        {"model"},
        "labels changed (number); in the first stage mean intrinsic dimension, estimated noise level",
    ),
    "rofl": ({"edited"}, {"model", "centroids"}, "labels changed (number), class centroids"),
    "rhfl": ({"own_loss", "public_loss"}, {"public"}, "predictions on public images, mean loss"),
    "fedned": ({"confident", "edited"}, {"model", "second"}, "where judged noisy a second model"),
    "pruning": (EVIDENCE, {"model"}, "three descriptors"),
}
"""Values besides those of training, groups of tensors, and what the listing says of them."""


@pytest.mark.parametrize("name", MORE)
def test_nothing_is_sent_that_is_not_listed(name):
    shown = public(12) if get_method(name).public else None
    section = {"name": name, **SECTIONS.get(name, {})}
    done = Federation(section, six_clients(), network="Normed", rounds=3, public=shown)
    seen = watch(done)
    replies = []
    serve = done.server.engine.host.serve
    done.server.engine.host.serve = lambda *a: replies.append(serve(*a)) or replies[-1]
    done.run()
    assert seen
    values, groups, words = MORE[name]
    told = {key for reply in replies for key in reply.values}
    assert told <= TRAINING | values
    assert values <= told, "the table names what is not sent"
    assert {group for reply in replies for group in reply.groups()} == groups
    assert words in get_method(name).sends
    models = [r.group("model") for r in replies if r.group("model")]
    assert all(m.keys() == done.initial.keys() for m in models)
    assert all(isinstance(t, torch.Tensor) for m in models for t in m.values())


POSTERIOR = {"relabelling": "posterior", "identification": "evidence", "period": 1}
WIRED = {
    **{name: {"name": name, **SECTIONS.get(name, {})} for name in METHODS if not get_method(name).public},
    "oct_fedsir, posterior": {"name": "oct_fedsir", **POSTERIOR},
    "fedsir, posterior": {"name": "fedsir", **POSTERIOR},
    "fedmerit, published": {"name": "fedmerit", "period": 1, "identification": "published"},
}


def over_the_wire(serve, seen):
    """A host that is sent, and sends, the bytes of the secure federation."""
    pytest.importorskip("nvflare", reason="the secure federation needs NVFlare")
    from medfed.engines.nvflare.wire import own_values, pack_answer, pack_request, read_answer, read_request

    def served(name, request):
        body, own = pack_request(request, "run"), own_values(request, name)
        received = read_request(body, own, name, "run", None)
        same_message(received.message_for(name), request.message_for(name))
        answer = serve(name, received)
        assert not isinstance(answer, Refusal), answer
        facts = {"run": "run", "task": request.task, "round": request.round, "step": request.step}
        back = read_answer(pack_answer(answer, name, facts), name, "run", request.step, None)
        same_message(back, answer)  # at once: the server goes on to work with the tensors
        seen.append(request.task)
        return back

    return served


def same_message(one, other):
    assert one.values == other.values
    assert list(one.tensors) == list(other.tensors)
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype, name
        assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize("case", WIRED)
def test_messages_hold_only_what_the_wire_carries(case):
    """A federation whose every message travels as bytes is bitwise the one in which messages are handed over."""
    rounds = 2  # a checkpoint before the second
    plain = Federation(WIRED[case], six_clients(), network="Normed", rounds=rounds)
    plain.run()
    done = Federation(WIRED[case], six_clients(), network="Normed", rounds=rounds)
    seen = []
    done.server.engine.host.serve = over_the_wire(done.server.engine.host.serve, seen)
    done.run()
    assert set(seen) >= ({"describe", "relabel"} if "posterior" in case else {"train"} if case == "fedavg" else set())
    assert seen
    assert all(same_state(a, b) for a, b in zip(done.models, plain.models, strict=True))


def test_every_method_is_here_or_tested_where_it_is():
    elsewhere = {"fedsir", "oct_fedsir", "fedmerit"}  # test_fedsir.py, test_oct_fedsir.py, test_fedmerit.py
    assert set(MORE) | elsewhere == set(METHODS)


def test_the_listing_says_what_all_send(capsys):
    from typer.testing import CliRunner

    from medfed.cli import app

    told = " ".join(CliRunner().invoke(app, ["methods"]).output.split())
    assert "Every client also sends its mean training loss and the number of steps taken and skipped." in told

"""What staged protocols need of the contract: values for one client, several means, stages outside rounds, quorums."""

from __future__ import annotations

import functools

import pytest
import torch
from toy import TASK, TASKS, ToyData, make_server, round_of

from medfed.engines.host import ClientHost
from medfed.engines.local import LocalEngine
from medfed.engines.pool import PoolEngine
from medfed.federation.loop import round_record, run_rounds
from medfed.federation.means import Mean
from medfed.federation.messages import Message
from medfed.federation.method import Method, MethodSettings
from medfed.federation.server import Patience
from medfed.federation.state import load_state, save_state

SIZES = {"c0": 1, "c1": 3, "c2": 2}


def told(client, message):
    """Sends back everything that the client was told, and its own vector."""
    return Message.of(
        {"samples": client.num_samples, "told": dict(message.values)},
        model=message.group("model"),
        vector={"v": torch.full((2,), float(client.num_samples))},
    )


def misshapen(client, message):
    """A vector of another length at every client, and none at all at one of them."""
    groups = {"vector": {"v": torch.ones(client.num_samples)}} if client.name != "c0" else {}
    return Message.of({"samples": client.num_samples}, **groups)


def nothing(client, message):
    return None if client.name == "c0" else told(client, message)


def objects(client, message):
    values = {"samples": client.num_samples, **({"found": {1, 2}} if client.name == "c1" else {})}
    return Message.of(values, model=message.group("model"))


def numbers(client, message):
    return Message.of({"samples": client.num_samples, **message.values.get(client.name, {})})


MORE = {**TASKS, "told": told, "misshapen": misshapen, "nothing": nothing, "objects": objects, "numbers": numbers}


def host(folder=None):
    return ClientHost(
        tuple(SIZES), MORE, TASK, lambda n: ToyData(n, SIZES[n]), trainer=None, folder=folder, seed=0
    )  # fmt: skip


@pytest.fixture(params=[1, 2], ids=["in process", "two workers"])
def engine(request):
    engine = LocalEngine(host()) if request.param == 1 else PoolEngine(tuple(SIZES), functools.partial(host), workers=2)
    yield engine
    engine.close()


def test_clients_are_told_their_own_values_and_nobody_elses(engine):
    server = make_server(SIZES, engine=engine)
    own = {"c0": {"status": "clean"}, "c1": {"status": "noisy", "share": 0.3}}
    message = Message.of({"lambda": 0.1, "status": "unknown"}, model=server.model)
    replies = round_of(server, lambda s: s.ask("told", message, each=own, mean="model"))
    assert replies.value("told") == {
        "c0": {"lambda": 0.1, "status": "clean"},
        "c1": {"lambda": 0.1, "status": "noisy", "share": 0.3},
        "c2": {"lambda": 0.1, "status": "unknown"},
    }


def test_one_request_gives_several_means(engine):
    server = make_server(SIZES, engine=engine)
    wanted = {
        "all": Mean("vector"),
        "clean": Mean("vector", {"c0": 1.0, "c2": 3.0}),
        "nobody": Mean("vector", {}),
        "weightless": Mean("vector", {"c1": 0.0}),
    }
    replies = round_of(server, lambda s: s.ask("told", Message.of({}, model=s.model), mean=wanted))
    # all: (1*1 + 3*3 + 2*2) / 6; clean: (1*1 + 3*2) / 4
    assert replies.mean["all"]["v"].tolist() == pytest.approx([14 / 6] * 2)
    assert replies.mean["clean"]["v"].tolist() == [1.75] * 2
    assert sorted(replies.mean) == ["all", "clean"]
    assert [r.group("vector") for r in replies] == [{}, {}, {}]
    assert all(r.group("model") for r in replies)


def test_group_that_was_not_sent_must_look_alike_everywhere(engine):
    server = make_server(SIZES, engine=engine)
    replies = round_of(server, lambda s: s.ask("misshapen", Message(), mean="vector"))
    assert {r.client: r.reason for r in replies.refused} == {
        "c0": "vector is missing",
        "c2": "vector: 'v' has shape (2,), expected (3,)",
    }
    assert replies.mean["vector"]["v"].tolist() == [1.0, 1.0, 1.0]


def test_task_that_returns_no_message_and_values_that_are_not_plain_are_refusals(engine):
    server = make_server(SIZES, engine=engine)
    replies = round_of(server, lambda s: s.ask("nothing", Message.of({}, model=s.model)))
    assert [(r.client, r.reason) for r in replies.refused] == [("c0", "failed with TypeError")]
    replies = round_of(server, lambda s: s.ask("objects", Message.of({}, model=s.model)))
    assert [(r.client, r.reason) for r in replies.refused] == [("c1", "failed with TypeError")]


def test_message_that_is_not_plain_is_the_programs_error(engine):
    server = make_server(SIZES, engine=engine)
    with pytest.raises(TypeError, match=r"value\.x: set is not a plain value"):
        round_of(server, lambda s: s.ask("told", Message.of({"x": {1}})))
    with pytest.raises(TypeError, match=r"each\.c0\.x: Tensor"):
        round_of(server, lambda s: s.ask("told", Message(), each={"c0": {"x": torch.zeros(1)}}))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "sharpness is missing"),
        ({"sharpness": None}, "sharpness is None, not a number"),
        ({"sharpness": "high"}, "sharpness is 'high', not a number"),
        ({"sharpness": True}, "sharpness is True, not a number"),
        ({"sharpness": 10**400}, "value.sharpness is not finite"),
        ({"sharpness": -(10**400)}, "value.sharpness is not finite"),
        ({"sharpness": 0.1, "samples": 10**400}, "value.samples is not finite"),
        ({"sharpness": 0.1, "samples": -1}, "sample count is -1, not above 0"),
        ({"sharpness": 0.1, "samples": True}, "sample count is True, not above 0"),
        ({"sharpness": 0.1, "samples": "many"}, "sample count is 'many', not above 0"),
    ],
)
def test_numbers_that_a_program_needs_are_checked_at_the_door(value, reason):
    server = make_server(SIZES, engine=LocalEngine(host()))
    good = {"c0": {"sharpness": 1}, "c2": {"sharpness": 0.5}}
    message = Message.of({**good, "c1": value})
    replies = round_of(server, lambda s: s.ask("numbers", message, numbers=("sharpness",)))
    assert [(r.client, r.reason) for r in replies.refused] == [("c1", reason)]
    assert replies.value("sharpness") == {"c0": 1, "c2": 0.5}


@pytest.mark.parametrize("weight", [{"c0": 1.0, "c2": 1.0}, {"c0": 1.0, "c1": -1.0, "c2": 1.0}])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), True])
def test_client_without_a_usable_weight_is_left_out(weight, bad):
    server = make_server(SIZES, engine=LocalEngine(host()))
    weight = {**weight, **({} if bad is None else {"c1": bad})}
    replies = round_of(server, lambda s: s.ask("told", Message.of({}, model=s.model), mean="model", weight=weight))
    assert [(r.client, r.reason) for r in replies.refused] == [("c1", "has no weight")]


def test_weights_that_are_all_zero_keep_the_model_instead_of_raising():
    server = make_server(SIZES, engine=LocalEngine(host()))
    weight = dict.fromkeys(SIZES, 0.0)
    replies = round_of(server, lambda s: s.ask("train", Message.of({}, model=s.model), mean="model", weight=weight))
    assert not replies
    assert {r.reason for r in replies.refused} == {"all weights are zero"}
    report = server.report(replies)
    assert report.warnings == ["train: all weights are zero; the previous model is kept"]
    assert len(report.refused) == 3


def test_quorum_of_a_run_holds_for_its_rounds_and_not_for_a_single_client():
    server = make_server(SIZES, engine=LocalEngine(host()), patience=Patience(quorum=3))

    def cyclic(s):
        """FedCorr's first stage: each client's model becomes the global model."""
        for client in ("c2", "c0", "c1"):
            replies = s.ask("train", Message.of({}, model=s.model), clients=[client], mean="model")
            s.model = replies.mean["model"]
        return s.ask("train", Message.of({}, model=s.model), clients=["c0", "c1"], quorum=3)

    replies = round_of(server, cyclic)
    assert server.model["w"].tolist() == [1.0 + 6, 2.0 + 6]
    assert not replies
    assert {r.reason for r in replies.refused} == {"quorum of 3 not reached (2 admitted)"}


def test_nobody_asked_is_no_failure():
    server = make_server(SIZES, engine=LocalEngine(host()))
    replies = round_of(server, lambda s: s.ask("told", Message(), clients=[]))
    assert not replies
    assert server.report(replies).warnings == []


def test_client_named_twice_is_asked_once():
    server = make_server(SIZES, engine=LocalEngine(host()))
    replies = round_of(server, lambda s: s.ask("told", Message.of({}, model=s.model), clients=["c1", "c0", "c1"]))
    assert replies.clients == ("c0", "c1")


def test_report_of_two_groups_of_clients_counts_both():
    server = make_server(SIZES, engine=LocalEngine(host()))

    def two(s):
        message = Message.of({}, model=s.model)
        one = s.ask("train", message, clients=["c0", "c2"], mean="model")
        return s.report(one, s.ask("train", message, clients=["c1"], mean="model"))

    report = round_of(server, two)
    record = round_record(report, {}, total=1.0, evaluation=0.5)
    assert list(record["clients"]) == ["c0", "c1", "c2"]
    assert report.asked == report.admitted == ("c0", "c1", "c2")
    assert sorted(report.clients) == ["c0", "c1", "c2"]
    assert report.traffic.requests == 2


def test_report_without_replies_counts_those_of_the_last_request():
    server = make_server(SIZES, engine=LocalEngine(host()))
    report = round_of(server, lambda s: (s.ask("told", Message.of({}, model=s.model)), s.report(server={"x": 1}))[1])
    assert report.admitted == ("c0", "c1", "c2")
    assert (report.clients, report.server) == ({}, {"x": 1})


def test_program_that_forgets_its_report_is_stopped():
    server = make_server(SIZES, engine=LocalEngine(host()))
    with pytest.raises(RuntimeError, match="left round 1 without yielding"):
        for _ in server.rounds():
            pass


def staged(server, settings):
    """Two rounds, an exchange between rounds, the rest: the shape of FedNoRo and FedELC, with one before them all."""

    def ask(name, task="told", **options):
        replies = server.ask(task, Message.of({"stage": name}, model=server.model), **options)
        server.report(replies, server={name: len(replies)})
        return Message(values={"clients": list(replies.clients)})

    server.once("before", lambda: ask("before", "crash", each={c: {"who": "c1"} for c in SIZES}))
    for _ in server.rounds(until=2):
        yield server.report(server.ask("told", Message.of({}, model=server.model)))
    server.once("between", lambda: ask("between", clients=["c0"]))
    for round in server.rounds():
        if round == 4:
            server.once("within", lambda: ask("within", clients=["c2"]))
        yield server.report(server.ask("told", Message.of({}, model=server.model), clients=["c1", "c2"]))


class Killed(BaseException):
    pass


def run(folder, kill_at=None):
    records, saves = [], []

    def save(state):
        saves.append(1)
        save_state(state, folder / "checkpoint")
        if len(saves) == kill_at:
            raise Killed

    state = load_state(folder / "checkpoint")
    options = {"state": state} if state else {}
    server = make_server(SIZES, engine=LocalEngine(host(folder / "clients")), rounds=5, save=save, **options)
    try:
        method = Method("staged", "", "", staged, MORE)
        run_rounds(method, MethodSettings(), server, evaluate=lambda s: {}, append=records.append)
    except Killed:
        return records, load_state(folder / "checkpoint").round
    return records, 5


def test_what_is_asked_outside_a_round_is_in_the_record_of_the_next_one(tmp_path):
    records, _ = run(tmp_path)
    size = 2 * 4 + 8
    assert [r["bytes"]["down"] for r in records] == [6 * size, 3 * size, 3 * size, 3 * size, 2 * size]
    assert [r["server"] for r in records] == [{"before": 2}, {}, {"between": 1}, {"within": 1}, {}]
    assert records[0]["refused"] == [{"client": "c1", "reason": "failed with RuntimeError"}]
    assert records[0]["admitted"] == ["c0", "c1", "c2"]
    assert [r["asked"] for r in records[2:4]] == [["c0", "c1", "c2"], ["c1", "c2"]]


@pytest.mark.parametrize("kill_at", range(1, 9))
def test_records_of_stages_are_the_same_after_a_kill(tmp_path, kill_at):
    whole, _ = run(tmp_path / "whole")
    first, done = run(tmp_path / "killed", kill_at)
    second, _ = run(tmp_path / "killed")
    both = [r for r in first if r["round"] <= done] + second
    assert [{**r, "seconds": 0} for r in both] == [{**r, "seconds": 0} for r in whole]


def test_stage_ends_with_the_run():
    server = make_server(SIZES, engine=LocalEngine(host()), rounds=1)
    seen = []
    for stage in (2, None):
        for round in server.rounds(until=stage):
            seen.append(round)
            server.state.round = round
    assert seen == [1]


def test_what_is_asked_between_stages_without_once_is_in_the_next_record_too():
    server = make_server(SIZES, engine=LocalEngine(host()), rounds=2)
    message = Message.of({}, model=server.model)
    reports = []
    for stage in (1, 2):
        server.ask("told", message, clients=["c0"])
        for round in server.rounds(until=stage):
            reports.append(server.report(server.ask("told", message, clients=["c1"])))
            server.state.round = round
    assert [(r.round, r.asked, r.traffic.requests) for r in reports] == [
        (1, ("c0", "c1"), 2),
        (2, ("c0", "c1"), 2),
    ]


def test_once_needs_no_checkpoint_and_is_done_once():
    server = make_server(SIZES, engine=LocalEngine(host()))
    calls = []
    for _ in range(2):
        note = server.once("first", lambda: calls.append(1) or Message(values={"a": 1}))
        assert note.values == {"a": 1}
    assert calls == [1]


def test_client_memory_follows_the_steps_of_the_server_and_does_not_pile_up(tmp_path):
    server = make_server(SIZES, engine=LocalEngine(host(tmp_path)), rounds=12)
    asked = []
    for round in server.rounds():
        asked.append(server.ask("remember", Message.of({}, model=server.model)).value("asked")["c0"])
        server.state.round = round
        server.save()
    assert asked == list(range(1, 13))
    assert len(list((tmp_path / "c0").iterdir())) <= 3


def test_once_counts_once_and_refuses_what_no_checkpoint_can_hold():
    server = make_server(SIZES, engine=LocalEngine(host()))
    for _ in range(3):
        server.once("first", lambda: server.ask("told", Message()) and Message())
    assert server.report().traffic.requests == 1
    with pytest.raises(TypeError, match=r"second\.x: set"):
        server.once("second", lambda: Message(values={"x": {1}}))
    assert "second" not in server.notes


def test_quorum_that_is_missed_admits_nobody_in_the_record():
    server = make_server(SIZES, engine=LocalEngine(host()))
    report = round_of(server, lambda s: (s.ask("told", Message(), quorum=4), s.report())[1])
    assert report.admitted == ()
    assert {r.reason for r in report.refused} == {"quorum of 4 not reached (3 admitted)"}


def test_seconds_are_those_of_waiting_for_clients():
    server = make_server({"c0": 1, "c1": 1}, rounds=1)
    report = round_of(server, lambda s: s.report(*[s.ask("slow", Message.of({}, model=s.model)) for _ in range(2)]))
    assert 0.2 <= report.seconds < 30


def test_weight_that_a_reply_must_bring_and_does_not():
    server = make_server(SIZES, engine=LocalEngine(host()))
    message = Message.of({"c0": {"share": 0.5}, "c1": {"share": -1}, "c2": {"share": "big"}}, model=server.model)

    def weigh(s):
        return s.ask("numbers", message, mean={"none": Mean("model", "share")}, expect={})

    replies = round_of(server, weigh)
    reasons = {r.client: r.reason for r in replies.refused}
    assert reasons == dict.fromkeys(SIZES, "model: 2 tensors missing, first 'w'")
    server = make_server(SIZES, engine=LocalEngine(host()))
    replies = round_of(server, lambda s: s.ask("told", Message.of({}, model=s.model), mean="vector", weight="share"))
    assert {r.reason for r in replies.refused} == {"no usable weight 'share'"}


def test_record_holds_scalars_and_what_is_undefined_but_no_lists():
    server = make_server(SIZES, engine=LocalEngine(host()))
    values = {"c1": {"text": "a", "none": None, "flag": True, "list": [1], "map": {"a": 1}}}
    report = round_of(server, lambda s: s.report(s.ask("numbers", Message.of(values))))
    assert report.clients["c1"] == {"samples": 3, "text": "a", "none": None, "flag": True}

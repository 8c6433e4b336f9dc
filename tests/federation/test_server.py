"""Asking, admitting, averaging: what a server does with what comes back."""

from __future__ import annotations

import pytest
import torch
from toy import initial_model, make_server, round_of

from medfed.federation.messages import Message
from medfed.federation.server import Patience

SIZES = {"c0": 1, "c1": 3}


def ask(task: str = "train", **options):
    values = options.pop("values", {})
    return lambda server: server.ask(task, Message.of(values, model=server.model), **options)


def test_streamed_mean_is_weighted_by_samples():
    server = make_server(SIZES)
    replies = round_of(server, ask(mean="model"))
    # c0 adds 1 (weight 1), c1 adds 3 (weight 3): mean addition is (1*1 + 3*3) / 4 = 2.5
    assert torch.equal(replies.mean["model"]["w"], torch.tensor([3.5, 4.5]))


def test_integer_buffers_come_from_the_first_client_and_stay_integers():
    replies = round_of(make_server(SIZES), ask(mean="model"))
    count = replies.mean["model"]["count"]
    assert count.dtype == torch.int64
    assert count.item() == 4


def test_streamed_groups_are_not_kept_but_others_are():
    replies = round_of(make_server(SIZES), ask(mean="model"))
    assert [r.group("model") for r in replies] == [{}, {}]
    kept = round_of(make_server(SIZES), ask())
    assert torch.equal(kept.states("model")["c1"]["w"], torch.tensor([4.0, 5.0]))


def test_reply_of_numbers_alone_is_admitted_where_nothing_is_to_be_averaged():
    replies = round_of(make_server(SIZES), ask("measure"))
    assert replies.value("sharpness") == {"c0": 0.5, "c1": 1.5}


def test_reply_without_the_group_to_average_is_refused():
    replies = round_of(make_server(SIZES), ask("measure", mean="model"))
    assert not replies
    assert "model: 2 tensors missing" in replies.refused[0].reason


def test_given_weights_are_used_instead_of_samples():
    replies = round_of(make_server(SIZES), ask(mean="model", weight={"c0": 0.75, "c1": 0.25}))
    assert torch.allclose(replies.mean["model"]["w"], torch.tensor([2.5, 3.5]))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", "NaN"),
        ("infinity", "NaN or infinite"),
        ("missing", "missing, first 'w'"),
        ("unexpected", "unexpected tensors, first 'extra'"),
        ("shape", "shape (1, 2), expected (2,)"),
        ("dtype", "dtype torch.float32, expected torch.int64"),
        ("no samples", "sample count is 0"),
        ("nan value", "value.loss is not finite"),
        ("nan nested", "per_class.a[1] is not finite"),
    ],
)
def test_bad_reply_leaves_its_client_out_with_the_reason(kind, reason):
    server = make_server(SIZES)
    replies = round_of(server, ask("odd", values={"kinds": {"c1": kind}}, mean="model"))
    assert replies.clients == ("c0",)
    assert reason in replies.refused[0].reason
    assert torch.equal(replies.mean["model"]["w"], initial_model()["w"])


def test_all_replies_bad_leaves_no_mean_and_the_previous_model():
    server = make_server(SIZES)
    replies = round_of(server, ask("odd", values={"kinds": {"c0": "nan", "c1": "nan"}}, mean="model"))
    assert not replies
    assert replies.mean == {}
    assert torch.equal(server.model["w"], initial_model()["w"])


def test_crash_is_that_clients_refusal_and_names_no_file(tmp_path):
    server = make_server(SIZES, tmp_path)
    replies = round_of(server, ask("crash", values={"who": "c0"}, mean="model"))
    assert replies.clients == ("c1",)
    assert replies.refused[0].reason == "failed with RuntimeError"
    assert "secret/path" in (tmp_path / "c0" / "errors.log").read_text()


def test_unknown_task_is_refused_with_its_name():
    replies = round_of(make_server(SIZES), ask("tarin"))
    assert [r.reason for r in replies.refused] == ["knows no task 'tarin'"] * 2


def test_quorum_counts_admitted_replies_only():
    server = make_server(SIZES, patience=Patience(quorum=2))
    replies = round_of(server, ask("odd", values={"kinds": {"c0": "nan"}}, mean="model"))
    assert not replies
    assert replies.mean == {}
    report = server.report(replies)
    assert {r.client for r in report.refused} == {"c0", "c1"}
    assert "quorum of 2 not reached (1 admitted)" in report.warnings[0]


def test_sampling_draws_the_same_clients_again_and_differs_between_rounds():
    sizes = {f"c{i}": i + 1 for i in range(10)}
    draws = [
        [server.participants() for _ in server_rounds(server)]
        for server in (make_server(sizes, fraction=0.3), make_server(sizes, fraction=0.3))
    ]
    assert draws[0] == draws[1]
    assert all(len(d) == 3 and list(d) == sorted(d) for d in draws[0])
    assert len(set(draws[0])) > 1


def server_rounds(server):
    for round in server.rounds():
        yield round
        server.state.round = round


def test_dropout_silences_a_client_for_a_whole_round_and_is_recorded():
    sizes = {f"c{i}": 1 for i in range(20)}
    server = make_server(sizes, dropout=0.5, rounds=1)

    def twice(server):
        message = Message.of({}, model=server.model)
        return server.ask("train", message), server.ask("train", message)

    first, second = round_of(server, twice)
    assert first.clients == second.clients
    assert 2 < len(first) < 18
    assert {r.reason for r in first.refused} == {"did not answer (simulated dropout)"}


def test_report_counts_bytes_of_both_ways():
    server = make_server(SIZES)
    replies = round_of(server, ask(mean="model"))
    report = server.report(replies, weight={"c0": 0.25, "c1": 0.75})
    size = 2 * 4 + 8
    assert (report.traffic.down, report.traffic.up) == (2 * size, 2 * size)
    assert report.clients["c1"] == {"samples": 3, "loss": 0.5, "weight": 0.75}


def test_message_refuses_what_is_no_plain_value():
    from medfed.federation.messages import check_plain

    with pytest.raises(TypeError, match=r"value\.a\[1\]: ndarray"):
        check_plain({"a": [1, __import__("numpy").zeros(2)]})

"""A ledger that cannot be written: a site refuses, a server ends the run; neither hangs or falls silent."""

from __future__ import annotations

import threading

import pytest
import torch
from flare import flare
from toy import TASK, TASKS, ToyData, make_server, round_of

from medfed.engines.host import ClientHost
from medfed.engines.nvflare.engine import NVFlareEngine, Window
from medfed.engines.nvflare.site import Desk
from medfed.engines.nvflare.wire import TASK as NAME
from medfed.engines.nvflare.wire import own_values, pack_answer, pack_request, unpack
from medfed.errors import FederationError
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal
from medfed.federation.server import Patience
from medfed.ledger import LEDGER, Ledger, read_ledger

LIMIT = 1 << 20
MODEL = {"w": torch.ones(2), "count": torch.tensor(3)}
FULL = "the ledger cannot be written (No space left on device)."


def fails(monkeypatch, ledger, times):
    """Lets the next appends fail as on a full disk."""
    append, left = ledger.append, [times]

    def full(*args, **facts):
        if left[0] > 0:
            left[0] -= 1
            raise FederationError(FULL, where="/secret/ledger.jsonl", fix="Make room.")
        return append(*args, **facts)

    monkeypatch.setattr(ledger, "append", full)


def asked(desk, step):
    request = Request("train", 1, step, 0, Message.of({}, model=MODEL), {})
    return unpack(desk.answer(NAME, pack_request(request, "r"), own_values(request, "c0")), LIMIT)


def make_desk(tmp_path, ledger, log):
    data = ToyData("c0", 2)
    return Desk(
        "c0",
        "r",
        lambda: ClientHost(("c0",), TASKS, TASK, lambda _: data, None, tmp_path / "clients", 0),
        LIMIT,
        ledger,
        log,
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_site_that_cannot_write_its_ledger_refuses_and_is_back_when_it_can(tmp_path, monkeypatch, times):
    ledger, told = Ledger(tmp_path / LEDGER), []
    desk = make_desk(tmp_path, ledger, told.append)
    fails(monkeypatch, ledger, times)
    header, message = asked(desk, 1)
    assert (header["kind"], header["reason"]) == ("refusal", f"cannot take part: {FULL}")
    assert (header["run"], header["step"]) == ("r", 1)
    assert not message.tensors
    assert told == [f"/secret/ledger.jsonl: {FULL} Make room."]
    assert asked(desk, 2)[0]["kind"] == "reply"
    kinds = ["refusal", "reply"] if times == 1 else ["reply"]
    assert [e["kind"] for e in read_ledger(ledger.path)] == kinds


def test_a_site_without_room_for_a_word_of_what_went_wrong_answers(tmp_path, monkeypatch):
    def log(_):
        raise OSError(28, "No space left on device")

    ledger = Ledger(tmp_path / LEDGER)
    fails(monkeypatch, ledger, 9)
    assert asked(make_desk(tmp_path, ledger, log), 1)[0]["kind"] == "refusal"

    def fail():
        raise ValueError

    assert unpack(Desk("c0", "r", fail, LIMIT, None, log).answer("unknown", b"", ""), LIMIT)[0]["kind"] == "refusal"
    assert asked(Desk("c0", "r", fail, LIMIT, None, log), 1)[0]["reason"] == "failed with ValueError"


class Sites:
    """Sites that answer at once, from a thread each as in NVFlare."""

    def __init__(self):
        self.errors = []

    def connected(self):
        return ["c0", "c1"]

    def send(self, data, own, arrived):
        def answer(site):
            facts = {"run": "r", "task": "train", "round": 1, "step": 1}
            try:
                arrived(site, pack_answer(Message.of({"samples": 1}), site, facts), "")
            except Exception as error:
                self.errors.append(error)

        for site in own:
            threading.Thread(target=answer, args=(site,)).start()
        return object()

    def cancel(self, sent):
        pass

    def aborted(self):
        return False


@pytest.mark.parametrize("error", [FederationError(FULL, where="ledger"), ValueError("unforeseen")])
def test_a_server_that_cannot_take_an_answer_in_ends_the_wait(tmp_path, monkeypatch, error):
    ledger = Ledger(tmp_path / LEDGER)

    def full(*_, **__):
        raise error

    monkeypatch.setattr(ledger, "append", full)
    sites = Sites()
    engine = NVFlareEngine({"c0": "c0", "c1": "c1"}, sites, run="r", limit=LIMIT, ledger=ledger)
    request = Request("train", 1, 1, 0, Message.of({}), {})
    with pytest.raises(FederationError, match="an answer could not be taken in: ") as raised:
        list(engine.exchange(request, ["c0", "c1"], Patience(timeout=10)))
    assert raised.value.__cause__ is error
    assert sites.errors == []  # NVFlare would end the task of all sites


def test_a_run_whose_server_cannot_write_its_ledger_ends_and_says_why(tmp_path, monkeypatch):
    with flare({"c0": 1, "c1": 3}, tmp_path) as f:
        fails(monkeypatch, f.medfed._ledger, 1)
        server = make_server({"c0": 1, "c1": 3}, engine=f.medfed, patience=Patience(timeout=20))
        with pytest.raises(FederationError, match="No space left on device"):
            round_of(server, lambda s: s.ask("train", Message.of({}, model=s.model), mean="model"))


def test_a_failure_after_the_end_of_the_wait_is_left_to_others():
    window = Window(Patience())
    window.put("c0", Refusal("c0", "x"), counts=False)
    window.close()
    assert not window.fail(ValueError())

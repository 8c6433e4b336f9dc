"""Ctrl-C is honoured, at the latest at the end of the round, wherever it strikes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from medfed.conducting import interrupts_remembered


@pytest.fixture(autouse=True)
def default_handler():
    """As in a terminal: what is started in the background has its interrupts ignored."""
    before = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_was_swallowed_ends_the_run_after_the_round(number):
    with interrupts_remembered() as check:
        check()
        with contextlib.suppress(BaseException):  # as a destructor or a callback of C code does
            os.kill(os.getpid(), number)
            time.sleep(5)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(number) is signal.default_int_handler


def test_handlers_of_others_and_other_threads_are_left_alone():
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        with interrupts_remembered() as check:
            assert signal.getsignal(signal.SIGINT) is mine
            check()
    finally:
        signal.signal(signal.SIGINT, before)
    failed = []

    def enter():
        try:
            with interrupts_remembered() as check:
                check()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failed

"""Loads and steps take turns: no piece of a load is worked on while a step runs."""

from __future__ import annotations

import threading
import time

import pytest

from loraplex.adapters.turns import Turns

WAIT_S = 30.0  # for what must come; a test that fails waits so long


def start_loader(turns: Turns, *, num_pieces: int, log: list[str]) -> threading.Thread:
    """A loader thread that writes down each of its pieces."""

    def work() -> None:
        for index in range(num_pieces):
            with turns.piece():
                log.append(f"piece {index}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_without_a_step_a_load_goes_on_at_once() -> None:
    log: list[str] = []
    join(start_loader(Turns(), num_pieces=3, log=log))
    assert log == ["piece 0", "piece 1", "piece 2"]


def test_no_piece_begins_during_a_step() -> None:
    turns = Turns()
    log: list[str] = []
    with turns.step():
        thread = start_loader(turns, num_pieces=2, log=log)
        thread.join(0.05)  # the chance to do what it must not
        log.append("end of step")
    join(thread)
    assert log == ["end of step", "piece 0", "piece 1"]


def test_a_step_waits_for_the_end_of_the_piece_under_way() -> None:
    turns, is_in_piece, may_end = Turns(), threading.Event(), threading.Event()
    log: list[str] = []

    def work() -> None:
        with turns.piece():
            is_in_piece.set()
            may_end.wait(WAIT_S)
            log.append("end of piece")

    def step() -> None:
        with turns.step():
            log.append("step")

    threads = [threading.Thread(target=work, daemon=True), threading.Thread(target=step, daemon=True)]
    threads[0].start()
    assert is_in_piece.wait(WAIT_S)
    threads[1].start()
    threads[1].join(0.05)
    may_end.set()
    join(*threads)
    assert log == ["end of piece", "step"]


def test_two_loaders_never_work_at_once() -> None:
    turns, at_work, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with turns.piece():
                at_work[0] += 1
                most[0] = max(most[0], at_work[0])
                at_work[0] -= 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with turns.step():
            assert at_work == [0]
    join(*threads)
    assert most == [1]


def test_loads_progress_however_closely_step_follows_step() -> None:
    turns = Turns()
    log: list[str] = []
    thread = start_loader(turns, num_pieces=20, log=log)
    for _ in range(10_000):
        if not thread.is_alive():
            break
        with turns.step():
            time.sleep(0.001)
    assert len(log) == 20


def test_a_step_or_piece_that_raises_gives_its_turn_back() -> None:
    turns = Turns()
    log: list[str] = []
    for turn in (turns.step, turns.piece):
        with pytest.raises(KeyboardInterrupt), turn():
            raise KeyboardInterrupt
    join(start_loader(turns, num_pieces=1, log=log))
    assert log == ["piece 0"]


def test_the_budget_is_a_share_of_the_last_step() -> None:
    turns = Turns(share=0.5)
    assert turns.budget_s == 0.0
    with turns.step():
        time.sleep(0.01)
    assert turns.budget_s >= 0.005

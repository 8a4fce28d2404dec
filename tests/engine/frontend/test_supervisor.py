"""When enough is enough."""

from __future__ import annotations

from loraplex.engine.frontend.supervisor import MAX_CRASHES, CrashCounter


def count(events: list[tuple[str, float]]) -> list[int]:
    """Deaths within the window after each death of the timeline."""
    now = 0.0
    counter = CrashCounter(clock=lambda: now)
    counts = []
    for what, now in events:  # noqa: B007 - the counter's clock reads it
        if what == "ready":
            counter.serving()
        else:
            counts.append(counter.count())
    return counts


def test_deaths_within_a_minute_add_up() -> None:
    timeline = [("ready", 0.0), ("death", 1.0), ("ready", 2.0), ("death", 3.0), ("ready", 4.0), ("death", 5.0)]
    assert count(timeline) == [1, 2, MAX_CRASHES]


def test_deaths_far_apart_do_not() -> None:
    timeline = [("ready", 0.0), ("death", 50.0), ("ready", 51.0), ("death", 101.0), ("ready", 102.0), ("death", 170.0)]
    assert count(timeline) == [1, 2, 1]


def test_slow_starts_do_not_hide_a_crash_loop() -> None:
    timeline = [("ready", 0.0), ("death", 1.0), ("death", 400.0), ("ready", 900.0), ("death", 901.0)]
    assert count(timeline) == [1, 2, 3]

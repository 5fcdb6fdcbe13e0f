"""When dead worker processes are replaced."""

from __future__ import annotations

from django_asyncq.fleet.processes import LEAST_SECONDS_BETWEEN_STARTS, Vacancy


def test_process_that_was_ready_is_replaced_at_once_however_often_it_dies() -> None:
    """No pause grows; only two starts need some distance, so that a crash loop leaves the host usable."""
    now = 100.0
    for _ in range(50):
        started_at, now = now, now + 3
        vacancy = Vacancy.after_death(started_at, now)
        assert vacancy == Vacancy(now)
    assert Vacancy.after_death(now, now + 0.1).start_at == now + LEAST_SECONDS_BETWEEN_STARTS


def test_process_that_was_never_ready_is_replaced_after_growing_pauses() -> None:
    """A process that was ready in between begins anew."""
    vacancy, pauses = Vacancy(), []
    for _ in range(2000):
        vacancy = Vacancy.after_failed_start(vacancy.failed_starts + 1, started_at=98.0, now=100.0)
        pauses.append(vacancy.start_at - 100.0)
    assert pauses[:8] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert pauses[-1] == 30
    assert Vacancy.after_death(98.0, 100.0).failed_starts == 0

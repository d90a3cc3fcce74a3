"""Who is idle, and since when."""

from __future__ import annotations

import time

from slime_like.utils.activity import Activity


def test_idle_from_the_last_end_or_from_when_one_began_to_look():
    activity, begin = Activity(), time.monotonic()
    with activity.call(), activity.call():
        assert activity.num_running == 2 and activity.idle_s(begin - 100) == 0
    assert activity.num_running == 0 and activity.idle_s(begin - 100) < 50
    assert activity.idle_s(time.monotonic() + 100) < 0, "nobody has waited yet"


def test_a_call_that_fails_has_ended_too():
    activity = Activity()
    try:
        with activity.call():
            raise KeyError
    except KeyError:
        pass
    assert activity.num_running == 0

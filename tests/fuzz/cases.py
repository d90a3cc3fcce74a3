"""What a fuzz case is, how a part of a corpus is chosen, and what may come of a case."""

from __future__ import annotations

import collections
import dataclasses
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence

from slime_like.errors import SlimeLikeError

#: No input takes longer than this to be taken or refused.
LONGEST_S = 20.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One input. run: takes it, or raises."""

    name: str
    run: Callable[[], object]


class TooSlow(BaseException):
    """Not an Exception, so that nobody takes it for one of an input."""


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """A part of the corpus, the same on every run."""
    return random.Random(17).sample(list(cases), min(count, len(cases)))


def run_all(cases: Sequence[Case]) -> collections.Counter:
    """Outcomes counted. Fails with tracebacks if a case ends in anything but an answer or an error of ours."""

    def ring(*_: object) -> None:
        raise TooSlow

    outcomes: collections.Counter = collections.Counter()
    faults: list[str] = []
    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for case in cases:
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
            try:
                case.run()
                outcomes["taken"] += 1
            except SlimeLikeError as error:
                outcomes["refused"] += 1
                if not str(error).strip() or len(str(error)) > 20_000:
                    faults.append(f"{case.name}: its error has {len(str(error))} characters")
            except SystemExit as error:
                outcomes["refused"] += 1
                if error.code != 2:
                    faults.append(f"{case.name}: exit status {error.code}")
            except TooSlow:
                faults.append(f"{case.name}: more than {LONGEST_S:g} s")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                where = "".join(traceback.format_exception(error)[-3:])
                faults.append(f"{case.name}: {type(error).__name__}: {str(error)[:200]}\n{where[-800:]}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    print(f"{len(cases)} cases in {time.monotonic() - start:.1f} s: {dict(outcomes)}, {len(faults)} faults")
    assert not faults, f"{len(faults)} of {len(cases)} cases:\n" + "\n".join(faults[:12])
    return outcomes

"""A scoring process: one JSON task a line on stdin, one JSON result a line on stdout. Started by pool.py."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

#: A response may ask for 10**10**10; this ends in a MemoryError instead of taking the host's memory.
_MEMORY_BYTES = 4 * 1024**3


def main() -> None:
    """Serve until stdin ends. A task that outlives its time is ended by the kernel, together with this process."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like a result
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver ends us by closing stdin
    # The default action, not a Python handler: a handler would wait for a long C loop to end.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from slime_like.rollout.rewards import instructions
    from slime_like.rollout.rewards.math_answers import SCORERS

    _send(results, {"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, task["seconds"])
        signal.setitimer(signal.ITIMER_PROF, task.get("cpu_seconds", 0))  # of this process's processor time; 0: any
        try:
            if task["kind"] == instructions.KIND:
                reward = instructions.follows_all(task["response"], task["metadata"])
            else:
                reward = SCORERS[task["kind"]](task["response"], task["label"])
            result: dict = {"reward": reward}
        except instructions.UnscorableRow as error:
            result = {"fault": str(error)}
        except Exception as error:  # noqa: BLE001 a response may be anything, and so may be what parsing it raises
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(results, result)


def _send(stream, message: dict) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()

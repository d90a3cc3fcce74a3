"""Chat templates under limits: each is a program that came with a model, and may be made to run for ever or to fill
memory.

transformers renders in jinja's sandbox, which reaches no file and no module, and bounds neither time nor size. So a
template is first tried in a process that can be killed; afterwards each text has a deadline.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime_like.errors import DataError
from slime_like.utils.time_limit import TimeIsUp, time_limit

#: Of one conversation; real ones take milliseconds.
RENDER_S = 10.0
#: Characters of a rendered conversation.
LONGEST_TEXT = 16 * 1024**2
#: Memory beyond what the process has, for the trial.
_TRIAL_BYTES = 2 * 1024**3
_ASK = {"role": "user", "content": "probe"}
_PROBES = ([_ASK], [_ASK, {"role": "assistant", "content": "probe"}, _ASK])


class TemplateLimit(Exception):
    """A chat template took too long, or made too long a text."""


def apply_template(tokenizer: Any, messages: Sequence[dict], *, seconds: float = RENDER_S, **kwargs: Any) -> str:
    """The messages as text. Raises TemplateLimit, and whatever the template raises."""
    try:
        with time_limit(seconds):
            text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except TimeIsUp:
        raise TemplateLimit(f"it was not done with {len(messages)} messages after {seconds:g} s") from None
    if len(text) > LONGEST_TEXT:
        raise TemplateLimit(f"it made {len(text)} characters of {len(messages)} messages; at most {LONGEST_TEXT}")
    return text


def try_template(tokenizer: Any, kwargs: dict[str, Any], *, seconds: float = RENDER_S) -> None:
    """Render two short conversations in a process of its own, with bounded time and memory.

    Raises DataError if it did not end in time, or took more than 2 GiB. What the template refuses to render is for the
    rows to find out.
    """
    if not tokenizer.chat_template:
        return

    def render() -> None:
        for messages in _PROBES:
            try:
                apply_template(tokenizer, messages, seconds=2 * seconds, add_generation_prompt=True, **kwargs)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 a template may raise anything, and may mean it
                continue

    problem = _in_a_fork(render, seconds)
    if problem:
        raise DataError(
            f"the chat template of --hf-checkpoint {problem} with a conversation of one word. Fix: another checkpoint,"
            " or a chat template that ends."
        )


def _in_a_fork(work: Callable[[], None], seconds: float) -> str:
    """What became of the work in a copy of this process, if it did not end well; "" if it did."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's: it ends a long call into C too
            signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _TRIAL_BYTES, used + _TRIAL_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
            status = 0
        except MemoryError:
            status = 2
        finally:
            os._exit(status)
    os.close(write)
    try:
        deadline = time.monotonic() + seconds
        while not select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"did not end within {seconds:g} s"
    finally:
        os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return ""
    return f"took more than {_TRIAL_BYTES >> 30} GiB" if status == 2 else f"ended its process with status {status}"

"""A reward for code: what the model wrote runs in a sandbox on a row's inputs, and its outputs are compared out here.

    --custom-rm-path scripts.examples.code_reward.passed_share

A row's label is JSON: [{"input": "3 4\\n", "output": "7\\n"}, …]. The code never sees the outputs, so leaving early,
or printing that all is well, earns nothing.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from typing import Any

from slime_like.rollout.rewards.sandbox import PROGRAM, Sandbox, SandboxLimits

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@functools.cache
def sandbox() -> Sandbox:
    """One for all samples: as many programs run at a time as there are cores. Raises UserError where there is none."""
    one = Sandbox(SandboxLimits(seconds=10.0, cpu_seconds=4, memory_bytes=512 << 20))
    one.check()
    return one


async def passed_share(args: Any, sample: Any) -> float:
    """The share of the row's inputs for which the last block of code of a response prints what it should."""
    blocks = _BLOCK.findall(sample.response)
    if not blocks:
        return 0.0
    cases, passed = json.loads(sample.label), 0
    for case in cases:
        command = [sys.executable, "-I", f"{PROGRAM}/main.py"]
        result = await sandbox().run(command, files={"main.py": blocks[-1]}, stdin=case["input"].encode())
        printed = result.stdout.decode(errors="replace").split()
        passed += result.status == 0 and not result.over and printed == case["output"].split()
    return passed / len(cases)

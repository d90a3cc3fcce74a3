"""A harness for verifiers 0.4 that asks in its own process: its own starts a Python script a turn, which takes seconds.

Runs in the virtual environment that has verifiers; name it by `AgentConfig(harness={"id": "verifiers_inprocess"})` with
this folder on PYTHONPATH. How it is used: tests/e2e/foreign_agents/verifiers_episode.py.
"""

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessConfig", "InProcessHarness"]


class InProcessConfig(HarnessConfig):
    """Nothing to set."""


class InProcessHarness(Harness[InProcessConfig]):
    """One request a turn to verifiers' own interception server, which records it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        """Send the conversation so far."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with httpx.AsyncClient(timeout=None) as client:  # verifiers has its own deadlines
            answer = await client.post(
                endpoint.rstrip("/") + "/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return ProgramResult(0 if answer.status_code == 200 else 1, "", answer.text)

"""One episode of openai-agents: arguments are base URL and "chat", "stream" or "responses"; prints the answer."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def main(base_url: str, mode: str) -> str:
    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if mode == "responses" else OpenAIChatCompletionsModel
    model = kind(model="m", openai_client=AsyncOpenAI(base_url=base_url, api_key="any"))
    agent = Agent(name="a", instructions="be good", model=model, tools=[add])
    if mode != "stream":
        return (await Runner.run(agent, "2+2?")).final_output
    result = Runner.run_streamed(agent, "2+2?")
    async for _ in result.stream_events():
        pass
    return result.final_output


print(asyncio.run(main(*sys.argv[1:])))

"""One episode of pydantic-ai: the argument is the base URL; prints the answer."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=sys.argv[1], api_key="any")
agent = Agent(OpenAIChatModel("m", provider=provider), instructions="be good")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


print(agent.run_sync("2+2?").output)

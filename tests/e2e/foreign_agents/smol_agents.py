"""One episode of smolagents: the argument is the base URL; prints the answer."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: two
    """
    return a + b


model = OpenAIServerModel("m", api_base=sys.argv[1], api_key="any")
print(ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0).run("2+2?"))

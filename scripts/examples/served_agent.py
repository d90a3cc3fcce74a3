"""An agent for --agent-path: asks, shows its answer to the policy again, and is paid for the second one."""

from openai import AsyncOpenAI


async def doubt(base_url, prompt, request_kwargs, metadata):
    """Two turns; the reward is 1 for the label, and a share of it for the characters that stand where they should."""
    async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
        first = await client.chat.completions.create(messages=prompt, **request_kwargs)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        asked = [*prompt, said, {"role": "user", "content": "sure?"}]
        second = await client.chat.completions.create(messages=asked, **request_kwargs)
    answer, label = second.choices[0].message.content.strip(), str(metadata["label"])
    right = sum(ours == theirs for ours, theirs in zip(answer, label, strict=False))
    return {"reward": right / max(len(answer), len(label)), "metadata": {"answer": answer}}

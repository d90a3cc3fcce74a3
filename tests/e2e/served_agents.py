"""Agents of whole runs, as users write them for --agent-path."""

from openai import AsyncOpenAI


async def even_answers(base_url, prompt, request_kwargs, metadata):
    """Two turns; the reward is the share of even token ids in them, as in rewards.even_tokens."""
    async with AsyncOpenAI(base_url=base_url, api_key="any", timeout=60) as client:
        first = await client.chat.completions.create(messages=prompt, **request_kwargs)
        messages = [*prompt, first.choices[0].message.to_dict(), {"role": "user", "content": "again"}]
        second = await client.chat.completions.create(messages=messages, **request_kwargs)
    tokens = [token for answer in (first, second) for token in answer.choices[0].to_dict()["token_ids"]]
    return {"reward": sum(token % 2 == 0 for token in tokens) / len(tokens), "metadata": {"tokens": tokens}}

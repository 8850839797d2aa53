"""Finds prompts that do not begin with one BOS token, though the tokenizer begins every text with it."""

from collections.abc import Iterable
from typing import Any


def find_wrong_starts(tokenizer: Any, prompts: Iterable[Any]) -> str | None:
    """Describe in one line the prompts without the tokenizer's BOS token, or else those with two; None: there are none.

    OpenRLHF's executors (utils/agent.py) add no BOS token. Chat templates have it, and an input template needs it.
    """
    texts = [text for text in prompts if isinstance(text, str)]
    if not texts:
        return None
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    bos = tokenizer.bos_token
    if not bos or tokenizer(text="1")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return None
    if num := sum(not text.startswith(bos) for text in texts):
        wrong = f"do not begin with {bos}, which the tokenizer puts before other texts; an input template can add it"
    elif num := sum(text.startswith(2 * bos) for text in texts):
        wrong = f"begin with {bos} twice"
    return f"{num} of {len(texts)} prompts {wrong}" if num else None

"""Finds the prompts that are too long for the engines, which cut off their first tokens and only log it."""

from typing import Any


def find_cut_prompts(args: Any, tokenizer: Any, flag: str, dataloader: Any) -> set[str]:
    """Return the prompts that leave too little of `--data.max_len` for the response, and print their number.

    Such a prompt is cut by OpenRLHF's executors (utils/agent.py). They refuse one with images.

    Args:
        flag: the flag that names the data, for the message.
        dataloader: of OpenRLHF's `PromptDataset`; None if there are no data.
    """
    prompts = dataloader.dataset.prompts if dataloader else []
    response = args.rollout.max_new_tokens or 1
    limit = args.data.max_len - response
    # A token has at least one byte, so that only few texts must be tokenized.
    texts = sorted({text for text in prompts if isinstance(text, str) and len(text.encode()) > limit})
    if not texts:
        return set()
    lengths = [len(tokens) for tokens in tokenizer(text=texts, add_special_tokens=False)["input_ids"]]
    found = {text for text, length in zip(texts, lengths, strict=True) if length > limit}
    if found:
        count = sum(text in found for text in prompts)
        print(
            f"openrlhf-bapo: warning: {flag}: {count} of {len(prompts)} prompts have more than {limit} "
            f"tokens (the longest {max(lengths)}); --data.max_len {args.data.max_len} less {response} for the response "
            "leaves no more, so their first tokens are cut off",
            flush=True,
        )
    return found

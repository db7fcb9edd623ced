"""A token's text, where the base model's tokenizer lies on this machine."""

from collections.abc import Callable, Iterable
from pathlib import Path


def token_texts(base_model: str, ids: Iterable[int]) -> Callable[[int], str | None] | None:
    """Token id -> its text; None where the tokenizer of these ids is not at hand: one that does not know
    them all belongs to another model, and its texts would be wrong.

    `base_model` is a directory, or a Hugging Face id whose files were downloaded before: nothing is
    fetched. A token that is part of a character reads as U+FFFD.
    """
    path = _file(base_model)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:  # it comes with the learner and with vLLM; reading the store needs neither
        return None
    tokenizer = Tokenizer.from_file(str(path))
    if any(tokenizer.id_to_token(id) is None for id in set(ids)):
        return None

    def text(id: int) -> str | None:
        return str(tokenizer.decode([id], skip_special_tokens=False))

    return text


def no_text(id: int) -> str | None:
    """Where there is no tokenizer: no id has a text."""
    return None


def _file(base_model: str) -> Path | None:
    here = Path(base_model) / "tokenizer.json"
    if base_model and here.is_file():
        return here
    if not base_model or base_model.count("/") != 1 or base_model.startswith(("/", ".")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(base_model, "tokenizer.json")
    return Path(found) if isinstance(found, str) else None

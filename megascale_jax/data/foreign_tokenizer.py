"""Tokenizer files beside a Hugging Face model, made from ours, and taken over from them.

Our ``end_of_document`` is one id above a tokenizer's own; theirs is a token like any other. So it is added to the file on the way out,
and on the way in the token that ends a text is taken out of the file when it is the highest id, so that it becomes ours.
"""

import json
from pathlib import Path
from typing import Any

from megascale_jax.data.tokenizer import BYTES, TOKENIZER_FILE, FileTokenizer, Tokenizer, load_tokenizer
from megascale_jax.errors import DataError

END = "<|end_of_document|>"
_CONFIG = "tokenizer_config.json"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, sequence_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, for ``AutoTokenizer``; nothing for bytes, which have no such files."""
    if not isinstance(tokenizer, FileTokenizer):
        return
    document = json.loads(tokenizer.json)
    taken = {token["content"] for token in document.get("added_tokens", ())} | set(document["model"].get("vocab", ()))
    content = END if END not in taken else f"<|end_of_document_{tokenizer.end_of_document}|>"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document.setdefault("added_tokens", []).append({"id": tokenizer.end_of_document, "content": content, **flags})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": content, "model_max_length": sequence_length}
    (folder / TOKENIZER_FILE).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def take_tokenizer(source: Path, folder: Path, end_token: int | None) -> str | None:
    """Write the tokenizer of a model's folder ``source`` into ``folder``; its name there, ``None`` when the model has none.

    Raises DataError for a file that is no tokenizer.
    """
    if not (source / TOKENIZER_FILE).is_file():
        return None
    text = (source / TOKENIZER_FILE).read_text(encoding="utf-8")
    try:
        document = json.loads(text)
        if _take_out(document, end_token):
            text = json.dumps(document, ensure_ascii=False)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{source / TOKENIZER_FILE} is no Hugging Face tokenizers JSON file ({error!r})") from error
    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    return load_tokenizer(TOKENIZER_FILE, folder).save(folder)


def run_tokenizer(name: object, folder: Path | None) -> Tokenizer | None:
    """The tokenizer that a checkpoint's description names; ``None`` when its run folder is not at hand. Raises DataError."""
    if name == BYTES:
        return load_tokenizer(BYTES)
    if not isinstance(name, str) or folder is None or not (folder / name).is_file():
        return None
    return load_tokenizer(name, folder)


def _take_out(document: dict[str, Any], end_token: int | None) -> bool:
    """Remove the token that ends a text, if it is an added one and has the highest id; whether it was."""
    added, vocabulary = document.get("added_tokens", []), document["model"].get("vocab")
    ids = {token["id"] for token in added} | (
        set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary or ())))
    )
    if end_token is None or end_token != max(ids, default=None) or all(token["id"] != end_token for token in added):
        return False
    document["added_tokens"] = [token for token in added if token["id"] != end_token]
    if isinstance(vocabulary, dict):
        document["model"]["vocab"] = {content: number for content, number in vocabulary.items() if number != end_token}
    elif vocabulary:
        document["model"]["vocab"] = vocabulary[:end_token]
    return True

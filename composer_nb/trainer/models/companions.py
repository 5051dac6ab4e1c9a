"""The files beside a checkpoint's weights: the tokenizer, the chat template, the tokens that end a turn, the licence.

A model has them from where it was loaded (`Model.companions`) and takes them to wherever it is saved or published, so that other
programs use it as this one does. `for_format` writes into them what training in a chat format changes.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.environment import CARRIED
from composer_nb.harness.files import to_json
from composer_nb.harness.untrusted import json_of

# Contents by name of the file.
Companions = Mapping[str, bytes]
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
GENERATION, SPECIAL, OLD_TEMPLATE = "generation_config.json", "special_tokens_map.json", "chat_template.json"
# Largest file: 64 MiB.
MOST_BYTES = 1 << 26
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMES = re.compile(
    r"(tokenizer|tokenization_|vocab|merges|special_tokens_map|added_tokens|chat_template|generation_config)[\w.-]*"
    r"|[\w.-]+\.(jinja|model|tiktoken)|(LICEN[CS]E|NOTICE|USE_POLICY|README)[\w.-]*|" + re.escape(CARRIED)
)


def read_companions(folder: Path) -> dict[str, bytes]:
    """Return the files beside the weights in a folder. Token ids that only its config.json states are added to
    generation_config.json. Raises ValueError that names a file that is damaged or larger than `MOST_BYTES`."""
    files = {}
    for file in sorted(folder.iterdir()):
        if not file.is_file() or not _NAMES.fullmatch(file.name):
            continue
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{file}: larger than {MOST_BYTES:,} bytes, too large for a file beside the weights")
        files[file.name] = file.read_bytes()
    config = _object((folder / "config.json").read_bytes(), folder / "config.json")
    stated = {name: config[name] for name in IDS if config.get(name) is not None}
    generation = _object(files.get(GENERATION, b"{}"), folder / GENERATION)
    if stated.keys() - generation.keys():
        files[GENERATION] = to_json({**stated, **generation}).encode()
    return files


def token_ids(companions: Companions) -> dict[str, Any]:
    """Return the ids of special tokens, for config.json: some engines look there."""
    generation = _object(companions.get(GENERATION, b"{}"), GENERATION)
    return {name: generation[name] for name in IDS if generation.get(name) is not None}


def for_format(companions: Companions, tokenizer: Tokenizer, format: str, *, trained: bool = True) -> dict[str, bytes]:
    """Return the files of a model that writes turns of the chat format `format` (`env.renderer`): the token that ends a turn
    comes first among those that end a text, and the template is that of the format, unless the model is not yet `trained` in
    it and has a template."""
    end, files = FORMATS[format].closing, {**companions, TOKENIZER: tokenizer.to_str().encode()}
    generation, settings = (_object(files.get(name, b"{}"), name) for name in (GENERATION, SETTINGS))
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if (number := tokenizer.token_to_id(end)) not in ends:
        more = [other for other in ends if other is not None]
        generation["eos_token_id"] = [number, *more] if more else number
    settings |= {"eos_token": end}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for name, token in (("bos", "<|bos|>"), ("pad", "<|pad|>")) if format == "compact" else ():
        settings.setdefault(f"{name}_token", token)
        generation.setdefault(f"{name}_token_id", tokenizer.token_to_id(token))
    if trained or not (files.keys() & {TEMPLATE, OLD_TEMPLATE} or "chat_template" in settings):
        settings.pop("chat_template", None)
        files.pop(OLD_TEMPLATE, None)
        files[TEMPLATE] = template(format)
    if CARRIED in files and _object(files[CARRIED], CARRIED).get("renderer") != format:
        del files[CARRIED]
    if SPECIAL in files:
        files[SPECIAL] = to_json(_object(files[SPECIAL], SPECIAL) | {"eos_token": end}).encode()
    return {**files, GENERATION: to_json(generation).encode(), SETTINGS: to_json(settings).encode()}


@cache
def template(format: str) -> bytes:
    """Return the Jinja template of a chat format: `apply_chat_template` of `transformers` renders what our renderer does, except
    for special tokens that are spelled in a text."""
    return (Path(__file__).parent / "templates" / f"{format}.jinja").read_bytes()


def _object(text: bytes, where: object) -> dict[str, Any]:
    try:
        value = json_of(text)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise ValueError(f"{where}: damaged ({error}); fetch or write it again") from None
    return value

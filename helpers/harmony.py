"""Harmony, the chat format of gpt-oss: rendering prompts, parsing answers, and where an answer ends.

Source: OpenAI's harmony format description (github.com/openai/harmony). Roles, channels and special tokens are theirs; this
course uses the short form without a system message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# An answer ends with one of these. <|end|> is not among them: it closes the analysis message, and the final
# channel follows (pitfall 18: stopping there cuts every answer before it is given).
STOP_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")

_MESSAGE = re.compile(r"<\|channel\|>(\w+)<\|message\|>((?:(?!<\|).)*)", re.DOTALL)
_ANSWER = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<analysis>(?:(?!<\|).)*)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<final>(?:(?!<\|).)*)<\|return\|>",
    re.DOTALL,
)


@dataclass(frozen=True)
class Answer:
    """A completion taken apart. analysis and final are None where that channel is absent.

    well_formed: the whole text is one optional analysis message and one final message, closed by <|return|>.
    """

    analysis: str | None
    final: str | None
    well_formed: bool


def render_prompt(question: str) -> str:
    """The user's turn and the opening of the assistant's.

    >>> render_prompt("9604093")
    '<|start|>user<|message|>9604093<|end|><|start|>assistant'
    """
    return f"<|start|>user<|message|>{question}<|end|><|start|>assistant"


def render_completion(final: str, analysis: str | None = None) -> str:
    """What the assistant writes after `render_prompt`.

    >>> render_completion("4", "0034699")
    '<|channel|>analysis<|message|>0034699<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>'
    """
    thought = f"<|channel|>analysis<|message|>{analysis}<|end|><|start|>assistant" if analysis else ""
    return f"{thought}<|channel|>final<|message|>{final}<|return|>"


def parse_completion(text: str) -> Answer:
    """Take a completion apart; never raises, whatever the policy wrote.

    >>> parse_completion("<|channel|>final<|message|>4<|return|>")
    Answer(analysis=None, final='4', well_formed=True)
    >>> parse_completion("<|channel|>final<|message|>4").well_formed
    False
    """
    match = _ANSWER.fullmatch(text)
    if match:
        return Answer(match["analysis"], match["final"], True)
    messages = dict(_MESSAGE.findall(text))
    return Answer(messages.get("analysis"), messages.get("final"), False)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint folder, through the `tokenizers` library alone (no torch in the kernel).

    Raises FileNotFoundError naming the file when the folder has none.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer at {path}: is this a Hugging Face checkpoint folder? Run notebook 01 to make one"
        )
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of text that already carries its special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def decode(tokenizer: Tokenizer, ids) -> str:
    """Text of ids, special tokens kept: a scorer that never sees <|return|> cannot tell a finished answer."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def stop_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of STOP_TOKENS that this tokenizer has."""
    ids = (tokenizer.token_to_id(token) for token in STOP_TOKENS)
    return tuple(i for i in ids if i is not None)

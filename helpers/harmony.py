"""Harmony, the chat format of gpt-oss: messages to spans to token ids, loss masks, parsing, and where an answer ends.

    messages -> render -> spans -> to_text                       what people read
                                -> encode_spans(tokenizer, ...)  ids, and which of them the policy wrote

A span is either one special token or plain text, and plain text never becomes a special token: a user may type `<|end|>`.
The course's task uses the short form (`render_prompt`, `render_completion`): no system message, one user turn.
Left out: tools' definitions and their answers. A call (a message with a recipient) can be rendered, and ends a turn.

Source: OpenAI's harmony format description (github.com/openai/harmony, docs/format.md; src/encoding.rs renders it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date as calendar_date
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# An answer ends with one of these. <|end|> is not among them: it closes the analysis message, and the final
# channel follows (pitfall 18: stopping there cuts every answer before it is given).
STOP_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")
FORMAT_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", *STOP_TOKENS)

ROLES = ("system", "developer", "user", "assistant")
CHANNELS = ("analysis", "commentary", "final")
EFFORTS = ("low", "medium", "high")
# The date of the format description's examples. Today's date would make every prompt of tomorrow another one
# than the policy was trained on (pitfall 19).
FROZEN_DATE = "2025-06-28"
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."

_MESSAGE = re.compile(r"<\|channel\|>(\w+)<\|message\|>((?:(?!<\|).)*)", re.DOTALL)
_ANSWER = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<analysis>(?:(?!<\|).)*)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<final>(?:(?!<\|).)*)<\|return\|>",
    re.DOTALL,
)

# The same rules for transformers' apply_chat_template. It gives text and no loss mask, and that text is tokenised
# whole, so that a typed <|end|> ends the message: good for looking, not for training.
CHAT_TEMPLATE = """\
{%- set seen = namespace(turn=0, final=0) -%}
{%- for m in messages -%}
    {%- if add_generation_prompt or m.role != 'assistant' -%}{%- set seen.turn = loop.index -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages[:seen.turn] -%}
    {%- if m.channel == 'final' -%}{%- set seen.final = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
    {%- if not (m.channel == 'analysis' and loop.index0 < seen.final) -%}
        {{- '<|start|>' + m.role -}}
        {%- if m.recipient -%}{{- ' to=' + m.recipient -}}{%- endif -%}
        {%- if m.channel -%}{{- '<|channel|>' + m.channel -}}{%- endif -%}
        {{- '<|message|>' + m.content -}}
        {%- set returns = loop.last and m.channel == 'final' and not add_generation_prompt -%}
        {{- '<|call|>' if m.recipient else '<|return|>' if returns else '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    role: one of ROLES.  channel: one of CHANNELS for the assistant, None for everybody else.
    recipient: the tool that an assistant message calls, such as "functions.add"; None for an ordinary message.
    Raises ValueError or TypeError, one line each, for what harmony has no form for.

    >>> Message("assistant", "4", "final").channel
    'final'
    """

    role: str
    content: str
    channel: str | None = None
    recipient: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r:.80}; roles: {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise TypeError(f"content of a message is text, not {type(self.content).__name__}: pass a str")
        if self.role == "assistant" and self.channel not in CHANNELS:
            raise ValueError(f"unknown channel {self.channel!r:.80}; an assistant's: {', '.join(CHANNELS)}")
        if self.role != "assistant" and (self.channel or self.recipient):
            raise ValueError(f"a {self.role} message has no channel and no recipient; only assistant's have")
        if self.recipient is not None and not re.fullmatch(r"[\w.-]{1,200}", str(self.recipient)):
            raise ValueError(f"recipient {self.recipient!r:.80} is no tool name, such as functions.add")
        if self.recipient and self.channel == "final":
            raise ValueError("a final message goes to the user: leave its recipient out, or use commentary")


@dataclass(frozen=True)
class Span:
    """A piece of a rendered conversation: one special token, or text in which nothing is special.

    trained: the policy writes it, so the loss covers it.  channel: that of the message, None outside the assistant's.
    """

    text: str
    special: bool
    trained: bool
    channel: str | None = None


@dataclass(frozen=True)
class Answer:
    """A completion taken apart. analysis and final are None where that channel is absent.

    well_formed: the whole text is one optional analysis message and one final message, closed by <|return|>.
    """

    analysis: str | None
    final: str | None
    well_formed: bool


def system_message(
    effort: str = "medium", date: str = FROZEN_DATE, knowledge_cutoff: str = "2024-06"
) -> Message:
    """The system message: who the model is, its dates, how long it thinks, and its channels.

    effort: one of EFFORTS.  date: YYYY-MM-DD, never taken from the clock.  knowledge_cutoff: YYYY-MM.
    Raises ValueError for an unknown effort or another date format. Source: docs/format.md, "System message format".

    >>> print(system_message("low").content)
    You are ChatGPT, a large language model trained by OpenAI.
    Knowledge cutoff: 2024-06
    Current date: 2025-06-28
    <BLANKLINE>
    Reasoning: low
    <BLANKLINE>
    # Valid channels: analysis, commentary, final. Channel must be included for every message.
    """
    if effort not in EFFORTS:
        raise ValueError(f"unknown reasoning effort {effort!r}; efforts: {', '.join(EFFORTS)}")
    _check_date("date", "YYYY-MM-DD", date, date)
    _check_date("knowledge_cutoff", "YYYY-MM", knowledge_cutoff, f"{knowledge_cutoff}-01")
    return Message(
        "system",
        f"{IDENTITY}\nKnowledge cutoff: {knowledge_cutoff}\nCurrent date: {date}\n\nReasoning: {effort}\n\n"
        f"# Valid channels: {', '.join(CHANNELS)}. Channel must be included for every message.",
    )


def developer_message(instructions: str) -> Message:
    """What other formats call the system prompt.

    >>> developer_message("Answer with one digit.").content
    '# Instructions\\n\\nAnswer with one digit.'
    """
    if not isinstance(instructions, str):
        raise TypeError(f"instructions are text, not {type(instructions).__name__}: pass a str")
    return Message("developer", f"# Instructions\n\n{instructions}")


def render(messages: Sequence[Message], open_assistant: bool = True) -> tuple[Span, ...]:
    """A conversation as spans: a prompt that opens the assistant's turn, or (open_assistant=False) a training example.

    Only the last turn of a training example is trained, and of it what the policy writes: everything after the given
    `<|start|>assistant`, up to and with the <|return|> or <|call|> that stops it. Between analysis and final the policy
    writes `<|start|>assistant` itself. Earlier turns are history: their final ends with <|end|>, their analysis is
    dropped once a final answered it. Neither is what the policy wrote; to train on them, render each as a last turn.

    Two cases differ from openai-harmony (0.0.4 to 0.0.8), which drops only the analysis before the *first* final: here,
    as in the format description, every answered turn's analysis goes, and a training example keeps its own.
    Raises ValueError where an assistant message follows one that ended the turn.

    >>> to_text(render([Message("user", "2+2")]))
    '<|start|>user<|message|>2+2<|end|><|start|>assistant'
    """
    messages = tuple(messages)
    _check_turns(messages, open_assistant)
    turn = len(messages) if open_assistant else _last_turn(messages)
    answered = max((i for i, m in enumerate(messages[:turn]) if m.channel == "final"), default=0)
    spans: list[Span] = []
    for i, message in enumerate(messages):
        if message.channel == "analysis" and i < answered:
            continue
        returns = message.channel == "final" and not open_assistant and i == len(messages) - 1
        end = "<|call|>" if message.recipient else "<|return|>" if returns else "<|end|>"
        spans += _message_spans(message, end, head_trained=i > turn, body_trained=i >= turn)
    if open_assistant:
        spans += [Span("<|start|>", True, False), Span("assistant", False, False)]
    return tuple(spans)


def to_text(spans: Iterable[Span]) -> str:
    """The spans' text, one after the other. For reading: which `<|end|>` was typed by a user can no longer be told."""
    return "".join(span.text for span in spans)


def encode_spans(tokenizer: Tokenizer, spans: Iterable[Span]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(ids, loss mask), one entry a token: special spans become their one id, text spans never a special one.

    Raises ValueError naming the token when the tokenizer lacks it, or reads a special token in plain text.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for span in spans:
        new = (_special_id(tokenizer, span.text),) if span.special else encode_text(tokenizer, span.text)
        ids += new
        mask += [span.trained] * len(new)
    return tuple(ids), tuple(mask)


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of text in which nothing is special, whatever it spells (tiktoken's encode_ordinary).

    Sets the tokenizer's encode_special_tokens for the call and puts it back: one thread at a time for a tokenizer.
    Raises ValueError when a format token comes out all the same.
    """
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # the library's name for: encode them as if they were not special
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = before
    found = set(encoding.tokens) & set(FORMAT_TOKENS)
    if found:
        raise ValueError(
            f"tokenizer.json turns the plain text {min(found)!r} into a special token: it must be an added token with "
            "special=true. A tiny checkpoint made by an older version has none: delete its folder to make it anew"
        )
    return tuple(encoding.ids)


def render_prompt(question: str) -> str:
    """The user's turn and the opening of the assistant's.

    >>> render_prompt("9604093")
    '<|start|>user<|message|>9604093<|end|><|start|>assistant'
    """
    return to_text(render([Message("user", question)]))


def render_completion(final: str, analysis: str | None = None) -> str:
    """What the assistant writes after `render_prompt`.

    >>> render_completion("4", "0034699")
    '<|channel|>analysis<|message|>0034699<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>'
    """
    thought = [Message("assistant", analysis, "analysis")] if analysis else []
    spans = render([*thought, Message("assistant", final, "final")], open_assistant=False)
    return to_text(span for span in spans if span.trained)


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


def parse_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Answer:
    """`parse_completion` of token ids. A marker that the policy spelt out in characters stays text, as for the engine.

    In text the two look alike: an analysis that spells `<|end|>`, `<|channel|>final` and so on would read as an answer
    that was never given.
    """
    hidden = (
        "\ue000"  # a private-use character in the place of a spelt "<|": the patterns see special tokens only
    )
    parts = []
    for special, run in groupby(ids, lambda i: _is_marker(tokenizer.id_to_token(i))):
        part = decode(tokenizer, run)
        parts.append(part if special else part.replace("<|", hidden))
    answer = parse_completion("".join(parts))
    shown = [text and text.replace(hidden, "<|") for text in (answer.analysis, answer.final)]
    return replace(answer, analysis=shown[0], final=shown[1])


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint folder, through the `tokenizers` library alone (no torch in the kernel).

    Raises FileNotFoundError naming the file when the folder has none, ValueError when the file is no tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"no tokenizer at {path}: name a Hugging Face checkpoint folder, or copy the model's tokenizer.json there"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception, whatever is wrong
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no readable tokenizer ({reason}): copy the model's tokenizer.json there again"
        ) from error


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of text that already carries its special tokens. For text from outside, use `encode_spans`."""
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Text of ids, special tokens kept: a scorer that never sees <|return|> cannot tell a finished answer."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def stop_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of STOP_TOKENS that this tokenizer has."""
    ids = (tokenizer.token_to_id(token) for token in STOP_TOKENS)
    return tuple(i for i in ids if i is not None)


def _message_spans(message: Message, end: str, head_trained: bool, body_trained: bool) -> Iterator[Span]:
    """<|start|>role to=recipient<|channel|>name<|message|>content<end>; the recipient belongs to the body."""
    pieces = [("<|start|>", True, head_trained), (message.role, False, head_trained)]
    if message.recipient:
        pieces.append((f" to={message.recipient}", False, body_trained))
    if message.channel:
        pieces += [("<|channel|>", True, body_trained), (message.channel, False, body_trained)]
    pieces += [("<|message|>", True, body_trained), (message.content, False, body_trained)]
    pieces.append((end, True, body_trained))
    return (Span(*piece, message.channel) for piece in pieces if piece[0])


def _ends_turn(message: Message) -> bool:
    """Whether the policy stops after it: a final answer, or a call that waits for its tool."""
    return message.channel == "final" or message.recipient is not None


def _check_turns(messages: Sequence[Message], open_assistant: bool) -> None:
    authors = [m.role for m in messages[1:]] + (["assistant"] if open_assistant else [])
    for i, author in enumerate(authors[: len(messages)]):
        if _ends_turn(messages[i]) and author == "assistant":
            kind = "final answer" if messages[i].channel == "final" else "call"
            raise ValueError(
                f"message {i} is a {kind} and ends the assistant's turn: put the user's next message after it, "
                "or render a training example with open_assistant=False"
            )


def _last_turn(messages: Sequence[Message]) -> int:
    """Index of the first message of the assistant's last turn; len(messages) when somebody else spoke last."""
    others = [i for i, m in enumerate(messages) if m.role != "assistant"]
    return others[-1] + 1 if others else 0


def _check_date(name: str, form: str, given: str, day: str) -> None:
    try:
        right = calendar_date.fromisoformat(day).isoformat() == day
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            f"{name} {given!r} is not an ISO date; write {form}, such as {FROZEN_DATE[: len(form)]}"
        )


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(
            f"the tokenizer has no {token}: is it gpt-oss's? A tiny checkpoint made by an older version lacks it: "
            "delete its folder to make it anew"
        )
    return found


def _is_marker(token: str | None) -> bool:
    """Whether a token is special or reserved, by its form <|name|>; no ordinary token has it."""
    return token is not None and token.startswith("<|") and token.endswith("|>")

r"""GSM8K (arXiv 2110.14168): grade-school questions as a task with a tolerant verifier, in harmony's own template.

Questions come from a file of JSON lines in the data set's form ({"question", "answer"}, the answer's last line is `#### 42`)
or from the hub. The verifier reads the *final* channel and takes its last number: a right answer counts with a unit, a
currency, separators, `.00` or `\boxed{}` around it, since a strict scorer gives silent zeros (pitfall 20: verl 7274, 7789).
Left out: fractions, powers and words ("forty-two"); GSM8K's answers are plain numbers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.harmony import (
    Message, decode, developer_message, encode, encode_spans, encode_text, parse_ids, render, system_message, to_text,
)  # fmt: skip
from helpers.messages import one_line
from helpers.records import Episode
from helpers.tasks import Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HUB_DATASET, HUB_FILE = "openai/gsm8k", "main/train-00000-of-00001.parquet"
INSTRUCTIONS = "Solve the problem. End your answer with the final number."
MARK = "####"  # what stands before the number in the data set's answers

_EXPONENT = re.compile(r"\^\{?[-+]?\d+\}?")
_SPACED_THOUSANDS = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f]|\\[,!]|\{,\})(?=\d{3}(?!\d))")
# no \s* in front: a run of n spaces would be tried from each of them, 8 s for 20,000 (spaces cost nothing to read past)
_CURRENCY = re.compile(r"(?:(-)\s*)?(?:\\?\$|[€£])\s*")
_NUMBER = re.compile(r"(?<![A-Za-z_\d.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+")


class QuestionsError(ValueError):
    """No questions to ask; one line that names the file and its line, or both ways to get some."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class Gsm8kProblem(Problem):
    """A word problem. preamble: the prompt carries gpt-oss's system and developer messages, not the user's turn alone."""

    preamble: bool = True

    @property
    def messages(self) -> tuple[Message, ...]:
        """System (reasoning effort low, frozen date), developer and user; with preamble=False the user's turn alone."""
        before = (system_message("low"), developer_message(INSTRUCTIONS)) if self.preamble else ()
        return (*before, Message("user", self.question))

    @property
    def prompt(self) -> str:
        return to_text(render(self.messages))


@dataclass(frozen=True)
class Gsm8k:
    """The task: problems, and which of them a step asks, a pure function of (seed, step)."""

    problems: tuple[Gsm8kProblem, ...]
    seed: int = 0

    def sample(self, count: int, step: int = 0) -> list[Gsm8kProblem]:
        """`count` different problems of GRPO step `step`. Raises QuestionsError where there are fewer."""
        if count > len(self.problems):
            raise QuestionsError(
                f"{count} prompts a step, and there are {len(self.problems)} questions: give more, or lower --prompts"
            )
        return random.Random(f"gsm8k-{self.seed}-{step}").sample(self.problems, count)


@dataclass(frozen=True)
class Graded:
    """What became of one answer.

    reward: 1.0 or 0.0.  final: the message of the final channel, None where the answer never reached it.
    truncated: it used up its token budget.
    """

    reward: float
    final: str | None
    truncated: bool


# --- the verifier -------------------------------------------------------------------------------------------------------


def final_number(text: str) -> Decimal | None:
    r"""The number that an answer ends with: of the last \boxed{}, else after the last ####, else the last one; None without.

    >>> final_number("She earns $1,234.50 in 7 days, so the answer is **8,641.50 dollars**.")
    Decimal('8641.50')
    >>> final_number(r"\boxed{18\text{ m}^2}, as 3 * 6 = 18 in 1 step")
    Decimal('18')
    """
    text = _SPACED_THOUSANDS.sub("", _last_box(text).rpartition(MARK)[2].replace("\u2212", "-"))
    text = _CURRENCY.sub(r" \1", _EXPONENT.sub("", text))
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    value, before = Decimal(found[-1].group().replace(",", "")), text[: found[-1].start()]
    return value.copy_negate() if re.search(r"(?<![\w)\]])-$", before) else value


def _last_box(text: str) -> str:
    r"""What stands in the last \boxed{...}, braces balanced; the whole text where there is none or it is not closed."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for i, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:i]
    return text


def grade(final: str | None, answer: str) -> float:
    """1.0 if the final message's number is `answer` (a plain number), however it is written, else 0.0.

    >>> grade("The total is $18.00.", "18"), grade("18 or 19", "18"), grade(None, "18")
    (1.0, 0.0, 0.0)
    """
    return float(final is not None and final_number(final) == Decimal(answer))


def grade_episodes(
    episodes: Sequence[Episode], problems: Sequence[Problem], tokenizer: Tokenizer
) -> list[Graded]:
    """Each episode's final channel against its problem's answer; Episode.group is the problem's index.

    A message that was cut off by the token budget earns nothing: the first digits of 180 are not 18.
    """
    return [_graded(e, problems[e.group].answer, tokenizer) for e in episodes]


def _graded(episode: Episode, answer: str, tokenizer: Tokenizer) -> Graded:
    final = parse_ids(tokenizer, episode.completion_ids).final
    ended = episode.finish_reason == "stop"
    return Graded(grade(final, answer) if ended else 0.0, final, episode.finish_reason == "length")


# --- questions ----------------------------------------------------------------------------------------------------------


def read_questions(file: Path, preamble: bool = True) -> tuple[Gsm8kProblem, ...]:
    """Problems of a file of JSON lines in GSM8K's form. Raises QuestionsError naming the line."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")  # JSON text may hold what splitlines breaks at
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionsError(f"{file} cannot be read as text ({error}): name a file of JSON lines") from error
    problems = tuple(
        _problem(_json_line(line, f"{Path(file).name}, line {n}"), f"{Path(file).name}, line {n}", preamble)
        for n, line in enumerate(lines, 1)
        if line.strip()
    )
    if not problems:
        raise QuestionsError(f'{file} holds no question: each line is {{"question": ..., "answer": ...}}')
    return problems


def _json_line(line: str, where: str) -> Mapping:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuestionsError(f"{where} is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise QuestionsError(f'{where} is no object with "question" and "answer"')
    return record


def _problem(record: Mapping, where: str, preamble: bool) -> Gsm8kProblem:
    question, worked = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(worked, str) or not question.strip():
        raise QuestionsError(f'{where} needs "question" and "answer", both text')
    if any("\ud800" <= letter <= "\udfff" for letter in question):  # JSON can spell half a letter, no tokenizer takes it
        raise QuestionsError(f"{where}: the question holds half of a surrogate pair, which is no text")
    lines = worked.strip().splitlines()
    number = final_number(lines[-1]) if lines and lines[-1].startswith(MARK) else None
    if number is None:
        raise QuestionsError(f"{where}: the answer's last line has to be `{MARK} 42`, as in GSM8K")
    return Gsm8kProblem(question, str(number), preamble)


def hub_questions(preamble: bool = True, timeout: float = 10.0) -> tuple[Gsm8kProblem, ...]:
    """GSM8K's training questions from the hub. timeout: seconds that the hub may take to answer.

    Raises QuestionsError naming both ways where the hub is out of reach or pyarrow (of the GPU lock) is not installed.
    """
    ways = "give --questions FILE.jsonl (GSM8K's own form)"
    try:
        import pyarrow.parquet as parquet
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise QuestionsError(
            f"GSM8K on the hub is a parquet file and {error.name} is not installed here (gpu.lock has it): {ways}"
        ) from error
    try:
        file = hf_hub_download(HUB_DATASET, HUB_FILE, repo_type="dataset", etag_timeout=timeout)
    except Exception as error:  # httpx, OSError and the hub's own: all of them mean that there is no file
        raise QuestionsError(
            f"the hub does not give {HUB_DATASET} ({type(error).__name__}): {ways}, or run where the hub answers"
        ) from error
    rows = parquet.read_table(file, columns=["question", "answer"]).to_pylist()
    return tuple(_problem(row, f"{HUB_DATASET}, row {n}", preamble) for n, row in enumerate(rows))


def check_prompts(tokenizer: Tokenizer, problems: Sequence[Gsm8kProblem]) -> list[tuple[int, ...]]:
    """Token ids of each prompt, after making sure that the model reads what is written.

    Raises ValueError for a word that the tokenizer lacks (the tiny one has digits and few words: ask without the preamble) and
    for a question that spells a special token, which roll_out would turn into one.
    """
    return [_checked_prompt(tokenizer, problem) for problem in problems]


def _checked_prompt(tokenizer: Tokenizer, problem: Gsm8kProblem) -> tuple[int, ...]:
    spans = render(problem.messages)
    ids, _ = encode_spans(tokenizer, spans)
    for span in spans:
        if not span.special and not _readable(tokenizer, span.text):
            raise ValueError(
                f"the tokenizer cannot write {span.text[:40]!r}: take the released tokenizer.json; a tiny one without words "
                "needs questions in its own characters, and --no-preamble"
            )
    if encode(tokenizer, problem.prompt) != ids:
        raise ValueError(
            f"the question {problem.question[:40]!r} spells a special token: leave it out of the questions"
        )
    return ids


def _readable(tokenizer: Tokenizer, text: str) -> bool:
    return decode(tokenizer, encode_text(tokenizer, text)) == text

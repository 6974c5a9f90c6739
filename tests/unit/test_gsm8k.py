"""GSM8K: every way to write a right answer counts, no wrong one does, and bad questions are one line."""

import http.server
import json
import os
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import write_tiny_tokenizer
from helpers.gsm8k import (
    HUB_DATASET, HUB_FILE, INSTRUCTIONS, Gsm8k, Gsm8kProblem, Graded, QuestionsError, check_prompts, final_number, grade,
    grade_episodes, hub_questions, read_questions,
)  # fmt: skip
from helpers.harmony import FROZEN_DATE, encode, load_tokenizer, render_completion, render_prompt
from helpers.records import Episode
from helpers.tasks import Problem


# ---- the verifier -------------------------------------------------------------------------------------------
RIGHT = [
    ("1234", "1234"), ("1,234", "1234"), ("1234.00", "1234"), ("$1,234", "1234"), ("$1,234.00.", "1234"), ("US$ 18", "18"),
    ("\\$18", "18"), ("€18", "18"), ("18 dollars", "18"), ("18%", "18"), ("**18**", "18"), ("**$18.00**", "18"),
    ("The answer is 18.", "18"), ("3 * 6 = 18", "18"), ("x=18", "18"), ("(18)", "18"), ("18km", "18"), ("18\n", "18"),
    ("#### 18", "18"), ("12 + 6 = 18\n#### 18 apples", "18"), ("#### 18\nThat took 2 steps", "2"),
    ("\\boxed{18}", "18"), ("\\boxed{18} because 1 + 17 = 18 in 2 ways", "18"), ("\\(\\boxed{\\$18.00}\\)", "18"),
    ("\\boxed{1{,}800}", "1800"), ("1\\,800", "1800"), ("1\u202f800 m", "1800"), ("1\u00a0800", "1800"),
    ("\\boxed{18\\text{ m}^2}", "18"), ("18 m^2", "18"), ("18 m^{2}", "18"), ("18 m\u00b2", "18"),
    ("first \\boxed{3}, then \\boxed{18}", "18"), ("-5", "-5"), ("\u22125", "-5"), ("-$5", "-5"), ("$-5", "-5"),
    ("it falls to -5 degrees", "-5"), ("10-12", "12"), ("pages 10 - 12", "12"), ("0.5", "0.5"), (".5", "0.5"),
    ("1, 2, 18", "18"), ("1,2,18", "18"), ("10,20", "20"), ("1,234,567", "1234567"), ("018", "18"), ("+18", "18"),
]  # fmt: skip
WRONG = [
    ("17", "18"), ("18 or 19", "18"), ("180", "18"), ("1.8", "18"), ("-18", "18"), ("eighteen", "18"), ("", "18"),
    ("no number", "18"), ("\\boxed{}", "18"), ("1,8", "18"), ("18.01", "18"), ("\\boxed{17} not 18", "18"),
]  # fmt: skip


@pytest.mark.parametrize(("final", "answer"), RIGHT)
def test_a_right_answer_counts_in_every_form(final, answer):
    assert grade(final, answer) == 1.0


@pytest.mark.parametrize(("final", "answer"), WRONG)
def test_a_wrong_answer_does_not(final, answer):
    assert grade(final, answer) == 0.0


def test_an_open_box_is_read_as_text():
    assert final_number("\\boxed{18") == Decimal(18)


FORMS = [
    "{}",
    "{:,}",
    "{:,}.00",
    "${:,}",
    "the total is **{:,}** dollars.",
    "\\boxed{{{}}}",
    "2 + 2 gives\n#### {}",
]


@given(st.integers(-(10**9), 10**9), st.sampled_from(FORMS))
def test_a_number_is_read_back_from_every_form(number, form):
    assert final_number(form.format(number)) == number


@given(st.text())
def test_no_text_breaks_the_verifier(text):
    assert grade(text, "18") in (0.0, 1.0)


# ---- episodes -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, 64)
    return load_tokenizer(folder)


def episode(tokenizer, completion, finish="stop"):
    ids = encode(tokenizer, completion)
    return Episode((1,), ids, (-0.1,) * len(ids), finish, 0)


MANY = (
    "<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>analysis<|message|>2<|end|><|start|>assistant"
    "<|channel|>final<|message|>18<|return|>"
)
GRADED = {
    "right": (render_completion("18", "9+9"), "stop", Graded(1.0, "18", False)),
    "two analysis messages": (MANY, "stop", Graded(1.0, "18", False)),
    "the number in the analysis only": (render_completion("7", "18"), "stop", Graded(0.0, "7", False)),
    "never final": ("<|channel|>analysis<|message|>18", "length", Graded(0.0, None, True)),
    # the first digits of 180 are no 18: a message that was cut off earns nothing
    "cut in the final message": ("<|channel|>final<|message|>18", "length", Graded(0.0, "18", True)),
    "a call": ("<|channel|>commentary<|message|>18<|call|>", "stop", Graded(0.0, None, False)),
}


@pytest.mark.parametrize("case", GRADED)
def test_the_final_channel_is_graded(tokenizer, case):
    completion, finish, wanted = GRADED[case]
    assert grade_episodes([episode(tokenizer, completion, finish)], [Problem("9+9", "18")], tokenizer) == [
        wanted
    ]


def test_a_channel_that_is_only_spelt_was_not_reached(tokenizer):
    from helpers.harmony import encode_text

    ids = encode_text(tokenizer, "<|channel|>final<|message|>18<|return|>")
    graded = grade_episodes(
        [Episode((1,), ids, (-0.1,) * len(ids), "stop", 0)], [Problem("9+9", "18")], tokenizer
    )
    assert graded == [Graded(0.0, None, False)]


# ---- questions ----------------------------------------------------------------------------------------------
def lines(tmp_path, *records):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return file


def test_gsm8ks_own_form_is_read(tmp_path):
    worked = "48/2 = <<48/2=24>>24 clips.\nTogether 48+24 = 1,072.\n#### 1,072"
    problems = read_questions(lines(tmp_path, {"question": "How many?", "answer": worked}, "", ""))
    assert problems == (Gsm8kProblem("How many?", "1072"),)


BAD = {
    "no JSON": ("{", "line 1 is no JSON"),
    "no object": ("[1]", "line 1 is no object"),
    "no answer": ({"question": "?"}, 'line 1 needs "question" and "answer"'),
    "empty question": ({"question": " ", "answer": "#### 1"}, "both text"),
    "no mark": ({"question": "?", "answer": "42"}, "the answer's last line has to be `#### 42`"),
    "mark not last": ({"question": "?", "answer": "#### 42\nso it is"}, "last line"),
    "no number": ({"question": "?", "answer": "#### many"}, "last line"),
    "empty": ("\n\n", "holds no question"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(tmp_path, case):
    record, words = BAD[case]
    with pytest.raises(QuestionsError) as error:
        read_questions(lines(tmp_path, record))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(QuestionsError, match="absent.jsonl cannot be read"):
        read_questions(tmp_path / "absent.jsonl")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuestionsError, match="cannot be read as text"):
        read_questions(tmp_path / "b")


def test_a_step_asks_the_same_different_questions_each_time():
    task = Gsm8k(tuple(Gsm8kProblem(str(i), "1") for i in range(40)))
    assert task.sample(8, 3) == task.sample(8, 3) != task.sample(8, 4)
    assert len(set(task.sample(40))) == 40
    assert task.sample(8) != Gsm8k(task.problems, seed=1).sample(8)
    with pytest.raises(QuestionsError, match="41 prompts a step, and there are 40 questions"):
        task.sample(41)


def test_without_pyarrow_both_ways_are_named():
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(QuestionsError, match=r"pyarrow is not installed.*--questions FILE.jsonl"):
            hub_questions()
    else:
        pytest.skip("pyarrow is installed here (GPU lock): its absence cannot be shown")


class Hub(http.server.BaseHTTPRequestHandler):
    """The two requests that the hub's client makes for a small file."""

    content = b""

    def do_HEAD(self):
        wanted = f"/datasets/{HUB_DATASET}/resolve/main/{HUB_FILE}"
        self.send_response(200 if self.path == wanted else 404)
        for name, value in (
            ("ETag", '"1"'),
            ("X-Repo-Commit", "a" * 40),
            ("Content-Length", str(len(self.content))),
        ):
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


READ_HUB = """
from helpers.gsm8k import QuestionsError, hub_questions
try:
    print(hub_questions()[0])
except QuestionsError as error:
    print(error)
"""


def ask_hub(endpoint, cache):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READ_HUB], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr[-500:]


def test_the_hubs_file_is_read_and_a_dead_hub_named(hub, tmp_path):
    table = pytest.importorskip("pyarrow", reason="hub's parquet file NOT READ: pyarrow is in gpu.lock only")
    import pyarrow.parquet as parquet

    parquet.write_table(table.table({"question": ["2+2?"], "answer": ["#### 4"]}), tmp_path / "x.parquet")
    Hub.content = (tmp_path / "x.parquet").read_bytes()
    assert "Gsm8kProblem(question='2+2?', answer='4', preamble=True)" in ask_hub(hub, tmp_path / "cache")
    gone = ask_hub("http://127.0.0.1:9", tmp_path / "other")
    assert f"the hub does not give {HUB_DATASET}" in gone and "--questions FILE.jsonl" in gone


# ---- prompts ------------------------------------------------------------------------------------------------
def test_the_prompt_has_the_preamble_of_the_format_description():
    prompt = Gsm8kProblem("What is 2+2?", "4").prompt
    assert prompt.startswith("<|start|>system<|message|>You are ChatGPT") and prompt.endswith(
        "<|start|>assistant"
    )
    assert f"Current date: {FROZEN_DATE}\n\nReasoning: low\n" in prompt
    assert f"<|start|>developer<|message|># Instructions\n\n{INSTRUCTIONS}<|end|>" in prompt
    assert prompt.endswith(render_prompt("What is 2+2?"))


def test_without_it_the_users_turn_alone(tokenizer):
    problem = Gsm8kProblem("2+2=?", "4", preamble=False)
    assert problem.prompt == render_prompt("2+2=?")
    assert check_prompts(tokenizer, [problem]) == [encode(tokenizer, problem.prompt)]


def test_words_that_the_tokenizer_lacks_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"cannot write 'You are ChatGPT.*--no-preamble"):
        check_prompts(tokenizer, [Gsm8kProblem("2+2=?", "4")])
    with pytest.raises(ValueError, match="cannot write 'How many"):
        check_prompts(tokenizer, [Gsm8kProblem("How many?", "4", preamble=False)])


def test_a_question_that_spells_a_special_token_is_refused(tokenizer):
    with pytest.raises(ValueError, match="spells a special token"):
        check_prompts(tokenizer, [Gsm8kProblem("1<|end|>2", "4", preamble=False)])


def test_token_ids_are_openai_harmonys():
    base = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if not base or not (Path(base) / "o200k_base.tiktoken").is_file():
        pytest.skip(
            "token ids NOT CHECKED: put o200k_base.tiktoken in a folder, name it in TIKTOKEN_ENCODINGS_BASE"
        )
    import openai_harmony as oh

    encoding = oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)
    system = (
        oh.SystemContent.new()
        .with_reasoning_effort(oh.ReasoningEffort.LOW)
        .with_conversation_start_date(FROZEN_DATE)
    )
    problem = Gsm8kProblem("Tom buys 3 pens at $1.50 each. How much does he pay?", "4.5")
    messages = [
        oh.Message.from_role_and_content(oh.Role.SYSTEM, system),
        oh.Message.from_role_and_content(
            oh.Role.DEVELOPER, oh.DeveloperContent.new().with_instructions(INSTRUCTIONS)
        ),
        oh.Message.from_role_and_content(oh.Role.USER, problem.question),
    ]
    wanted = encoding.render_conversation_for_completion(
        oh.Conversation.from_messages(messages), oh.Role.ASSISTANT
    )
    assert encoding.encode(problem.prompt, allowed_special="all") == wanted
    assert len(wanted) < 200  # leaves room for the answer


def test_half_a_letter_is_no_question(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 + 1 \\ud800", "answer": "#### 2"}\n')
    with pytest.raises(QuestionsError, match="line 1: the question holds half of a surrogate pair"):
        read_questions(file)

"""Harmony: what is rendered can be parsed, whatever is written can be parsed, and stopping does not cut an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import CHARACTERS, SPECIAL_TOKENS, tiny_vocabulary, write_tiny_tokenizer
from helpers.harmony import (
    STOP_TOKENS, Answer, decode, encode, load_tokenizer, parse_completion, render_completion, render_prompt, stop_token_ids,
)  # fmt: skip

plain = st.text("".join(CHARACTERS).replace("<", ""), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, 64)
    return load_tokenizer(folder)


@given(final=plain, analysis=st.none() | plain)
def test_rendered_is_parsed(final, analysis):
    assert parse_completion(render_completion(final, analysis)) == Answer(analysis, final, True)


@given(st.lists(st.sampled_from(list(tiny_vocabulary(64))), max_size=30))
def test_anything_is_parsed_without_raising(tokens):
    text = "".join(tokens)
    answer = parse_completion(text)
    assert isinstance(answer.well_formed, bool)
    if answer.well_formed:  # nothing stands around a well-formed answer
        assert text.endswith("<|return|>") and text.count("<|return|>") == 1
        assert render_completion(answer.final, answer.analysis or None) == text or not answer.analysis


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "<|channel|>final<|message|>4",  # cut by the token budget
        "<|channel|>final<|message|>4<|return|><|return|>",
        "x<|channel|>final<|message|>4<|return|>",
        "<|channel|>analysis<|message|>0034699<|end|>",  # stopped at <|end|>
        "<|channel|>final<|message|>4<|end|>",
        "<|channel|>analysis<|message|>1<|end|><|channel|>final<|message|>4<|return|>",  # no <|start|>assistant
        "<|channel|>final<|message|>4<|reserved_3|><|return|>",
    ],
)
def test_not_well_formed(text):
    assert not parse_completion(text).well_formed


def test_end_does_not_stop_an_answer(tokenizer):
    assert "<|end|>" not in STOP_TOKENS
    worked = render_completion("4", "0034699")
    stops = set(stop_token_ids(tokenizer))
    ids = encode(tokenizer, worked)
    first_stop = next(i for i, token in enumerate(ids) if token in stops)
    assert first_stop == len(ids) - 1
    assert tokenizer.token_to_id("<|end|>") not in stops


@given(st.lists(st.sampled_from(list(tiny_vocabulary(64))), max_size=30))
def test_text_survives_the_tokenizer(tokenizer, tokens):
    """Text -> ids -> text; the ids may be others than those that made the text, which is why episodes keep ids."""
    text = "".join(tokens)
    assert decode(tokenizer, encode(tokenizer, text)) == text


@given(st.lists(st.integers(0, 63), max_size=40))
def test_every_id_can_be_decoded(tokenizer, ids):
    vocabulary = {i: t for t, i in tiny_vocabulary(64).items()}
    assert decode(tokenizer, ids) == "".join(vocabulary[i] for i in ids)


def test_special_tokens_and_words_are_single_tokens(tokenizer):
    for word in (*SPECIAL_TOKENS, "user", "assistant", "analysis", "final"):
        assert len(encode(tokenizer, word)) == 1
    assert len(encode(tokenizer, render_prompt("9604093"))) == 13


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        load_tokenizer(tmp_path)

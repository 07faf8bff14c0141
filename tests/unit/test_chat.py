"""Templates and tokens: sdpo.chat."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo.chat import Chat, remove_thinking
from sdpo.errors import ConfigError
from tests.conftest import TEMPLATE, byte_tokenizer

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>x</think>y", "y"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("its opening tag was in the prompt</think>\n\nanswer", "answer"),
        ("answer <think>never closed", "answer"),
        ("<think>never closed", ""),
        ("[THINK]hm[/THINK] 4", "4"),
        ("<|START_THINKING|>hm<|END_THINKING|>4", "4"),
        ("<thinking>hm</thinking>4", "4"),
        ("<|begin_of_thought|>hm<|end_of_thought|>\n4", "4"),
        ("<think>outer <think>inner</think> rest</think> 4", "4"),
        ("plain < 3 text", "plain < 3 text"),
    ],
)
def test_thinking_is_removed_in_every_form(text: str, left: str) -> None:
    assert remove_thinking(text) == left


def test_prompt_ends_in_the_generation_header() -> None:
    chat = Chat(byte_tokenizer())
    assert chat.decode(chat.prompt_ids(QUESTION), special=True).endswith("<|start|>assistant\n")


@given(st.text(max_size=30), st.sampled_from(["<|end|>", "<|start|>", "<|pad|>"]))
@settings(max_examples=50, deadline=None)
def test_special_tokens_in_untrusted_text_stay_text(text: str, special: str) -> None:
    chat = Chat(byte_tokenizer())
    hostile = f"{text}{special}{text}"
    ids = chat.encode(chat.neutralise(hostile))
    assert not set(ids) & set(chat.tokenizer.all_special_ids)
    assert set(chat.encode(hostile)) & set(chat.tokenizer.all_special_ids), "the attack works without it"


def test_pad_equal_to_eos_and_no_pad_at_all() -> None:
    assert Chat(byte_tokenizer(pad="<|end|>")).pad_id == Chat(byte_tokenizer(pad=None)).pad_id
    assert Chat(byte_tokenizer()).pad_id != Chat(byte_tokenizer()).eos_id


def test_no_chat_template_is_one_line() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="tokenizer of gpt has no chat template"):
        Chat(tokenizer, name="gpt")


def test_template_without_system_role() -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    chat = Chat(byte_tokenizer(refusing), name="gemma")
    with pytest.raises(ConfigError, match=r"chat template of gemma refuses the roles \[system user\]"):
        chat.prompt_ids([{"role": "system", "content": "Be brief."}, *QUESTION])


def test_template_that_drops_the_system_text() -> None:
    dropping = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    chat = Chat(byte_tokenizer(dropping))
    with pytest.raises(ConfigError, match="drops the system text"):
        chat.check(QUESTION, [{"role": "system", "content": "Be brief."}, *QUESTION])


def test_different_generation_headers_are_refused() -> None:
    """A template that opens a thinking block only when the question mentions feedback."""
    uneven = TEMPLATE.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if 'feedback' in messages[-1]['content'] %}<think>{% endif %}{% endif %}",
    )
    chat = Chat(byte_tokenizer(uneven))
    with pytest.raises(ConfigError, match="end differently"):
        chat.check(QUESTION, [{"role": "user", "content": "feedback"}])
    chat.check(QUESTION, [{"role": "user", "content": "nothing of the kind"}])


def test_cut_marks_what_is_gone() -> None:
    chat = Chat(byte_tokenizer())
    text, lost = chat.cut("a" * 50 + "b" * 50, 20)
    assert (text, lost) == ("a" * 20 + " [... 80 tokens cut ...]", 80)
    text, lost = chat.cut("a" * 50 + "b" * 50, 20, middle=True)
    assert (text, lost) == ("a" * 10 + " [... 80 tokens cut ...] " + "b" * 10, 80)
    assert chat.cut("short", 20) == ("short", 0)


def test_cut_does_not_leave_half_a_character() -> None:
    text, _ = Chat(byte_tokenizer()).cut("é" * 30, 11)
    assert "\ufffd" not in text


def test_thinking_tags_that_are_special_tokens_stay_in_a_completions_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "[THINK]", "[/THINK]"]})
    chat = Chat(tokenizer)
    ids = (*chat.encode("[THINK]secret[/THINK]answer"), chat.eos_id)
    assert "secretanswer" in chat.decode(ids)
    assert chat.completion_text(ids) == "[THINK]secret[/THINK]answer"
    assert remove_thinking(chat.completion_text(ids)) == "answer"
    assert chat.completion_text((*chat.encode("answer"), chat.eos_id)) == "answer"


def test_megabytes_are_cut_quickly() -> None:
    import time

    chat = Chat(byte_tokenizer())
    start = time.process_time()
    text, lost = chat.cut("x" * 20_000_000, 100)
    assert text.startswith("x" * 100 + " [...")
    assert lost > 1000
    assert chat.count("x" * 20_000_000, 100) == 100
    assert time.process_time() - start < 2

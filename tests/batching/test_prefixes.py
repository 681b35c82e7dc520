"""The keys of prompts and chats."""

import pickle
import subprocess
import sys
import timeit

import pytest
from apache_beam.ml.inference.vllm_inference import OpenAIChatMessage
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.prefixes import ChatPrefixKeyFn, PrefixBatchingConfig, PromptPrefixKeyFn


@pytest.mark.parametrize(
    ("prompt", "length", "delimiters", "key"),
    [
        ("short", 512, ("\n\n",), "short"),
        ("x" * 600, 512, ("\n\n",), "x" * 512),
        ("system\n\nquestion", 512, ("\n\n",), "system"),
        ("system\n\nquestion", 512, (), "system\n\nquestion"),
        ("choose: a, b. text\n\nmore", 512, ("\n\n", ":"), "choose"),
        ("text\n\nchoose: a", 512, (":", "\n\n"), "text"),
        ("abcde\n\nf", 6, ("\n\n",), "abcde"),  # starts with the last character that counts
        ("abcdef\n\ng", 6, ("\n\n",), "abcdef"),
        ("abcdefg\n\nh", 6, ("\n\n",), "abcdef"),
        ("abab", 4, ("ab", "bab"), ""),
        ("", 512, ("\n\n",), ""),
        ("🦜" * 10, 3, (), "🦜" * 3),
    ],
)
def test_key_of_a_prompt(prompt, length, delimiters, key):
    assert PromptPrefixKeyFn(length, delimiters)(prompt) == key


@given(
    st.text("ab:\n", max_size=30),
    st.integers(1, 20),
    st.lists(st.text("ab:\n", min_size=1, max_size=3), max_size=3),
)
def test_key_of_a_prompt_is_what_the_specification_says(prompt, length, delimiters):
    starts = [prompt.find(delimiter) for delimiter in delimiters]
    expected = min([start for start in starts if 0 <= start < length], default=length)
    assert PromptPrefixKeyFn(length, delimiters)(prompt) == prompt[:expected]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": "You label."},
        OpenAIChatMessage(role="system", content="You label."),
        {"role": "system", "content": [{"type": "text", "text": "You label."}, {"type": "image"}]},
    ],
)
def test_key_of_a_chat(message):
    chat = [message, {"role": "user", "content": "It crashes."}]
    assert ChatPrefixKeyFn(8)(chat) == "system: You labe"
    assert ChatPrefixKeyFn(8, delimiters=[" "])(tuple(chat)) == "system: You"


def test_role_is_part_of_the_key():
    key_fn = ChatPrefixKeyFn(8)
    assert key_fn([{"role": "user", "content": "x"}]) != key_fn([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("text", "a list of messages, got str"),
        ({"role": "user", "content": "x"}, "a list of messages, got dict"),
        (["text"], "a role of type str, got str"),
        ([{"content": "x"}], "a role of type str"),
        ([{"role": "user"}], "text part"),
        ([{"role": "assistant", "content": None}], "text part"),
        ([{"role": "user", "content": []}], "text part"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text part"),
        ([{"role": "user", "content": ["text"]}], "text part"),
    ],
)
def test_other_message_schemas_raise(messages, said):
    with pytest.raises(TypeError, match=said):
        ChatPrefixKeyFn()(messages)


def test_no_messages_raise():
    with pytest.raises(ValueError, match="empty"):
        ChatPrefixKeyFn()([])


@pytest.mark.parametrize("prompt", [b"bytes", None, 1, ["a"]])
def test_other_prompts_raise(prompt):
    with pytest.raises(TypeError, match=f"must be a str, got {type(prompt).__name__}"):
        PromptPrefixKeyFn()(prompt)


@pytest.mark.parametrize("key_fn_class", [PromptPrefixKeyFn, ChatPrefixKeyFn])
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"prefix_char_len": 0}, ValueError, "prefix_char_len: 0 is less than the minimum of 1"),
        ({"prefix_char_len": True}, TypeError, "prefix_char_len: True is a bool"),
        ({"prefix_char_len": 1.5}, TypeError, "prefix_char_len: 1.5 is a float"),
        ({"delimiters": [""]}, ValueError, "delimiters: '' is empty"),
        ({"delimiters": [1]}, TypeError, "delimiters: 1 is a int"),
        ({"delimiters": "\n\n"}, TypeError, r"delimiters: '\\n\\n' is a str"),
    ],
)
def test_wrong_arguments_are_rejected_at_construction(key_fn_class, arguments, error, said):
    with pytest.raises(error, match=said):
        key_fn_class(**arguments)


def test_key_functions_are_values():
    key_fn = PromptPrefixKeyFn(8, [":"])
    assert pickle.loads(pickle.dumps(key_fn)) == key_fn
    assert hash(key_fn) == hash(PromptPrefixKeyFn(8, (":",)))
    assert key_fn != PromptPrefixKeyFn(9, [":"])
    assert key_fn != ChatPrefixKeyFn(8, [":"])
    assert repr(key_fn) == "PromptPrefixKeyFn(8, delimiters=(':',))"


def test_config_resolves_to_the_extractor_of_the_handler():
    assert PrefixBatchingConfig().resolve(PromptPrefixKeyFn) == PromptPrefixKeyFn(512)
    assert PrefixBatchingConfig().resolve(ChatPrefixKeyFn) == ChatPrefixKeyFn(512)
    config = PrefixBatchingConfig(prefix_char_len=9, prefix_delimiters=[":"])
    assert config.resolve(ChatPrefixKeyFn) == ChatPrefixKeyFn(9, [":"])
    assert PrefixBatchingConfig(prefix_delimiters=[]).resolve(
        PromptPrefixKeyFn
    ) == PromptPrefixKeyFn(512, ())
    assert PrefixBatchingConfig(key_fn=len).resolve(PromptPrefixKeyFn) is len
    assert PrefixBatchingConfig().num_shards == 8
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"num_shards": 0}, ValueError, "num_shards: 0 is less than the minimum of 1"),
        ({"num_shards": {"a": True}}, TypeError, r"num_shards\['a'\]: True is a bool"),
        ({"prefix_char_len": 0}, ValueError, "prefix_char_len: 0"),
        ({"prefix_delimiters": [""]}, ValueError, "prefix_delimiters: ''"),
        ({"key_fn": "x"}, TypeError, "key_fn: 'x' is not callable"),
        ({"key_fn": len, "prefix_delimiters": [":"]}, ValueError, "no effect together with"),
    ],
)
def test_wrong_configs_are_rejected(arguments, error, said):
    with pytest.raises(error, match=said):
        PrefixBatchingConfig(**arguments)


def test_a_megabyte_costs_what_a_short_prompt_costs():
    key_fn = PromptPrefixKeyFn(512)
    short, long = "x" * 1000, "x" * 1_000_000

    def seconds(prompt):
        return min(timeit.repeat(lambda: key_fn(prompt), number=2000, repeat=20)) / 2000

    # The benchmark has the real bounds; other processes run beside the tests.
    assert seconds(long) < 2 * seconds(short)
    assert seconds(short) < 5e-6


def test_beam_is_not_needed():
    code = "import sys, beam_llm.prefixes; sys.exit('apache_beam' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The server under real clients: rows are `rollout`'s, whoever shares their batch, and no answer is lost."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest
import requests
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from d1.commands.serve import hosts
from d1.models import load_model
from d1.sampling import SamplingSettings
from d1.serve import app
from d1.serve.answers import Choice
from d1.serve.engine import key_of
from d1.serve.requests import Completion, Server, stream_rows
from tests.conftest import save_tiny_model
from tests.d1.serve.serving import EXACT, SAMPLERS, alone, asked, check, serving
from tests.d1.sft.templates import byte_tokenizer
from tests.faults import edit_json, with_nan

AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return save_tiny_model(folder / "other", seed=1).parent


@pytest.fixture(scope="module")
def tiny(tiny_model_dir, weights):
    with serving(tiny_model_dir, weights_dir=weights, max_gen_length=64) as served:
        yield served


@pytest.fixture(scope="module")
def client(tiny):
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("lanes", ["one", "several", "blocks"])
def test_40_clients_get_the_rows_that_rollout_gives_for_each_alone(tiny, tiny_block_dir, lanes):
    def everyone(served):
        samplers, block = (SAMPLERS, None) if lanes == "several" else (EXACT[:2], 4 if lanes == "blocks" else None)
        bodies = [asked(client, samplers, block) for client in range(40)]
        counters = "d1_forward_passes_total", "d1_row_passes_total"
        before = [*map(served.metric, counters)]
        with ThreadPoolExecutor(40) as clients:
            with served.paused():
                answers = clients.map(lambda body: served.post("/generate", **body), bodies)
                served.wait_for("d1_rows_waiting", 40)
            for body, answer in zip(bodies, answers, strict=True):
                check(served, body, answer)
        if lanes == "one":  # full until no row waits; then at most the longest completion's passes follow
            passes, rows = (served.metric(name) - then for name, then in zip(counters, before, strict=True))
            assert rows >= 8 * (passes - 40) > 0

    if lanes == "blocks":
        with serving(tiny_block_dir) as served:
            everyone(served)
    else:
        everyone(tiny)


def test_several_rows_of_one_request(tiny):
    params = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    one = tiny.post("/generate", input_ids=[5, 6], rid="x", sampling_params=params | {"n": 3})
    two = tiny.post("/generate", input_ids=[[5, 6]] * 3, rid=["x-2", "x-1", "x-0"], sampling_params=params)
    assert [row["output_ids"] for row in one] == [row["output_ids"] for row in two][::-1]
    assert len({tuple(row["output_ids"]) for row in one}) == 3
    fresh = [tiny.post("/generate", input_ids=[5, 6], sampling_params=params)["output_ids"] for _ in range(3)]
    assert len({*map(tuple, fresh)}) == 3  # without an rid each request draws anew
    assert key_of("1-0-17") == (1, 0, 17)
    assert len({key_of(rid) for rid in ("1-0", "1-1", "a", "b", "1-", "", "\ud800", "9" * 12)}) == 8


def test_openais_client_completes_chats_and_streams(client, tiny):
    assert [model.id for model in client.models.list()] == ["tiny"]
    given = {"model": "tiny", "max_tokens": 24, "temperature": 0.8, "seed": 5, "n": 2}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}], **given}
    whole = client.chat.completions.create(**chat)
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [c.message.content for c in client.chat.completions.create(**chat).choices]
    assert texts[0] != texts[1]
    parts, steps = ["", ""], 0
    own = {"block_length": 4, "steps": 12}  # which OpenAI's dialect has no word for
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for event in client.chat.completions.create(**chat, **options, extra_body=own | {"stream_steps": True}):
        for choice in event.choices:
            parts[choice.index] += choice.delta.content or ""
        steps += getattr(event, "step", None) is not None
        last = event
    blocky = client.chat.completions.create(**chat, extra_body=own)
    assert parts == [choice.message.content for choice in blocky.choices]
    assert last.usage == blocky.usage
    assert 2 <= steps <= 24
    turns = [{"role": "user", "content": "a b"}]
    prompt = tiny.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    done = client.completions.create(prompt=[prompt], **given)
    assert [choice.text for choice in done.choices] == texts
    params = {"max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 5}
    rows = tiny.post("/generate", input_ids=[prompt] * 2, rid=["seed-0", "seed-1"], sampling_params=params)
    counts = [len(row["output_ids"]) - (row["meta_info"]["finish_reason"]["type"] == "stop") for row in rows]
    assert whole.usage.completion_tokens == done.usage.completion_tokens == sum(counts)
    stop = texts[0].split()[2]
    shorter = client.completions.create(prompt=prompt, stop=[stop], **given).choices[0]
    assert (shorter.text, shorter.finish_reason) == (texts[0].partition(stop)[0], "stop")
    events = client.completions.create(prompt=prompt, stop=[stop], stream=True, **given)
    assert "".join(e.choices[0].text for e in events if e.choices[0].index == 0) == shorter.text


def test_openais_stream_helper_gets_the_messages_of_whole_answers(client):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 24, "seed": 5, "n": 2}
    blocks = {"block_length": 4, "steps": 12, "temperature": 0.8}
    texts = [choice.message.content for choice in client.chat.completions.create(**chat, extra_body=blocks).choices]
    chat["stop"] = [text.split()[-1] for text in texts]  # the helper refuses the finish_reason length
    whole = client.chat.completions.create(**chat, extra_body=blocks)
    with client.chat.completions.stream(**chat, extra_body=blocks | {"stream_steps": True}) as stream:
        joined = stream.get_final_completion()
    messages = [(choice.message.role, choice.message.content) for choice in joined.choices]
    assert messages == [("assistant", choice.message.content) for choice in whole.choices]


def test_lm_evals_clients_get_what_its_model_of_this_library_gives(tiny, tiny_model_dir, monkeypatch):
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    from d1.eval.harness import register
    from tests.d1.eval.test_harness import generating

    texts = [f"<bos><user>{text}<assistant>" for text in ("a b c", "1 2", "x + y", "7")]
    wanted = register()(model_path=str(tiny_model_dir), batch_size=4, block_length=8).generate_until(
        generating(texts, max_gen_toks=16)
    )
    given = {"model": "tiny", "tokenizer": str(tiny_model_dir), "num_concurrent": 4}
    url = f"{tiny.url}/v1/completions"
    for tokenized in (True, False):
        harness = LocalCompletionsAPI(
            base_url=url, tokenizer_backend="huggingface", tokenized_requests=tokenized, **given
        )
        assert harness.generate_until(generating(texts, max_gen_toks=16)) == wanted
    chats = LocalChatCompletion(base_url=f"{tiny.url}/v1/chat/completions", **given)
    turns = [chats.apply_chat_template([{"role": "user", "content": text}]) for text in ("a b c", "1 2", "x + y", "7")]
    assert chats.generate_until(generating(turns, max_gen_toks=16)) == wanted


def test_openais_client_gets_clear_errors(client):
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="tiny", prompt="a", echo=True, logprobs=0)  # log-likelihoods
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")


HUGE = st.sampled_from([10**30, -(10**30), 10**400, 2**31, 2**63, 1e308, 1 << 30])
LEAF = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | HUGE
JSON = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
IDS = st.lists(st.integers(-2, 60), max_size=4)
NUMBERS = {
    name: LEAF | st.integers(0, 9) | st.floats(0, 2) for name in ("temperature", "top_p", "top_k", "steps", "n", "seed")
}
NUMBERS |= {name: LEAF | st.integers(0, 9) for name in ("block_length", "cfg_scale", "reveal_level", "max_tokens")}
NUMBERS |= {name: LEAF | st.floats(0, 1) for name in ("edit_threshold", "max_post_steps")}
NAMES = {
    "sampler": st.sampled_from(["exact", "cached", "parallel", "no"]),
    "remasking": st.sampled_from(["random", "entropy", ""]),
}
OPENAI = NUMBERS | NAMES | {"stream": LEAF, "stop": JSON, "ignore_eos": LEAF, "rid": LEAF}
OPENAI |= {"frequency_penalty": LEAF, "stream_options": JSON, "max_completion_tokens": LEAF}
PARAMS = {
    "max_new_tokens" if name == "max_tokens" else "sampling_seed" if name == "seed" else name: of
    for name, of in (NUMBERS | NAMES).items()
}
BODIES = {
    "/generate": st.fixed_dictionaries(
        {"input_ids": JSON | IDS | st.lists(IDS, max_size=3)},
        optional={
            "rid": JSON,
            "padded_to": LEAF | st.integers(1, 9),
            "return_logprob": st.booleans(),
            "sampling_params": JSON | st.fixed_dictionaries({}, optional=PARAMS),
        },
    ),
    "/v1/completions": st.fixed_dictionaries({"prompt": JSON | st.text() | IDS}, optional=OPENAI),
    "/v1/chat/completions": st.fixed_dictionaries(
        {
            "messages": JSON
            | st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": st.text() | JSON}), max_size=2
            )
        },
        optional=OPENAI,
    ),
    "/update_weights_from_disk": st.fixed_dictionaries(
        {"model_path": st.text() | st.sampled_from(["..", "/", "other/../..", "\0"])}, optional={"weight_version": JSON}
    ),
    "/pause_generation": st.fixed_dictionaries({"mode": LEAF | st.sampled_from(["abort", "retract"])}),
}


@settings(max_examples=80, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_no_body_is_answered_by_an_error_of_the_server(tiny, data):
    path = data.draw(st.sampled_from([*BODIES]))
    body = data.draw(BODIES[path] | JSON | st.binary(max_size=20))
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = requests.post(f"{tiny.url}{path}", sent, headers=AS_JSON, timeout=60)
    assert answer.status_code in (200, 400, 429), answer.text
    if answer.status_code != 200:
        assert path == "/update_weights_from_disk" or answer.json()["error"]["message"]
    assert path != "/pause_generation" or answer.status_code == 400  # no mode but in_place, which has to be said
    assert requests.get(f"{tiny.url}/health", timeout=60).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 8, "seed": 3}
NEUTRAL = {  # what clients of OpenAI's API send without asking for anything
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "functions": [None, []],
    "function_call": [None, "none"],
    "parallel_tool_calls": [None, True, False],
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
    "top_k": [None, -1],
    "min_tokens": [None, 0],
    "length_penalty": [None, 1.0],
    "use_beam_search": [None, False],
    "skip_special_tokens": [None, True],
    "stop_token_ids": [None, []],
    "add_generation_prompt": [None, True],
    "continue_final_message": [None, False],
    "chat_template_kwargs": [None, {}],
    "extra_body": [None, {}],
    "extra_headers": [None, {}],
    "keep_alive": [None, "5m", -1],
    "prompt_cache_options": [None],
    "logit_bias": [None, {}],
    "n": [None, 1],
    "top_p": [None, 1, 1.0],
    "temperature": [None],
    "stop": [None, [], ""],
    "stream": [None, False],
    "stream_options": [None],
    "store": [None, False],
    "metadata": [None, {}, {"run": "7"}],
    "user": [None, "me"],
    "safety_identifier": [None, "me"],
    "prompt_cache_key": [None, "me"],
    "service_tier": [None, "auto", "default"],
    "modalities": [None, ["text"]],
    "audio": [None],
    "prediction": [None],
    "reasoning_effort": [None],
    "verbosity": [None],
    "web_search_options": [None],
    "response_format": [None, {"type": "text"}],
    "frequency_penalty": [None, 0, 0.0],
    "presence_penalty": [None, 0, 0.0],
    "max_completion_tokens": [None],
    "model": [None, "tiny"],
    "echo": [None, False],
    "best_of": [None, 1],
    "suffix": [None, ""],
}


def text_of(answer):
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_values_that_ask_for_nothing_change_nothing(tiny, route):
    body = CHAT if "chat" in route else {"prompt": "a b", "max_tokens": 8, "seed": 3}
    wanted = text_of(tiny.post(route, **body))
    assert wanted
    for name, values in NEUTRAL.items():
        for value in values:
            assert text_of(tiny.post(route, **body | {name: value})) == wanted, (name, value)
    everything = {name: values[-1] for name, values in NEUTRAL.items()}
    assert text_of(tiny.post(route, **body | everything)) == wanted
    assert text_of(tiny.post(route, **body | dict.fromkeys(NEUTRAL) | {"seed": 3})) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("top_logprobs", False),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("store", True),
        ("store", 0),
        ("modalities", ["text", "audio"]),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "b"),
        ("service_tier", "flex"),
        ("reasoning_effort", "high"),
        ("n", 0),
        ("nonsense", None),
    ],
)
def test_values_that_ask_for_something_else_are_refused_by_name(tiny, name, value):
    message = tiny.post("/v1/chat/completions", 400, **CHAT | {name: value})["error"]["message"]
    assert message.startswith(f"{name}: ")
    assert "Extra inputs" not in message


def test_a_refusal_names_the_value_and_what_is_accepted(tiny):
    def refuse(**fields):
        return tiny.post("/v1/chat/completions", 400, **CHAT | fields)["error"]["message"]

    assert refuse(store=True) == "store: not supported here with the value True: leave it out, or send false"
    assert refuse(chat_id="7") == "chat_id: not supported here with the value '7': leave it out"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content, name, value in (
        (None, "tool_calls", [call]),
        ("Let me compute.", "tool_calls", [call]),
        ("Let me compute.", "function_call", call["function"]),
        ("4", "reasoning_content", "2 + 2"),
    ):
        messages = [*CHAT["messages"], {"role": "assistant", "content": content, name: value}]
        assert refuse(messages=messages).startswith(f"messages.1: {name} are not supported here")
    headers = {"Content-Type": "application/json"}
    answer = requests.post(f"{tiny.url}/v1/chat/completions", data="{bad", headers=headers, timeout=60)
    assert answer.json()["error"]["message"].startswith("body: not JSON at character 1")


def test_an_answer_of_openais_client_without_content_is_an_empty_message(tiny):
    def answer(content):
        turns = [*CHAT["messages"], {"role": "assistant", "content": content, "tool_calls": None}, *CHAT["messages"]]
        return text_of(tiny.post("/v1/chat/completions", **CHAT | {"messages": turns}))

    assert answer(None) == answer("")


def test_a_message_that_the_chat_template_leaves_out_is_refused(tiny, monkeypatch):
    """Such as those of `developer`, a role of OpenAI's clients that Qwen2.5's template does not write."""
    monkeypatch.setattr(tiny.tokenizer, "chat_template", byte_tokenizer("qwen2_5").chat_template)
    messages = [{"role": "developer", "content": "Be brief."}, *CHAT["messages"]]
    error = tiny.post("/v1/chat/completions", 400, **CHAT | {"messages": messages})["error"]
    assert "leaves out the content of the developer message 'Be brief.'" in error["message"]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_the_usage_counts_a_prompt_of_several_completions_once(client, prompt):
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "n": 3}
    *_, last = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    for usage in (client.completions.create(**options).usage, last.usage):
        assert usage.prompt_tokens == (3 if isinstance(prompt[0], int) else 5)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_openais_client_finds_the_model_by_its_name(client, tiny):
    assert client.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = requests.get(f"{tiny.url}/v1/models/org/other", timeout=60)
    assert answer.status_code == 404
    assert "'org/other' is not served here: this is 'tiny'" in answer.json()["error"]["message"]


MASKED = {
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a <mask> b"}]}),
    "a system message": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "<mask>"}, {"role": "user", "content": "a"}]},
    ),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<mask>"}]}]},
    ),
    "a text": ("/v1/completions", {"prompt": ["a", "a<mask>"]}),
    "ids": ("/v1/completions", {"prompt": [5, 3, 6]}),
    "ids of SGLang": ("/generate", {"input_ids": [[5], [5, 3]]}),
}


@pytest.mark.parametrize("case", MASKED)
def test_a_mask_token_in_a_prompt_is_refused(tiny, case):
    route, body = MASKED[case]
    message = tiny.post(route, 400, **body)["error"]["message"]
    assert message.startswith("the mask token <mask> is in the text")


def test_half_a_character_in_a_body_is_no_error_of_the_server(tiny):
    for body in ('{"prompt": "a \\ud800"}', '{"prompt": "a", "\\udfff": 1}', '{"prompt": "a", "model": "\\ud800"}'):
        answer = requests.post(f"{tiny.url}/v1/completions", body.encode(), headers=AS_JSON, timeout=60)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["message"]


HUGE_INTEGER = 10**30
OF_ONE = {"input_ids": [5]}
REFUSED = {  # a request that took minutes or gigabytes, or has no meaning -> the words of the answer
    "a long prompt": ("/generate", {"input_ids": [5] * 600}, "too long"),
    "prompt and canvas": (
        "/generate",
        {"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 60}},
        "too large",
    ),
    "no token": ("/generate", {"input_ids": [999]}, "none of the model's"),
    "no prompt": ("/generate", {"input_ids": []}, "empty"),
    "one rid": ("/generate", {"input_ids": [[5], [6]], "rid": ["one"]}, "as many rid"),
    "a cache": ("/generate", OF_ONE | {"sampling_params": {"kv_cache": "dual"}}, "kv_cache"),
    "a typo": ("/generate", OF_ONE | {"sampling_params": {"temperatur": 1}}, "sampling_params.temperatur: "),
    "no JSON": ("/generate", "{", "JSON"),
    "an end": ("/generate", OF_ONE | {"sampling_params": {"eos_stop": [5]}}, "eos_stop would be ignored"),
    "a stop token": (
        "/generate",
        OF_ONE | {"sampling_params": {"ignore_eos": True, "stop_token_ids": [5]}},
        "stop_token_ids would be ignored",
    ),
    "a role": ("/v1/chat/completions", {"messages": [{"role": "u" * 90_000, "content": ""}]}, "characters"),
    "a canvas": ("/generate", OF_ONE | {"sampling_params": {"max_new_tokens": HUGE_INTEGER}}, "max_new_tokens"),
    "the room": ("/generate", OF_ONE | {"sampling_params": {"max_new_tokens": 1 << 29}}, "at most 64, not 536870912"),
    "steps": ("/generate", OF_ONE | {"sampling_params": {"steps": 1 << 29}}, "between 2 and 16 steps"),
    "a block": ("/generate", OF_ONE | {"sampling_params": {"block_length": 1 << 29}}, "at most 512, got 536870912"),
    "top_k": ("/generate", OF_ONE | {"sampling_params": {"top_k": HUGE_INTEGER, "temperature": 1}}, "top_k"),
    "rows": ("/generate", {"input_ids": [[5]] * 2000, "sampling_params": {"n": 1024}}, "2048000 completions"),
    "lists": ("/generate", {"input_ids": [[]] * 100_000}, "at most 65536 items"),
    "no ids": ("/generate", {"input_ids": ["a"] * 1_000_000}, "valid integer"),
    "an rid": ("/generate", OF_ONE | {"rid": "-".join(["1"] * 3_000_000)}, "at most 256 characters"),
    "fields": ("/generate", {str(number): 0 for number in range(100_000)}, "100000 fields, of at most 64"),
    "a text": ("/v1/completions", {"prompt": "a " * 4_000_000}, "8000000 characters of text"),
    "texts": ("/v1/completions", {"prompt": ["a"] * 2000, "n": 1024}, "2048000 completions"),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}] * 9}, "characters"),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 65536}, "too long"),
    "stops": ("/v1/completions", {"prompt": "a", "stop": ["a"] * 65}, "at most 64 items"),
    "a stop": ("/v1/completions", {"prompt": "a", "stop": "a" * 1025}, "at most 1024 characters"),
    "not a number": ("/v1/completions", {"prompt": "a", "top_p": math.nan}, "finite"),
    "infinity": ("/v1/completions", {"prompt": "a", "temperature": math.inf}, "finite"),
    "a bool": ("/v1/completions", {"prompt": "a", "max_tokens": True}, "valid integer"),
    "too deep": ("/generate", '{"input_ids":' + "[" * 3_000_000 + "]" * 3_000_000 + "}", "parsing the body"),
    "digits": ("/generate", '{"input_ids":[' + "9" * 3_000_000 + "]}", "parsing the body"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_too_much_or_senseless_is_refused_at_once(tiny, case):
    path, body, words = REFUSED[case]
    sent = body if isinstance(body, str) else json.dumps(body)
    began = time.process_time()
    answer = requests.post(f"{tiny.url}{path}", sent.encode(), headers=AS_JSON, timeout=60)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert time.process_time() - began < 4  # of this process, the server's


def test_work_on_one_request_holds_up_no_other(tiny, monkeypatch):
    """While a prompt is encoded, rows are made or weights are looked for, other clients are answered."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(work):
        def wait(*given):
            begun.set()
            assert go_on.wait(60)
            return work(*given)

        return wait

    monkeypatch.setattr(Server, "rows_to_generate", slowly(Server.rows_to_generate))
    monkeypatch.setattr(Server, "rows_of_openai", slowly(Server.rows_of_openai))
    monkeypatch.setattr(app, "weights_below", slowly(app.weights_below))
    asked = [("/generate", OF_ONE), ("/v1/completions", {"prompt": "a"})]
    asked += [("/update_weights_from_disk", {"model_path": "gone"})]
    with ThreadPoolExecutor(1) as pool:
        for path, body in asked:
            begun.clear(), go_on.clear()
            answer = pool.submit(requests.post, f"{tiny.url}{path}", json=body, timeout=60)
            assert begun.wait(60)
            try:
                assert requests.get(f"{tiny.url}/health", timeout=20).status_code == 200
            finally:
                go_on.set()
            assert answer.result().status_code in (200, 400)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "stream"])
def test_a_client_that_is_killed_stops_its_rows(tiny, path):
    """While they wait, and while they are sampled."""
    params = {"n": 100, "ignore_eos": True, "block_length": 1, "steps": 60}
    body = {"prompt": [5], "max_tokens": 60, "stream": path == "stream", **params}
    if path == "/generate":
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 60, **params}}
    url = f"{tiny.url}{path if path[0] == '/' else '/v1/completions'}"
    words = [shutil.which("curl"), "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    tokens = tiny.metric("d1_tokens_total")

    def kill(name, rows):
        curl = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        tiny.wait_for(name, rows)
        curl.kill()
        curl.wait()
        tiny.wait_for(name, 0)

    with tiny.paused():
        kill("d1_rows_waiting", 100)
    assert tiny.metric("d1_tokens_total") == tokens
    kill("d1_rows_at_work", 8)
    assert tiny.metric("d1_tokens_total") < tokens + 100 * 60


def test_a_full_queue_answers_429_and_loses_nothing(tiny_model_dir):
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}
    with serving(tiny_model_dir, batch_size=1, queue_size=2) as served, ThreadPoolExecutor(2) as pool:
        with served.paused():
            first = [pool.submit(served.post, "/generate", **body) for _ in range(2)]
            served.wait_for("d1_rows_waiting", 2)
            refused = requests.post(f"{served.url}/generate", json=body, timeout=60)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            streamed = requests.post(f"{served.url}/v1/completions", json={"prompt": "a", "stream": True}, timeout=60)
            assert streamed.status_code == 429
        assert len({tuple(one.result()["output_ids"]) for one in first}) == 1


def test_a_batch_of_its_own_has_room_for_its_prompts_and_in_the_batch(tiny):
    """Its numbers are `rollout`'s to the bit: tests/d1/rl/test_servers.py."""
    prompts, rids = [[5] * (3 + row) for row in range(4)], [f"3-{row}" for row in range(4)]
    body = {"input_ids": prompts, "rid": rids, "sampling_params": {"max_new_tokens": 16}}
    assert "6 tokens" in tiny.post("/generate", 400, **body, padded_to=5)["error"]["message"]
    body |= {"input_ids": prompts * 3, "rid": rids * 3}
    assert "--batch_size" in tiny.post("/generate", 400, **body, padded_to=12)["error"]["message"]


def test_weights_are_exchanged_between_rows_and_come_from_one_folder_alone(tiny_model_dir, weights, tmp_path):
    params = {"max_new_tokens": 24, "temperature": 0.9, "ignore_eos": True, "steps": 24, "block_length": 24}
    bodies = [{"input_ids": [5, number], "rid": f"{number}", "sampling_params": params} for number in range(4, 24)]
    folder = weights / "moved"
    shutil.copytree(weights / "other", folder)
    with serving(tiny_model_dir, batch_size=4, weights_dir=weights) as served, ThreadPoolExecutor(20) as pool:
        models = {"default": served.engine.model, "new": load_model(weights / "other")}
        mask, how = served.tokenizer.mask_token_id, SamplingSettings(24, 24, 24, temperature=0.9)

        def of(version: str, body: dict) -> list[int]:
            return alone(models[version], mask, body["input_ids"], body["rid"], how).ids[0, -24:].tolist()

        def under_update(paused: bool) -> set[str]:
            with served.paused():
                rows = [pool.submit(served.post, "/generate", **body) for body in bodies]
                served.wait_for("d1_rows_waiting", 20)
            served.wait_for("d1_rows_at_work", 4)
            if paused:
                with served.paused():
                    refused = served.post("/update_weights_from_disk", 400, model_path="moved")
                    assert "paused in mid-completion" in refused["message"]
            else:
                assert served.post("/update_weights_from_disk", model_path="moved", weight_version="new")["success"]
            versions = set()
            for body, row in zip(bodies, rows, strict=True):
                answer = row.result()
                versions.add(answer["meta_info"]["weight_version"])
                assert answer["output_ids"] == of(answer["meta_info"]["weight_version"], body)
            return versions

        assert under_update(paused=True) == {"default"}
        assert under_update(paused=False) == {"default", "new"}
        (folder / "model.safetensors").write_bytes(b"cut off")
        assert "header" in served.post("/update_weights_from_disk", 400, model_path="moved")["message"]
        assert served.post("/generate", **bodies[0])["output_ids"] == of("new", bodies[0])
        (weights / "link").symlink_to(tiny_model_dir)
        for path in ("..", "link", str(tiny_model_dir), "other/../../x", "gone"):
            assert served.post("/update_weights_from_disk", 400, model_path=path)["success"] is False
        (weights / "link").unlink()
    with serving(tiny_model_dir) as served:
        assert "--weights_dir" in served.post("/update_weights_from_disk", 400, model_path="other")["message"]


@pytest.mark.parametrize(
    ("field", "words"),
    [("mask_token_id", "mask_token_id is 5, not 3"), ("max_position_embeddings", "the model has 5 positions, not 512")],
)
def test_weights_of_a_model_with_another_mask_or_room_are_refused(tiny, weights, field, words):
    folder = weights / field
    shutil.copytree(weights / "other", folder)
    edit_json(folder / "config.json", **{field: 5})
    message = tiny.post("/update_weights_from_disk", 400, model_path=field)["message"]
    assert message == f"{folder}: {words}"


POSTS = ("/generate", "/v1/completions", "/v1/chat/completions", "/update_weights_from_disk", "/pause_generation")
POSTS += ("/continue_generation",)


def status(served, path="/generate", method="POST", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.request(method, f"{served.url}{path}", data="{}", headers=headers, timeout=60).status_code


def test_requests_to_other_names_or_without_the_key_are_refused(tiny, tiny_model_dir):
    """A page whose name leads here (DNS rebinding) sends that name."""
    port = tiny.url.rpartition(":")[2]
    for path in ("/", "/health", "/v1/models", "/model_info", "/metrics"):
        for host in (f"evil.example:{port}", "evil.example", "localhost.evil.example", "a@localhost", "[::1", ""):
            assert status(tiny, path, "GET", Host=host) == 400, host
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "10.0.0.5"):
            assert status(tiny, path, "GET", Host=host) == 200, host
    answer = requests.get(f"{tiny.url}/health", headers={"Host": "evil.example"}, timeout=60)
    assert "--allowed_hosts" in answer.json()["error"]["message"]
    with serving(tiny_model_dir, allowed_hosts=hosts("0.0.0.0", ["Other.example"])) as served:
        machine = socket.gethostname()
        for host in ("10.0.0.5:1", "[fe80::1]", "other.example", machine, "localhost"):
            assert status(served, "/health", "GET", Host=host) == 200, host
        assert status(served, "/health", "GET", Host="evil.example") == 400
    with serving(tiny_model_dir, api_key="secret") as served:  # no page of another site has the key
        for host in ("node1", "localhost"):
            assert status(served, "/v1/models", "GET", Host=host, Authorization="Bearer secret") == 200
            for wrong in ("Bearer wrong", "Bearer secret1", "secret", ""):
                assert status(served, "/v1/models", "GET", Host=host, Authorization=wrong) == 401


def test_a_post_says_that_it_is_json(tiny):
    """A page of another site may send other types without being asked."""
    assert requests.post(f"{tiny.url}/generate", b" " * (9 << 20), timeout=60).status_code == 413  # by its size
    for path in POSTS:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            assert status(tiny, path, Content_Type=kind) == 415, path
        assert status(tiny, path, "OPTIONS", Origin="http://evil.example") == 405
    assert tiny.metric("d1_rows_waiting") == 0
    assert status(tiny, "/continue_generation", Content_Type="Application/JSON; charset=utf-8") == 200


def test_a_body_that_does_not_arrive_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(tiny.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(f"{head}{{".encode())
        answer = b"".join(iter(partial(connection.recv, 1000), b""))  # up to the end of the connection
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body has not arrived in 0 seconds" in answer
    with ThreadPoolExecutor(1) as pool:  # an answer has no such limit
        with tiny.paused():
            row = pool.submit(tiny.post, "/generate", **OF_ONE)
            tiny.wait_for("d1_rows_waiting", 1)
            time.sleep(2 * app.BODY_SECONDS)
        assert row.result()["output_ids"]


def test_requests_wait_while_new_weights_are_moved(tiny_model_dir, weights, monkeypatch):
    begun, go_on, plain = threading.Event(), threading.Event(), torch.nn.Module.to

    def slowly(module, *where, **options):
        if isinstance(module, PreTrainedModel):
            begun.set()
            assert go_on.wait(60)
        return plain(module, *where, **options)

    with serving(tiny_model_dir, weights_dir=weights) as served, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(torch.nn.Module, "to", slowly)
        update = pool.submit(served.post, "/update_weights_from_disk", model_path="other", weight_version="new")
        assert begun.wait(60)
        assert requests.get(f"{served.url}/model_info", timeout=60).json()["weight_version"] == "default"
        row = pool.submit(served.post, "/generate", **OF_ONE)
        served.wait_for("d1_rows_waiting", 1)
        assert requests.get(f"{served.url}/health", timeout=60).status_code == 200
        go_on.set()
        assert update.result()["success"]
        assert row.result()["meta_info"]["weight_version"] == "new"


def test_the_health_is_that_of_the_engine(tiny_model_dir, monkeypatch):
    def error_of(served, status):
        return served.post("/generate", status, **OF_ONE)["error"]["message"]

    with serving(tiny_model_dir) as served:
        with monkeypatch.context() as patch:  # an error in the handling of one request
            patch.setattr(Server, "rows_to_generate", lambda self, body: 1 / 0)
            assert "division" in error_of(served, 500)
        assert requests.get(f"{served.url}/health", timeout=60).status_code == 200
        assert served.post("/generate", **OF_ONE)["output_ids"]
        monkeypatch.setattr(served.engine, "admit_rows", lambda: 1 / 0)  # one in the engine's own thread
        for _ in range(2):
            assert "cannot sample any more: ZeroDivisionError" in error_of(served, 503)
        assert requests.get(f"{served.url}/health", timeout=60).status_code == 503


BAD = 40  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def damaged(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged") / "model"
    with serving(with_nan(tiny_model_dir, folder, "model.embed_tokens.weight", (BAD,))) as served:
        yield served


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_row_whose_logits_are_not_finite_fails_alone(damaged, sampler):
    """Its request gets 500 with the layer; rows that share its passes are `rollout`'s."""
    params = {"max_new_tokens": 8, "block_length": 4, "steps": 4, "temperature": 0, "ignore_eos": True, **sampler}
    settings = SamplingSettings(gen_length=8, block_length=4, steps=4, **sampler)
    model = damaged.engine.model
    clean = [[5, 6, 7], [8, 9]]
    expected = [alone(model, damaged.engine.mask_token_id, ids, "0", settings) for ids in clean]
    with ThreadPoolExecutor(3) as pool, damaged.paused():
        bad = pool.submit(damaged.post, "/generate", 500, input_ids=[5, BAD], rid="bad", sampling_params=params)
        good = [pool.submit(damaged.post, "/generate", input_ids=ids, sampling_params=params) for ids in clean]
        damaged.wait_for("d1_rows_waiting", 3)
        damaged.post("/continue_generation")
        assert [one.result()["output_ids"] for one in good] == [one.ids[0, -8:].tolist() for one in expected]
    message = bad.result()["error"]["message"]
    assert message.startswith("row bad: the model's logits are not finite: the first non-finite output comes from ")
    assert "model.embed_tokens, whose weight has 32 non-finite values out of" in message


def test_a_stream_of_such_a_row_has_no_text(damaged):
    body = {"prompt": [5, BAD], "max_tokens": 8, "stream": True, "stream_steps": True, "ignore_eos": True}
    lines = requests.post(f"{damaged.url}/v1/completions", json=body, timeout=60).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert not any(choice["text"] for event in events[:-1] for choice in event["choices"])
    assert not any("step" in event for event in events)
    assert events[-1]["error"]["code"] == 500
    assert "model.embed_tokens" in events[-1]["error"]["message"]


def test_an_endpoint_is_a_route_of_a_router(tiny_model_dir, monkeypatch):
    """A new one is behind the key, and its errors have OpenAI's form."""
    plain = app.openai_routes

    def with_mine(server):
        router = plain(server)

        @router.get("/mine")
        async def mine(wrong: bool = False):
            if wrong:
                raise LookupError("there is none")
            return {"name": server.name}

        return router

    monkeypatch.setattr(app, "openai_routes", with_mine)
    with serving(tiny_model_dir, api_key="secret") as served:
        get = partial(requests.get, headers={"Authorization": "Bearer secret"}, timeout=60)
        assert requests.get(f"{served.url}/mine", timeout=60).status_code == 401
        assert get(f"{served.url}/mine").json() == {"name": "tiny"}
        refused = get(f"{served.url}/mine", params={"wrong": True})
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, "there is none")


def test_a_client_that_leaves_a_stream_at_its_start_stops_its_rows(tiny_model_dir):
    async def leave(server: Server) -> None:
        rows = server.rows_of_openai(Completion(prompt=[5, 6, 7], max_tokens=8, stream=True))
        choices = [Choice(server.tokenizer, row.ends, ()) for row in rows]
        events = stream_rows(server, rows, choices, "text_completion", usage_n=None)
        await anext(events)
        assert len(server.engine.waiting) == 1
        await events.aclose()

    with serving(tiny_model_dir) as served, served.paused():
        asyncio.run(leave(served.server))
        assert not served.engine.waiting

"""The rules of the SGLang plugin, with a slow engine in its place: they sample what `rollout` samples.

`make test-sglang` runs the same in SGLang itself.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.convert import write_weights
from d1.sampling import SamplingSettings, rollout
from d1.serve.client import Prompts, RolloutServer, Weights, convert_sglang_answer, explain_errors, reveal_steps
from d1.serve.sglang import ANY_TOP_K, VERSION, Sampled, record_blocks, settings_of, step_blocks
from d1.transformers_bridge import stored_weights
from tests.commands import ROOT
from tests.d1.conftest import MASK
from tests.faults import no_lie, resized, with_meta

BLOCK, SEED = 4, 5
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15]]
CHOSEN = {
    "greedy": {},
    "two a pass": {"steps": 6},
    "drawn": {"temperature": 1.0, "steps": 6},
    "nucleus": {"temperature": 1.0, "top_p": 0.7, "top_k": 9, "record_as_sampled": True},
    "at random": {"temperature": 0.8, "remasking": "random"},
    "threshold": {"temperature": 0.7, "sampler": "parallel", "reveal_level": 0.2},
    "entropy": {"sampler": "parallel", "reveal": "entropy", "reveal_level": 3.0},
    "editing": {"sampler": "parallel", "reveal_level": 0.1, "edit_threshold": 0.1, "max_post_steps": 3},
    "drawn edits": {"temperature": 1.0, "sampler": "parallel", "reveal_level": 0.2, "edit_threshold": 0.05}
    | {"max_post_steps": 3},
}


@pytest.fixture(scope="module")
def model(kind_dirs):
    model = load_model(kind_dirs["sdar"]).eval()
    model.lm_head.weight.data *= 6  # sharper than at random, so that some tokens pass a threshold
    return model


def length_of(prompt, blocks=3):
    """A canvas that ends with a block: that many blocks after the one in which the prompt ends."""
    return (len(prompt) // BLOCK + blocks) * BLOCK - len(prompt)


@torch.no_grad()
def engine(model, rows, ends=(), retract=()):
    """What SGLang does: passes over one block per row, all of its tokens in all of its passes, until each row's block
    is finished. Rows whose numbers are in `retract` lose the tokens of their second block once, after two passes."""
    texts = [[*prompt] for prompt, _, _ in rows]
    sampled = [Sampled.create(len(prompt), f"{rid}.a", SEED, ends, settings, "cpu") for prompt, settings, rid in rows]
    blocks, passes = {}, dict.fromkeys(range(len(rows)), 0)
    while live := [
        n for n, one in enumerate(sampled) if not one.has_ended and (one.is_open or not one.row.is_complete)
    ]:
        for number in live:
            if number not in blocks:
                start = len(texts[number]) // BLOCK * BLOCK
                text = texts[number][start:]
                blocks[number] = torch.tensor(text + [MASK] * (BLOCK - len(text)))
                sampled[number].begin(BLOCK)
            passes[number] += 1
            if number in retract and sampled[number].row.block == 1 and sampled[number].row.step == 2:
                retract = [other for other in retract if other != number]
                assert sampled[number].begin(BLOCK)
                blocks[number][:] = MASK
        ids = torch.stack([blocks[number] for number in live])
        logits = []
        for number in live:
            text = torch.tensor([texts[number][: len(texts[number]) // BLOCK * BLOCK] + blocks[number].tolist()])
            logits.append(model(input_ids=text, attention_mask=torch.ones_like(text)).logits[0, -BLOCK:])
        done = step_blocks(ids, torch.stack(logits), [sampled[number] for number in live], MASK)
        for place, number in enumerate(live):
            blocks[number] = ids[place]
        closing = [(place, sampled[number]) for place, number in enumerate(live) if done[place]]
        record_blocks(ids, closing)
        for place, _ in closing:
            number = live[place]
            texts[number] = texts[number][: len(texts[number]) // BLOCK * BLOCK] + blocks.pop(number).tolist()
    return texts, sampled, passes


def test_a_row_whose_logits_are_not_finite_is_marked(kind_dirs):
    """And the other rows go on: the plugin ends its request alone."""
    model = load_model(kind_dirs["sdar"]).eval()
    model.model.embed_tokens.weight.data[11] = torch.nan  # a token of the second prompt
    _, sampled, _ = engine(model, rows_of({}))
    assert [one.is_nonfinite for one in sampled] == [False, True, False]


def rows_of(chosen):
    rows = []
    for number, prompt in enumerate(PROMPTS):
        length = length_of(prompt)
        settings = SamplingSettings(**({"gen_length": length, "block_length": BLOCK, "steps": length} | chosen))
        rows.append((prompt, settings, f"1-{number}"))
    return rows


def expected(model, row, ends=None):
    prompt, settings, rid = row
    own = [keyed_generator(SEED, *map(int, rid.split("-")))]
    ids = torch.tensor([prompt])
    return rollout(model, ids, torch.ones_like(ids), settings, mask_token_id=MASK, generator=own, eos_token_ids=ends)


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_completions_are_those_of_our_sampler(model, chosen):
    """Ids and steps are equal, log-probabilities and entropies up to rounding; the engine makes one more pass per
    block, unless a pass with editing changed nothing; a block that begins again is the same."""
    rows = rows_of(chosen)
    texts, sampled, passes = engine(model, rows, retract=[1])
    for row, text, one in zip(rows, texts, sampled, strict=True):
        prompt, settings, _ = row
        own = expected(model, row)
        assert text == own.ids[0].tolist()
        logps, ids, _ = zip(*one.record["output_token_logprobs"], strict=True)
        assert [*ids] == text[len(prompt) :]
        torch.testing.assert_close(torch.tensor(logps), own.logps[0], rtol=0, atol=1e-5)
        entropies = torch.tensor(one.record["output_token_entropies"])
        torch.testing.assert_close(entropies, own.entropies[0], rtol=0, atol=1e-5)
        if settings.edits is None:
            schedule = settings.schedule(len(prompt) % BLOCK)
            assert reveal_steps(one.record["step_maps"], schedule) == own.reveal_steps[0].tolist()
            if one is not sampled[1]:  # some of whose passes were lost
                assert sum(one.record["forward_passes"]) == own.passes.item() + len(schedule)
    if chosen.get("edit_threshold"):
        assert any(expected(model, row).edits for row in rows)
    for number, one in enumerate(sampled):
        assert passes[number] == sum(one.record["forward_passes"])


def test_a_row_ends_after_the_block_that_holds_an_end(model):
    rows = rows_of({})
    whole = [expected(model, row).ids[0].tolist() for row in rows]
    ends = (whole[0][len(PROMPTS[0]) + 1],)
    texts, sampled, _ = engine(model, rows, ends)
    assert sampled[0].has_ended
    assert texts[0] == whole[0][: len(texts[0])]
    assert len(texts[0]) == 8
    assert expected(model, rows[0], ends).ids[0, : len(texts[0])].tolist() == texts[0]


def params(**given):
    plain = {"custom_params": None, "max_new_tokens": 12, "top_k": ANY_TOP_K, "top_p": 1.0, "temperature": 1.0}
    plain["sampling_seed"] = None
    return SimpleNamespace(**plain | given)


def test_what_a_request_asks_for():
    """SGLang writes temperature 0 as `top_k` 1."""
    plain = SamplingSettings(gen_length=12, block_length=4, steps=12, temperature=1.0)
    assert settings_of(params(), 4) == plain
    assert settings_of(params(top_k=1), 4).temperature == 0.0
    asked = {"block_length": 4, "steps": 3, "temperature": 0.5, "top_k": 7}
    assert settings_of(params(custom_params={"settings": asked}), 4).top_k == 7
    for wrong, said in (
        ({"block_length": 8}, "must be 4, not 8"),
        ({"cfg_scale": 1.0}, "d1 serve"),
        ({"sampler": "cached"}, "cache of its own"),
        ({"tempo": 1}, "tempo is no setting"),
        ({"steps": 99}, "99"),
        ({"sampler": "scdd", "top_k": 0}, "SGLang has no sampler scdd"),
        ({"stop_entropy": 0.1}, "stop_entropy would be ignored"),
        ({"first_token": "masked"}, "first_token would be ignored"),
    ):
        with pytest.raises(ValueError, match=said):
            settings_of(params(custom_params={"settings": asked | wrong}), 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"custom_params": {"settings": [1]}}, r"settings must be an object, got \[1\]"),
        ({"custom_params": {"eos_stop": 2}}, "eos_stop must be a list of token ids, got 2"),
        ({"custom_params": {"eos_stop": None}}, "eos_stop must be a list of token ids, got None"),
        ({"custom_params": {"seed": "7"}}, "the seed must be an integer >= 0, got '7'"),
        ({"custom_params": {"seed": None}}, "the seed must be an integer >= 0, got None"),
        ({"sampling_seed": -1}, "the seed must be an integer >= 0, got -1"),
    ],
)
def test_a_request_with_wrong_parameters_is_refused_before_it_is_sampled(fields, message):
    """An error in the middle of a forward pass would end SGLang's scheduler."""
    with pytest.raises(ValueError, match=message):
        settings_of(params(**fields), 4)


def test_there_is_one_version():
    """That of the plugin, of the tests' environment and of the document."""
    assert f"sglang=={VERSION}\n" in (ROOT / "tests/sglang/requirements.txt").read_text()
    assert set(re.findall(r"sglang==([\d.]+)", (ROOT / "docs/engines.md").read_text())) == {VERSION}


def test_a_server_without_the_plugin_is_refused():
    """By its first answers, with the command that starts a right one."""
    server, asked = RolloutServer("http://127.0.0.1:1"), []

    def answer(method, path, body=None, seconds=0.0):
        asked.append(path)
        return [{"output_ids": [5, 5], "meta_info": {}}] if body else {"weight_version": "default"}

    server.ask = answer
    with pytest.raises(ValueError, match=r"have no step_maps.*--dllm-algorithm D1"):
        server.prepare(MASK, None)
    assert asked == ["/model_info", "/generate"]


def test_answers_have_the_form_of_our_server():
    """After the EOS stop, the rest of the canvas holds the first end; tokens of cached prompts are not counted."""
    settings = SamplingSettings(gen_length=6, block_length=4, steps=6)
    meta = {"output_token_logprobs": [[-0.5, 9, None], [-0.25, 2, None]], "output_token_entropies": [0.1, 0.2]}
    meta |= {"step_maps": [1, 2], "forward_passes": [3, 0], "prompt_tokens": 10, "cached_tokens": 4}
    ours = convert_sglang_answer({"output_ids": [9, 2], "meta_info": meta}, settings, (2, 7))
    assert ours["output_ids"] == [9, 2, 2, 2, 2, 2]
    assert ours["meta_info"]["step_maps"] == [1, 2, 0, 0, 0, 0]
    assert (ours["meta_info"]["forward_passes"], ours["meta_info"]["forward_tokens"]) == (3, 16)


def test_an_answer_of_sglang_that_lacks_a_field_is_one_clear_line():
    def convert(where, answer):
        return convert_sglang_answer(answer, SamplingSettings(6, 4, 6), ends=(2,))

    with pytest.raises(ValueError, match=r"http://a, row 3: the answer is not of the form .*forward_passes"):
        explain_errors("http://a, row 3: ", convert, {"output_ids": [9], "meta_info": {}})


def told_by(model, body):
    """What SGLang answers to the body of `/generate`."""
    params = body["sampling_params"]
    custom, length = params["custom_params"], params["max_new_tokens"]
    settings = SamplingSettings(**{"gen_length": length} | custom["settings"])
    rows = [(text, settings, rid.partition(".")[0]) for text, rid in zip(body["input_ids"], body["rid"], strict=True)]
    texts, sampled, _ = engine(model, rows, tuple(custom["eos_stop"]))
    metas = [{"id": rid, "cached_tokens": 0, "weight_version": "v"} for rid in body["rid"]]
    return [
        {"output_ids": text[len(prompt) :], "meta_info": {**one.record, **meta, "prompt_tokens": len(prompt)}}
        for text, one, meta, (prompt, *_) in zip(texts, sampled, metas, rows, strict=True)
    ]


LIES = [  # of those that the client's check finds in any server's answers, as in tests/d1/rl/test_servers.py
    (lambda rows: rows[::-1], r"row 0 \(id 1-0\..*\): this is the answer for id '1-1\."),
    (lambda rows: resized(rows, lambda of: of[:-1]), "row 1 .*: steps.* is -1: expected|row 1 .* canvas"),
    (lambda rows: with_meta(rows, "step_maps", 1, 10**6), r"row 1 .*: steps\[1\] is 999999"),
]


def test_a_lie_of_sglang_is_one_clear_line(model):
    """The truth is a `Rollout`, equal to that of our sampler."""
    length = length_of(PROMPTS[0])
    settings = SamplingSettings(length, BLOCK, length, temperature=1.0)
    ids, keys = torch.tensor([PROMPTS[0]] * 2), [(SEED, 1, 0), (SEED, 1, 1)]
    prompts = Prompts(ids, torch.ones_like(ids), keys, settings, (), True, model.config.vocab_size, MASK)
    server, weights, lies = RolloutServer("http://127.0.0.1:1"), Weights("v", "v", ROOT), [no_lie]
    server.mask_token_id = MASK
    server.ask = lambda method, path, body: lies[-1](told_by(model, body))
    found = server.sample(prompts, weights)
    for row in range(2):
        own = expected(model, (PROMPTS[0], settings, f"1-{row}"))
        assert torch.equal(found.ids[row], own.ids[0])
        assert torch.equal(found.reveal_steps[row], own.reveal_steps[0])
    for lie, said in LIES:
        lies.append(lie)
        with pytest.raises(ValueError, match=said) as caught:
            server.sample(prompts, weights)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sdar", "llada2_moe"])
def test_an_engine_gets_released_weights_with_the_adapter(kind, kind_dirs, tmp_path):
    """Under their released names; the model in training stays as it was, to the bit."""
    config = LoraConfig(r=2, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
    adapted = get_peft_model(load_model(kind_dirs[kind]), config).eval()
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    own = {name: weight for file in kind_dirs[kind].glob("*.safetensors") for name, weight in load_file(file).items()}
    ids = torch.arange(4, 16).unsqueeze(0)
    expected = adapted(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    write_weights(adapted, tmp_path / "out")
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.state_dict().items())
    names = {name for name, *_ in stored_weights(str(kind_dirs[kind]))}
    whole = load_file(tmp_path / "out/model.safetensors")
    assert names == whole.keys()
    parts = {}
    for learnt in (True, False):
        write_weights(adapted, tmp_path / f"{learnt}", learnt)
        parts[learnt] = load_file(tmp_path / f"{learnt}/model.safetensors")
    changed = {name for name, weight in whole.items() if not torch.equal(weight, own[name])}
    assert parts[True].keys() == changed
    assert parts[False].keys() == names - changed
    assert all(torch.equal(weight, whole[name]) for part in parts.values() for name, weight in part.items())
    found = load_model(tmp_path / "out").eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

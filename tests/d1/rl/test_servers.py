"""RL on a server: what goes there, and what is refused. Runs on several servers are in test_fleet.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.adapters import base_digest
from d1.rl.config import DiffuGRPOConfig
from d1.rl.sources import RolloutRequest
from d1.sampling import SamplingSettings, rollout
from d1.sampling.caches import CACHES
from d1.scoring.inputs import steps_in_blocks
from d1.serve.client import Prompts, RolloutServer, Weights, reveal_steps
from d1.serve.rollouts import PolicyServers
from d1.serve.weights import WeightsFolder, WholeWeights
from tests.commands import ROOT
from tests.d1.serve.serving import serving
from tests.faults import (
    everywhere,
    lying_server,
    no_lie,
    resized,
    with_higher_logps,
    with_logp,
    with_lower_entropies,
    with_meta,
    with_random_tokens,
    with_short_blocks,
    with_token,
)
from tests.rounding import LOGITS, rounding
from tests.tiny_grpo import make_method


def save_tiny_adapter(model_dir, folder):
    """An adapter with names that the model does not have."""
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    get_peft_model(load_model(model_dir), config).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("layers.0", "layers.9"): weight for name, weight in load_file(file).items()}, file)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def test_step_maps_are_reveal_steps():
    steps = torch.tensor([[1, 0, 3, 2, 4, 4, 4, 4, -1, -1, -1, -1]])
    blocks = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])
    in_blocks = steps_in_blocks(steps, blocks)[0]
    step_map = torch.where(in_blocks < 0, 0, in_blocks + 1).tolist()
    assert reveal_steps(step_map, [[1] * 4, [4], [2, 2]]) == steps[0].tolist()


def test_only_the_adapter_goes_to_the_server(tiny_model_dir, tmp_path):
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]}
        trainer = make_method(tiny_model_dir, tmp_path / "run", "d1", peft_config=LORA, **where)
        trainer.source.servers.publish(trainer.model, 7)
        version = served.engine.version
        assert version == f"{trainer.source.servers.run}-7"
        assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["adapter_model.safetensors"]
        trainer.source.servers.close()
        assert not [*tmp_path.rglob("*.safetensors")]
        refused = served.post("/update_weights_from_disk", 400, model_path="wrong")
        assert "lies in no folder of" in refused["message"]
        save_tiny_adapter(tiny_model_dir, tmp_path / "wrong")
        sampled = {"input_ids": [5, 6], "rid": "1", "sampling_params": {"max_new_tokens": 9, "temperature": 1.0}}
        before = served.post("/generate", **sampled)["output_ids"]
        assert "does not fit" in served.post("/update_weights_from_disk", 400, model_path="wrong")["message"]
        after = served.post("/generate", **sampled)
        assert (after["output_ids"], after["meta_info"]["weight_version"]) == (before, version)


def test_what_cannot_be_is_refused(tiny_model_dir, tmp_path):
    url = {"rollout_server_base_url": ["http://127.0.0.1:1"]}
    mode = {"rollout_mode": "server"}
    several = [(mode, "needs"), (url, "no other mode has any")]
    several += [(mode | {"rollout_server_base_url": urls}, "each once") for urls in (["http://a"] * 2, ["localhost:1"])]
    for wrong, words in several:
        with pytest.raises(ValueError, match=words):
            DiffuGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **wrong)
    with pytest.raises(ConnectionError, match=r"for 0\.1 seconds"):
        make_method(tiny_model_dir, tmp_path, "d1", rollout_mode="server", rollout_server_timeout=0.1, **url)
    with serving(tiny_model_dir) as served, pytest.raises(ValueError, match="--weights_dir"):
        make_method(tiny_model_dir, tmp_path, "d1", rollout_mode="server", rollout_server_base_url=[served.url])
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]}
        trainer = make_method(tiny_model_dir, tmp_path / "run", "d1", **where)
        trainer.source.servers.publish(trainer.model, 0)
        of_model = False, trainer.model.config.vocab_size, trainer.mask_token_id
        prompts = Prompts(torch.tensor([[5]]), torch.ones(1, 1), [(0, 1, 2)], trainer.sampling, (), *of_model)
        assert trainer.source.servers.sample([prompts])[0].ids.shape == (1, 9)
        shared = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
        with pytest.raises(ValueError, match="FSDP 1: set fsdp_version: 2"):
            PolicyServers(trainer.args, shared, 3)
        adapted, sglang = get_peft_model(load_model(tiny_model_dir), LORA), RolloutServer("http://127.0.0.1:1")
        weights, sglang.folders = WholeWeights(adapted), None
        weights.is_split = True  # as under FSDP2
        with pytest.raises(ValueError, match="SGLang takes no adapters, and one cannot be merged into weights that"):
            WeightsFolder(tmp_path).write(adapted, "0", [sglang], weights)
        others = Weights("other", "other-0", tmp_path)
        with pytest.raises(ValueError, match="who else uses it"):
            trainer.source.servers.servers[0].sample(prompts, others)


PARALLEL = {"sampler": "parallel", "reveal": "entropy", "reveal_level": 3.0}
HOW = {  # of block-causal models ("blocks ...") and of others
    "exact": {},
    "guided": {"cfg_scale": 0.5},
    "parallel": PARALLEL,
    "blocks": {},
    "blocks, parallel": PARALLEL,
    **{name: {"sampler": "cached", "kv_cache": name} for name in CACHES},
    "dual, parallel": {**PARALLEL, "sampler": "cached+parallel", "kv_cache": "dual"},
    "random": {"remasking": "random", "record_as_sampled": True},
}


@pytest.fixture(scope="module")
def served_kinds(tiny_model_dir, tiny_block_dir):
    with serving(tiny_model_dir) as tiny, serving(tiny_block_dir) as blocks:
        yield {False: tiny, True: blocks}


@pytest.mark.parametrize("case", HOW)
@pytest.mark.parametrize(
    ("lengths", "stops"),
    [((3, 4, 9, 6, 5, 14, 9), False), ((3, 4, 9, 6, 5, 14, 9), True), ((16, 16, 16), True)],
    ids=["padded", "padded, stops", "equal, stops"],
)
def test_a_request_of_rl_is_a_rollout_to_the_bit(served_kinds, case, lengths, stops):
    """Prompts differ in length, rows end early, and other rows are at work."""
    aligned = case.startswith("blocks")
    served, settings = served_kinds[aligned], SamplingSettings(24, 4, 12, temperature=1.0, **HOW[case])
    model, mask_token_id, draw = served.engine.model, served.tokenizer.mask_token_id, torch.Generator().manual_seed(0)
    ids, mask = torch.zeros(2, len(lengths), 16, dtype=torch.long)  # padded to more than the longest has
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = torch.randint(8, 40, (length,), generator=draw), 1
    keys = [(0, 1, row) for row in range(len(lengths))]
    ends = (*range(8, 14),) if stops else ()
    prompts = Prompts(ids, mask, keys, settings, ends, aligned, model.config.vocab_size, mask_token_id)
    server = RolloutServer(served.url, own_batch=True)
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [[5] * 3] * 2, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
        other = pool.submit(served.post, "/generate", **body)
        found = server.sample(prompts, Weights("default", "default", ROOT))
        assert len(other.result()) == 2
    options = {"mask_token_id": mask_token_id, "generator": [keyed_generator(*key) for key in keys]}
    own = rollout(model, ids, mask, settings, eos_token_ids=ends or None, **options)
    for name in ("ids", "logps", "entropies", "reveal_steps", "passes", "forward_tokens"):
        assert torch.equal(getattr(found, name), getattr(own, name)), name


@pytest.mark.parametrize("own_batch", [True, False, None])
def test_requests_share_passes_unless_they_are_to_be_equal_to_the_bit(served_kinds, own_batch):
    """Eight requests of one row at a time; without batches of their own, their tokens are the same."""
    served, settings, weights = (
        served_kinds[False],
        SamplingSettings(8, 4, 8, temperature=1.0),
        Weights("default", "default", ROOT),
    )
    of_model = False, served.engine.model.config.vocab_size, served.tokenizer.mask_token_id
    one = [
        Prompts(torch.tensor([[5 + row]]), torch.ones(1, 1), [(0, 1, row)], settings, (), *of_model) for row in range(8)
    ]
    server = RolloutServer(served.url, own_batch)
    server.dtype = "bfloat16"  # as if, because float32 shows that the tokens are right
    alone = [RolloutServer(served.url, True).sample(prompts, weights).ids for prompts in one]
    before = served.metric("d1_forward_passes_total")
    with ThreadPoolExecutor(8) as pool:
        with served.paused():
            rollouts = [pool.submit(server.sample, prompts, weights) for prompts in one]
            served.wait_for("d1_rows_waiting", 8)
        assert all(torch.equal(rollout.result().ids, ids) for rollout, ids in zip(rollouts, alone, strict=True))
    assert served.metric("d1_forward_passes_total") - before == (8 * 8 if own_batch else 8)


@pytest.mark.parametrize("own_batch", [True, False])
def test_rows_of_several_processes_share_requests_unless_they_are_to_be_equal_to_the_bit(
    tiny_model_dir, tmp_path, own_batch
):
    """Three rows of one process and one of another, whose prompts are padded to other widths: four passes a request."""
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url], "rollout_own_batch": own_batch}
        trainer = make_method(tiny_model_dir, tmp_path / "run", "d1", eos_stop=False, **where)
        trainer.source.servers.publish(trainer.model, 0)
        asked = []
        for first, lengths in ((0, (3, 5, 4)), (3, (9,))):
            ids, mask = trainer.left_pad([[*range(10, 10 + length)] for length in lengths])
            keys = [(0, 1, 2, first + row) for row in range(len(ids))]
            asked.append(trainer.source.prompts(RolloutRequest(ids, mask, keys)))
        before = served.metric("d1_forward_passes_total")
        found = trainer.source.servers.sample(asked)
        assert served.metric("d1_forward_passes_total") - before == (8 if own_batch else 4)
    for prompts, sampled in zip(asked, found, strict=True):
        options = {"mask_token_id": trainer.mask_token_id, "generator": [keyed_generator(*key) for key in prompts.keys]}
        own = rollout(trainer.model.eval(), prompts.ids, prompts.mask, trainer.sampling, **options)
        assert torch.equal(sampled.ids, own.ids)
        assert sampled.sources == ((served.url, "float32"),) * len(prompts.ids)
        torch.testing.assert_close(sampled.logps, own.logps, rtol=0, atol=0 if own_batch else rounding(LOGITS))


def test_an_adapter_goes_to_no_other_base(tiny_model_dir, tmp_path):
    """Nor to one in 4 bits; a base in bfloat16 is the same."""
    trained = get_peft_model(load_model(tiny_model_dir), LORA)
    digest = base_digest(trained)
    assert (
        digest == base_digest(load_model(tiny_model_dir, dtype="bfloat16")) == base_digest(load_model(tiny_model_dir))
    )
    other = load_model(tiny_model_dir)
    other.model.layers[1].mlp.down_proj.weight.data += 0.01
    other.save_pretrained(tmp_path / "other")
    load_tokenizer(tiny_model_dir).save_pretrained(tmp_path / "other")
    with serving(tmp_path / "other", weights_dir=tmp_path) as served:
        server = RolloutServer(served.url)
        with pytest.raises(ValueError, match="serves another model than that of this run"):
            server.prepare(served.tokenizer.mask_token_id, Weights("run", "run-0", tmp_path, digest))


# What a server of rows of 8 tokens, in blocks of 4 and 4 steps, may say wrongly: the lie, and what is said of it.
LIES = {
    "another order": (lambda rows: rows[::-1], r"row 0 \(id 3-0-0\): this is the answer for id .3-0-3."),
    "a row less": (lambda rows: rows[:-1], "answered 4 prompts with 3 rows"),
    "no list": (lambda rows: {"rows": rows}, "answered 4 prompts with dict"),
    "no JSON": (lambda rows: b"sorry", "answered what is no JSON: 'sorry'"),
    "another prompt": (
        lambda rows: with_count(rows, "prompt_tokens", 3),
        "row 1 .*: 3 tokens of the prompt were r",
    ),
    "a token less": (lambda rows: resized(rows, lambda of: of[:-1]), r"row 1 .*: 7 completion_ids, and .* canvas of 8"),
    "a token more": (lambda rows: resized(rows, lambda of: [*of, of[-1]]), r"row 1 .*: completion_ids has 9 ids"),
    "a step less": (lambda rows: cut_steps(rows), "row 1 .*: steps has 7 entries for 8 completion_ids"),
    "a mask": (lambda rows: with_token(rows, 2, 3), "row 1 .*: completion_ids hold the mask token, 3"),
    "no token": (lambda rows: with_token(rows, 2, 10**6), "row 1 .*: completion_ids: the model has 60 tokens"),
    "other tokens": (lambda rows: with_meta(rows, "output_token_logprobs", 5, [-1.0, 99, None]), "row 1 .* other tok"),
    "above 0": (lambda rows: with_logp(rows, 6, 0.5), r"row 1 .*: logprobs\[6\] is 0.5: expected a finite log-prob"),
    "no number": (lambda rows: with_logp(rows, 6, float("nan")), r"row 1 .*: logprobs\[6\] is nan"),
    "no entropy": (lambda rows: with_meta(rows, "output_token_entropies", 3, 99.0), r"row 1 .*: entropies\[3\] is 99"),
    "-4": (lambda rows: with_meta(rows, "step_maps", 3, -4), r"row 1 .*: steps\[3\] is -5: expected 0 to 3"),
    "10^6": (lambda rows: with_meta(rows, "step_maps", 6, 10**6), r"row 1 .*: steps\[6\] is 1e\+06: expected 0 to 3"),
    "no step": (lambda rows: with_meta(rows, "step_maps", 0, 0), r"row 1 .*: steps\[0\] is -1: expected"),
    "all at once": (
        lambda rows: everywhere(rows, with_short_blocks),
        r"row 0 .*: steps of block 0 reveal \[4\] tokens: expected \[2, 2\]",
    ),
    "a text": (lambda rows: with_meta(rows, "step_maps", 0, "one"), "row 1 .*: the answer is not of the form"),
    "no passes": (
        lambda rows: with_count(rows, "forward_passes", 2),
        "row 1 .*: forward_passes is 2: expected 4 at",
    ),
    "random tokens": (lambda rows: everywhere(rows, with_random_tokens), "row . .*: the log-probabilities are not"),
    "higher": (lambda rows: everywhere(rows, with_higher_logps), "row . .*: the log-probabilities are not those of th"),
    "lower": (lambda rows: everywhere(rows, with_lower_entropies), "row . .*: the entropies are not those of this run"),
}


def with_count(rows, name, count):
    rows[1]["meta_info"][name] = count
    return rows


def cut_steps(rows):
    rows[1]["meta_info"]["step_maps"].pop()
    return rows


@pytest.fixture(scope="module")
def lied_to(tiny_model_dir, folder):
    """A proxy that may lie, and a trainer whose rollouts come through it."""
    with serving(tiny_model_dir, weights_dir=folder) as served, lying_server(served.url) as liar:
        where = {"rollout_mode": "server", "rollout_server_base_url": [liar.url], "temperature": 1.0}
        yield liar, make_method(tiny_model_dir, folder / "run", "d1", eos_stop=False, **where)


@pytest.mark.parametrize("name", LIES)
def test_each_lie_of_a_server_is_one_clear_line(lied_to, name):
    liar, trainer = lied_to
    lie, said = LIES[name]
    prompts = trainer.encoded([trainer.train_dataset[0]["prompt"]] * 4)
    liar.lie = no_lie
    assert len(trainer.rollout(prompts)[0]) == 4
    liar.lie = lie
    with pytest.raises(ValueError, match=said) as caught:
        trainer.rollout(prompts)
    assert str(caught.value).startswith(liar.url)
    assert "\n" not in str(caught.value)

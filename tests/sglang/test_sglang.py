"""SGLang with the plugin, as a process on a CPU: it samples what `rollout` samples, and RL learns on it.

`make test-sglang` makes an environment of SGLang and this library, and runs these in it; docs/engines.md has the
figures that they write.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import requests
import torch
from packaging.requirements import Requirement
from peft import LoraConfig, get_peft_model

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout
from d1.scoring import ESTIMATORS, Randomness, SampledRows, score
from d1.scoring.inputs import ViewSettings, canvas_blocks, steps_in_blocks
from d1.serve import KEY
from d1.serve.client import Prompts, RolloutServer, Weights
from d1.serve.weights import WeightsFolder
from tests.commands import ROOT
from tests.d1.released import read_files
from tests.sglang.server import BLOCK, sglang, write_mixture, write_sdar

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="no SGLang here: run make test-sglang"),
]
LENGTH, EACH, SEED = 27, 4, 7  # canvases end with a block after prompts of 5, 13 and 21 tokens
SAMPLERS = {
    "greedy": {},
    "greedy, three a pass": {"steps": 9},
    "drawn": {"temperature": 1.0},
    "drawn, random places": {"temperature": 0.8, "remasking": "random", "steps": 12},
    "nucleus": {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
    "threshold": {"temperature": 0.7, "sampler": "parallel", "reveal_level": 0.3},
    "entropy": {"sampler": "parallel", "reveal": "entropy", "reveal_level": 1.5},
    "edits": {"sampler": "parallel", "reveal_level": 0.2, "edit_threshold": 0.3, "max_post_steps": 4},
    "drawn edits": {"temperature": 0.7, "sampler": "parallel", "reveal_level": 0.2, "edit_threshold": 0.3},
}
FIGURES: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sdar(tmp_path_factory.mktemp("sdar") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder).eval()


@pytest.fixture(scope="module", params=["--dllm-fdfo", "--no-dllm-fdfo"])
def url(request, folder, tmp_path_factory):
    with sglang(folder, tmp_path_factory.mktemp("log") / "log.txt", request.param) as url:
        yield url


def prompts_of(model, chosen, sizes=(5, 13, 21), length=LENGTH, ends=()):
    """Some rows of each prompt, padded on the left."""
    rows, width = len(sizes) * EACH, max(sizes)
    ids, mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for row in range(rows):
        size = sizes[row // EACH]
        ids[row, width - size :] = torch.arange(size) * 7 % 30 + 8
        mask[row, width - size :] = 1
    settings = SamplingSettings(**{"gen_length": length, "block_length": BLOCK, "steps": length} | chosen)
    of_model = True, model.config.vocab_size, model.config.mask_token_id
    return Prompts(ids, mask, [(SEED, 1, 0, row) for row in range(rows)], settings, ends, *of_model)


def expected(model, prompts):
    generators = [keyed_generator(*key) for key in prompts.keys]
    options = {"mask_token_id": model.config.mask_token_id, "generator": generators}
    return rollout(
        model, prompts.ids, prompts.mask, prompts.settings, eos_token_ids=list(prompts.ends) or None, **options
    )


def serve_weights(url, model, tmp_path, run="run", version=0):
    server, folder = RolloutServer(url), WeightsFolder(tmp_path)
    server.prepare(model.config.mask_token_id, None)
    server.problem = None
    return server, update(server, folder, model, f"{run}-{version}")


def update(server, folder, model, version):
    """Gives the server the weights of the model as a run does."""
    written = folder.write(model, version, [server])
    weights = Weights(version.partition("-")[0], version, written, frozen=folder.frozen)
    server.prepare(model.config.mask_token_id, weights)
    return weights


def replayed(model, prompts, found):
    """Log-probs of the tokens, from tokens and steps alone."""
    width = prompts.ids.shape[1]
    blocks = canvas_blocks(prompts.mask, LENGTH, BLOCK)
    whole = torch.ones_like(found.reveal_steps, dtype=torch.bool)
    record = (found.reveal_steps, found.logps, found.entropies, blocks)
    sampled = SampledRows(prompts.ids, prompts.mask, prompts.mask.bool(), found.ids[:, width:], whole, *record)
    rows = len(found.ids)
    random = Randomness([keyed_generator(0)] * rows, keyed_generator(0), 0, rows)
    views = ESTIMATORS["replay"].draw(sampled, random, ViewSettings(LENGTH, LENGTH, BLOCK))
    options = {"mask_token_id": model.config.mask_token_id, "gen_length": LENGTH, "views_at_once": 8}
    with torch.no_grad():
        return score(model, prompts.ids, prompts.mask, found.ids[:, width:], views, **options).logps


def largest(one, other):
    return (one - other).abs().max().item()


@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_are_those_of_our_sampler(url, model, tmp_path, name, record_property):
    """Tokens and steps are equal, log-probabilities, entropies and replayed log-probabilities to 1e-5; sampled groups
    differ; a row alone is the same."""
    chosen = SAMPLERS[name]
    server, weights = serve_weights(url, model, tmp_path)
    prompts = prompts_of(model, chosen)
    own, found = expected(model, prompts), server.sample(prompts, weights)
    assert torch.equal(found.ids, own.ids)
    blocks = canvas_blocks(prompts.mask, LENGTH, BLOCK)
    assert torch.equal(steps_in_blocks(found.reveal_steps, blocks), steps_in_blocks(own.reveal_steps, blocks))
    figures = {"logps": largest(found.logps, own.logps), "entropies": largest(found.entropies, own.entropies)}
    if own.writes is None:
        assert torch.equal(found.reveal_steps, own.reveal_steps)
        assert torch.equal(found.passes, own.passes + 4)
        if not chosen.get("top_k"):
            figures["replayed"] = largest(replayed(model, prompts, found), found.logps)
    else:
        assert own.edits.sum() > 0
    groups = found.ids.view(3, EACH, -1)
    if chosen.get("temperature"):
        assert all(len(group.unique(dim=0)) == EACH for group in groups)
    else:
        assert all(len(group.unique(dim=0)) == 1 for group in groups)
    one = prompts.split(1)[EACH + 1]
    assert torch.equal(server.sample(one, weights).ids[0], found.ids[EACH + 1])
    assert max(figures.values()) < 1e-5, figures
    report(name, figures)


def report(name, figures):
    """Keeps the largest difference of all servers, for docs/engines.md."""
    kept = FIGURES.setdefault(name, {})
    for what, value in figures.items():
        kept[what] = max(kept.get(what, 0.0), value)
    if path := os.environ.get("SGLANG_FIGURES"):
        Path(path).write_text(json.dumps(FIGURES, indent=1) + "\n")


def test_a_canvas_that_ends_inside_a_block(url, model, tmp_path):
    """Its whole blocks are those of our sampler; its last block also sees masks after the canvas."""
    server, weights = serve_weights(url, model, tmp_path)
    prompts = prompts_of(model, {"temperature": 1.0}, sizes=(5, 13), length=24)
    own, found = expected(model, prompts), server.sample(prompts, weights)
    assert found.ids.shape == own.ids.shape
    assert torch.equal(found.ids[:, :-5], own.ids[:, :-5])
    assert (found.reveal_steps >= 0).all()


def test_the_eos_stop(url, model, tmp_path):
    server, weights = serve_weights(url, model, tmp_path)
    first = expected(model, prompts_of(model, {}))
    prompts = prompts_of(model, {}, ends=(int(first.ids[0, 21 + 4]), 11))
    own, found = expected(model, prompts), server.sample(prompts, weights)
    assert (own.reveal_steps < 0).any()
    assert torch.equal(found.ids, own.ids)
    assert torch.equal(found.reveal_steps, own.reveal_steps)


def adapted(folder, seed):
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(load_model(folder), config).eval()


def test_new_weights_change_the_answers(url, model, tmp_path):
    """Those of another model, and adapters: a server gets all weights at a run's first update, then those that the
    adapter changes, and all after a failure."""
    prompts = prompts_of(model, {"temperature": 1.0})
    other = load_model(write_sdar(tmp_path / "other", seed=1)).eval()
    server, weights = serve_weights(url, other, tmp_path, "other")
    assert torch.equal(server.sample(prompts, weights).ids, expected(other, prompts).ids)

    sent, ask, folder = [], server.ask, WeightsFolder(tmp_path / "run")

    def noted(method, path, body=None, seconds=60.0):
        if path == "/update_weights_from_disk":
            sent.append(sum(weight.nbytes for weight in read_files(Path(body["model_path"])).values()))
        return ask(method, path, body, seconds)

    server.ask, found = noted, []
    whole = sum(weight.nbytes for weight in model.parameters())
    layer = model.model.layers[0]
    part = sum(weight.nbytes for weight in (layer.self_attn.v_proj.weight, layer.mlp.down_proj.weight))
    part *= len(model.model.layers)
    for number in range(3):
        if number == 2:
            server.problem = "it did not answer"
        changed = adapted(model.config.name_or_path, number)
        old = {name: weight.clone() for name, weight in changed.state_dict().items()}
        weights = update(server, folder, changed, f"run-{number}")
        assert all(torch.equal(weight, old[name]) for name, weight in changed.state_dict().items())
        found.append(server.sample(prompts, weights))
        own = expected(changed, prompts)
        assert torch.equal(found[-1].ids, own.ids)
        assert largest(found[-1].logps, own.logps) < 3e-5  # our sampler adds the adapter to each output
    assert not torch.equal(found[0].ids, found[1].ids)
    assert sent == [whole - part, part, part, whole - part, part]
    with pytest.raises(OSError, match="sampled with the weights run-2, not run-0"):
        server.sample(prompts, Weights("run", "run-0", tmp_path))


def test_several_completions_of_a_plain_prompt(url):
    params = {"n": 3, "max_new_tokens": 11, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": list(range(8, 21)), "sampling_params": params}
    answer = requests.post(f"{url}/generate", json=body, timeout=60)
    rows = [tuple(row["output_ids"]) for row in answer.json()]
    assert [len(row) for row in rows] == [11] * 3
    assert len(set(rows)) == 3


@pytest.mark.parametrize("kind", ["sdar_moe", "llada2_moe", "sdar"])
def test_other_models_and_two_processes_per_model(kind, folder, tmp_path, monkeypatch):
    """SDAR in two processes, which asks for a key; mixtures also with an adapter."""
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1" if kind == "sdar" else "0")  # a core per process
    path = folder if kind == "sdar" else write_mixture(tmp_path / "model", kind)
    flags = ["--tp-size", "2"] if kind == "sdar" else []
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
    with sglang(path, tmp_path / "log.txt", *flags, "--api-key", "secret") as url:
        assert requests.post(f"{url}/generate", json={"input_ids": [[8]]}, timeout=60).status_code == 401
        for run, model in (("plain", load_model(path)), ("adapter", get_peft_model(load_model(path), lora))):
            server, weights = serve_weights(url, model.eval(), tmp_path / run, run)
            prompts = prompts_of(model, {"temperature": 1.0})
            own, found = expected(model, prompts), server.sample(prompts, weights)
            assert torch.equal(found.ids, own.ids)
            assert max(largest(found.logps, own.logps), largest(found.entropies, own.entropies)) < 3e-5


def test_what_cannot_be_is_refused(url, model, tmp_path):
    server, weights = serve_weights(url, model, tmp_path)
    for chosen, said in (({"cfg_scale": 1.0}, "d1 serve"), ({"block_length": 4}, "must be 8, not 4")):
        with pytest.raises(ValueError, match=said):
            server.sample(prompts_of(model, chosen), weights)
    server.mask_token_id = 5
    with pytest.raises(ValueError, match="hides tokens by"):
        server.sample(prompts_of(model, {}), weights)


def test_one_environment_holds_both():
    """The versions here are SGLang's pins, and lie in this library's ranges (or else its import had failed)."""
    pins = {need.name: need.specifier for need in map(Requirement, requires("sglang"))}
    for name in ("torch", "transformers", "tokenizers"):
        assert pins[name].contains(version(name).partition("+")[0]), f"{name} {version(name)}: SGLang has {pins[name]}"


def test_a_server_without_the_plugins_algorithm_is_recognised(folder, model, tmp_path):
    said = r"have no step_maps.*--dllm-algorithm D1"
    started = sglang(folder, tmp_path / "log.txt", algorithm="LowConfidence")
    with started as url, pytest.raises(ValueError, match=said):
        RolloutServer(url).prepare(model.config.mask_token_id, None)


def run(*words):
    command = [sys.executable, "-m", "d1", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]


def test_rl_learns(tmp_path):
    """SFT on answers of which half is right, then RL whose rollouts all come from SGLang: the reward rises."""
    rows, letters = [], "abcdefghijkl"
    generator = torch.Generator().manual_seed(0)
    for number in range(384):
        own = letters[number % 12]
        other = [letters[int(torch.randint(12, (), generator=generator))] for _ in range(12)]
        coins = torch.rand(12, generator=generator).tolist()
        answer = "".join(own if coin < 0.4 else letter for coin, letter in zip(coins, other, strict=True))
        turns = (("user", own * (4 + number % 12)), ("assistant", answer))
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = ["--model_name", write_sdar(tmp_path / "start", spread=0.05), "--train_data", data, "--full_finetuning"]
    sft += ["--output_dir", tmp_path, "--job_name", "sft", "--debugging", "--batch_size", 32, "--grad_accum_steps", 1]
    run("sft", *sft, "--num_epochs", 30, "--learning_rate", "2e-3", "--test_split", 0)
    run("export", tmp_path / "sft", tmp_path / "policy", "--format", "sdar")
    with sglang(tmp_path / "policy", tmp_path / "log.txt") as url:
        rl = ["--model_path", tmp_path / "policy", "--task", ROOT / "tests/d1/rl/letters_task.py", "--block_length", 8]
        rl += ["--rollout_mode", "server", "--rollout_server_base_url", url, "--output_dir", tmp_path / "rl"]
        rl += ["--max_completion_length", 16, "--diffusion_steps", 16, "--temperature", 1.0, "--num_generations", 8]
        rl += ["--per_device_train_batch_size", 32, "--max_steps", 60, "--num_iterations", 2, "--logging_steps", 1]
        rl += ["--learning_rate", "5e-4", "--lr_scheduler_type", "constant", "--report_to", "none", "--use_cpu", "true"]
        run("rl", *rl, "--bf16", "false")
    state = json.loads(next((tmp_path / "rl").rglob("trainer_state.json")).read_text())
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    gaps = [entry["sampling/logp_difference_abs"] for entry in state["log_history"] if "reward" in entry]
    first, last = rewards[:10], rewards[-10:]
    error = (statistics.variance(first) / 10 + statistics.variance(last) / 10) ** 0.5
    figures = {"first": statistics.mean(first), "last": statistics.mean(last), "error": error, "gap": max(gaps)}
    report("RL", figures)
    assert statistics.mean(last) - statistics.mean(first) > 3 * error, figures

"""What `run.sh` and the sbatch scripts launch: the same batch on any number of GPUs, and on none; a complete method."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
import yaml

from d1.rl.methods import CANVAS, METHODS
from d1.rl.train import make_parser
from tests.commands import ROOT, calls_of, check_python

STAGE = ROOT / "diffu-grpo"


def flags_of(call: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(call) if flag.startswith("--")}


@pytest.mark.parametrize(
    ("script", "gpus", "processes"),
    [("run.sh", 1, 1), ("run.sh", 2, 2), ("run.sh", 4, 4), ("run.sh", 8, 8), ("*2nodes.sbatch", 8, 16)],
)
def test_the_effective_batch_does_not_depend_on_the_number_of_gpus(script, gpus, processes, tmp_path):
    for path in STAGE.rglob(script):
        tmp_path.joinpath("calls.jsonl").unlink(missing_ok=True)
        (call,) = calls_of(path, [], {}, tmp_path, gpus)
        flags = flags_of(call)
        rows, accumulation = int(flags["--per_device_train_batch_size"]), int(flags["--gradient_accumulation_steps"])
        assert (int(flags["--num_processes"]), processes * rows * accumulation) == (processes, 96)
    assert tmp_path.joinpath("calls.jsonl").exists()


def test_a_named_model_runs_without_a_gpu_and_a_config_of_its_own_keeps_its_batch(tmp_path):
    run = STAGE / "run.sh"
    settings = {"GPUS": "0", "MODEL_PATH": "../pocket/base", "DATASET": "sudoku"}
    (call,) = calls_of(run, ["--max_steps", "1"], settings, tmp_path)
    found = flags_of(call)
    assert (Path(found["--config_file"]).name, found["--load_in_4bit"], found["--bf16"]) == ("cpu.yaml", *["false"] * 2)
    assert (found["--num_processes"], found["--max_steps"]) == ("1", "1")
    *_, call = calls_of(run, [], {"CONFIG": "pocket.yaml"}, tmp_path, gpus=8)
    assert flags_of(call)["--num_processes"] == "1"


@pytest.mark.parametrize("engine", ["d1", "sglang"])
def test_trainers_and_servers_have_nodes_of_their_own(engine, tmp_path):
    """Of three nodes two train; a GPU of the third serves the model to all of them."""
    settings = {"TRAINERS": "2", "ENGINE": engine, "GPUS": "4", "OUTPUT_DIR": str(tmp_path / "out")}
    calls = calls_of(STAGE / "slurm_scripts" / "gsm8k_servers.sbatch", ["--seed", "3"], settings, tmp_path, gpus=4)
    (train,) = [call for call in calls if "accelerate.commands.launch" in call]
    (serve,) = [call for call in calls if call != train]
    flags, urls = flags_of(train), [word for word in train if word.startswith("http")]
    assert urls == [f"http://node2:{port}" for port in range(30000, 30004)]
    assert (flags["--num_processes"], flags["--main_process_ip"], flags["--seed"]) == ("8", "node0", "3")
    assert serve[2] == {"d1": "d1", "sglang": "sglang.launch_server"}[engine]
    if engine == "d1":
        check_python("python", serve[1:], STAGE)
        assert flags_of(serve)["--weights_dir"] == flags["--output_dir"]


def settings_of(script, tmp_path, **environment):
    """The settings that the training script gets, on a machine with one GPU."""
    tmp_path.joinpath("calls.jsonl").unlink(missing_ok=True)
    (call,) = calls_of(STAGE / script, [], environment, tmp_path, gpus=1)
    arguments = call[call.index("diffu_grpo_train.py") + 1 :]
    here = [] if torch.cuda.is_available() else ["--use_cpu", "true", "--bf16", "false"]
    with contextlib.chdir(STAGE):
        return make_parser().parse_args_and_config([*arguments, *here])[0]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_from_the_environment_is_the_whole_method(name, tmp_path):
    """Among the settings that depend on the size of the model, those that train.yaml sets to d1's values."""
    method, config = METHODS[name], yaml.safe_load((STAGE / "slurm_scripts" / "train.yaml").read_text())
    args = settings_of("run.sh", tmp_path, METHOD=name, DATASET="sudoku")
    own = {setting: value for setting, value in method.scale.items() if setting not in CANVAS}
    given = own | {setting: config[setting] for setting in config.keys() & method.scale} | method.values
    if name == "d1":
        given |= {"num_iterations": 8, "temperature": 0.3}  # d1's own of this task
    if name == "just-grpo":
        given["diffusion_steps"] = 256  # one a token
    assert {setting: getattr(args, setting) for setting in given} == given
    assert args.output_dir == f"../runs/sudoku_LLaDA-8B-Instruct_{'mu8' if name == 'd1' else name}"
    assert args.gradient_accumulation_steps * args.per_device_train_batch_size % args.num_generations == 0


def test_what_the_environment_says_beside_a_method_stands_above_it(tmp_path):
    args = settings_of("run.sh", tmp_path, METHOD="espo", NUM_ITER="3", MODEL_PATH="a/model")
    assert (args.num_iterations, args.run_name) == (3, "gsm8k_model_espo_mu3")
    own = str(ROOT / "tests" / "my_method.py")
    args = settings_of("slurm_scripts/math_sft.sbatch", tmp_path, METHOD=own)
    assert (args.objective, args.num_iterations, args.run_name) == ("push", 2, "math_sft_my_method")
    args = settings_of("run.sh", tmp_path, CONFIG="pocket.yaml", METHOD="coupled-grpo")
    assert (args.estimator, args.num_iterations, args.learning_rate, args.num_generations) == ("coupled", 2, 3e-4, 8)


def test_without_a_method_all_is_d1s(tmp_path):
    args = settings_of("run.sh", tmp_path)
    expected = {
        "method": "d1",
        "run_name": "gsm8k_LLaDA-8B-Instruct_mu12",
        "learning_rate": 3e-6,
        "num_generations": 6,
        "num_iterations": 12,
        "temperature": 0.9,
        "beta": 0.04,
        "epsilon": 0.5,
        "p_mask_prompt": 0.15,
        "random_masking": True,
        "loss_type": "bnpo",
        "objective": "trl",
        "estimator": "one_step",
        "max_completion_length": 256,
        "diffusion_steps": 128,
        "weight_decay": 0.1,
        "max_grad_norm": 0.2,
        "scale_rewards": "none",
        "use_bias_correction_kl": False,
        "max_prompt_length": 200,
        "remasking": "low_confidence",
        "disable_dropout": True,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.sampling_settings().block_length == 32
    assert settings_of("slurm_scripts/sudoku_base.sbatch", tmp_path).run_name == "sudoku_base_mu8"

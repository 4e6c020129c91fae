"""Methods, combinations of settings and users' own entries: what a name sets, what overrides it, what is refused with
which message, and that an entry's attributes decide what is checked and computed."""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from d1.rl.batch import loss_inputs
from d1.rl.bridge import rollout_buffer
from d1.rl.checks import check_single_turn
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import ADVANTAGES, OBJECTIVES, PENALTIES, Advantage, Objective, Penalty
from d1.rl.methods import METHODS
from d1.rl.methods.d1 import D1
from d1.rl.methods.spg import draw_blocks
from d1.rl.train import make_parser
from d1.scoring import ESTIMATORS, Estimator, Scores
from d1.scoring.inputs import CanvasBlocks
from d1.scoring.one_step import draw_one_step as draw
from tests.losses import gradient, random_inputs, settings
from tests.tiny_grpo import SETTINGS, logged, make_method, make_trainer, weights

BATCH = 240  # a multiple of every method's completions per prompt
HERE = {"output_dir": "unused", "per_device_train_batch_size": BATCH, "use_cpu": not torch.cuda.is_available()}


def config(**given) -> DiffuGRPOConfig:
    return DiffuGRPOConfig(**{**HERE, **given})


def parsed(*words: str, yaml: str | None = None, tmp_path=None) -> DiffuGRPOConfig:
    """The settings that a command line gives, with a config file of these lines."""
    flags = [str(word) for name, value in HERE.items() for word in (f"--{name}", value)]
    if yaml is not None:
        (tmp_path / "run.yaml").write_text(yaml)
        flags += ["--config", str(tmp_path / "run.yaml")]
    return make_parser().parse_args_and_config([*flags, *words])[0]


def differing(args: DiffuGRPOConfig, other: DiffuGRPOConfig) -> dict:
    """The settings of `args` that differ; not `logging_dir`, which contains the time."""
    names = [field.name for field in fields(args) if field.name not in ("logging_dir", "run_name")]
    values = {name: getattr(args, name) for name in names}
    return {
        name: value for name, value in values.items() if value != getattr(other, name) and name != "accelerator_config"
    }


# --- The methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_accepted_as_it_is_and_sets_all_that_its_entry_has(name):
    method = METHODS[name]
    known = {field.name for field in fields(DiffuGRPOConfig)}
    assert {"temperature", "top_k", "top_p", "remasking", "max_grad_norm", "scored_tokens"} <= D1.keys()
    assert D1.keys() <= method.values.keys()  # so that no value of another method is left
    assert {*method.values, *method.scale} <= known
    assert not method.values.keys() & method.scale.keys()
    for args in (config(method=name), parsed("--method", name)):
        given = {**method.values, **method.scale}
        if given.get("diffusion_steps", 0) is None:  # one per token
            given["diffusion_steps"] = args.max_completion_length
        assert {setting: getattr(args, setting) for setting in given} == given
        assert args.method == name


def test_d1_is_the_defaults_field_by_field():
    assert differing(config(method="d1"), config()) == {}
    assert differing(parsed("--method", "d1"), parsed()) == {}
    assert differing(parsed(), config()) == {}
    defaults = {field.name: field.default for field in fields(DiffuGRPOConfig)}
    d1 = METHODS["d1"]
    assert {**d1.values, **d1.scale} == {name: defaults[name] for name in {**d1.values, **d1.scale}}


# --- What overrides what ----------------------------------------------------------------------------------------------


def test_of_defaults_scale_yaml_method_and_flags_the_later_overrides_the_earlier(tmp_path):
    espo = METHODS["espo"].values
    yaml = "learning_rate: 0.5\nepsilon: 0.1\nbeta: 0.7\nblock_length: 8\n"
    args = parsed("--method", "espo", "--beta", "0.9", yaml=yaml, tmp_path=tmp_path)
    assert (args.learning_rate, args.block_length) == (0.5, 8)  # the yaml's, not the paper's scale or the default
    assert (args.epsilon, args.beta) == (espo["epsilon"], 0.9)  # the method's, not the yaml's; a flag overrides both
    assert args.estimator == "espo"
    assert args.num_generations == METHODS["espo"].scale["num_generations"]
    args = parsed("--method", "agrpo", yaml="block_length: 8", tmp_path=tmp_path)
    assert (args.learning_rate, args.num_generations) == (5e-6, 8)  # the paper's scale, not the default


def test_a_yamls_other_lines_override_its_method_in_any_order(tmp_path):
    args = parsed(yaml="epsilon: 0.1\nlearning_rate: 0.5\nmethod: espo\n", tmp_path=tmp_path)
    assert (args.method, args.estimator, args.epsilon, args.learning_rate) == ("espo", "espo", 0.1, 0.5)
    args = parsed("--beta", "0.9", yaml="method: espo\nbeta: 0.7", tmp_path=tmp_path)
    assert args.beta == 0.9
    # A method on the command line replaces the yaml's: no value of the yaml's method is left.
    args = parsed("--method", "agrpo", yaml="method: espo\nlearning_rate: 0.5", tmp_path=tmp_path)
    assert differing(args, parsed("--method", "agrpo", "--learning_rate", "0.5")) == {}


def test_a_methods_cache_can_be_turned_off_by_flags():
    args = parsed("--method", "rldf", "--sampler", "parallel", "--kv_cache", "none")
    assert (args.kv_cache, args.sampling_settings().cache, args.reveal) == (None, None, "threshold")


@pytest.mark.parametrize("given", ["linear", "cosine"])
def test_another_schedule_drops_what_belongs_to_the_methods_own(given, tmp_path):
    """Its warm-up and arguments, wherever it is given, unless they are given, too."""
    flags, yaml = ("--lr_scheduler_type", given), f"lr_scheduler_type: {given}"
    for name in ("d1", "coupled-grpo"):
        for args in (
            config(method=name, lr_scheduler_type=given),
            parsed("--method", name, *flags),
            parsed("--method", name, yaml=yaml, tmp_path=tmp_path),
            parsed(yaml=f"method: {name}\n{yaml}", tmp_path=tmp_path),
        ):
            assert (args.lr_scheduler_type, args.warmup_steps, args.lr_scheduler_kwargs) == (given, 0, None)
    assert parsed(*flags, "--warmup_steps", "5").warmup_steps == 5
    assert parsed("--method", "agrpo", "--warmup_steps", "5").lr_scheduler_type == "cosine"


def test_in_python_given_settings_override_the_method():
    args = config(method="espo", epsilon=0.3, learning_rate=0.5)
    assert (args.epsilon, args.learning_rate, args.estimator) == (0.3, 0.5, "espo")
    assert differing(args, parsed("--method", "espo", "--epsilon", "0.3", "--learning_rate", "0.5")) == {}


@pytest.mark.parametrize("words", [("--method=espo",), ("--method", "d1", "--method", "espo")])
def test_a_method_spelled_another_way_is_the_whole_method(words):
    assert differing(parsed(*words), parsed("--method", "espo")) == {}


# --- Mistakes ---------------------------------------------------------------------------------------------------------

IMPORTS = """
from d1.rl import Objective
def f(*given): return None
METHOD = {}
"""


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "no method file .*mine.py"),
        ("OBJECTIVES = {}", "mine.py: METHOD must be a dictionary with names as keys, .* got None"),
        ("METHOD = {1: 2}", "METHOD must be a dictionary .* got {1: 2}"),
        ("METHOD = {'epsilon_hihg': 1}", "mine.py: METHOD has epsilon_hihg, which is not a setting"),
        ("METHOD = {'method': 'espo'}", "mine.py: METHOD has method, which is not a setting"),
        ("METHOD = {}; import no_such_thing", "mine.py: ModuleNotFoundError: No module named 'no_such_thing'"),
        (IMPORTS + "OBJECTIVES = [f]", "OBJECTIVES must be a dictionary with names as keys"),
        (IMPORTS + "OBJECTIVES = {'spg': Objective(f)}", "OBJECTIVES already has spg; choose another name"),
        (IMPORTS + "ESTIMATORS = {'mine': f}", r"ESTIMATORS\['mine'\] must be a Estimator\(function\), of d1.scoring"),
        (IMPORTS + "Objective(f, reads_old=False, over_group=True)", "over_group compares with the old policy"),
        (IMPORTS + "OBJECTIVES = {'mine': Objective(f, settings=('epsilom',))}", "has epsilom, which is not a setting"),
        (IMPORTS + "METHOD = {'objective': 'yours'}; OBJECTIVES = {'its': Objective(f)}", "--objective must be .*its"),
    ],
)
def test_a_method_file_that_is_no_method_is_refused_with_the_reason(tmp_path, file, message):
    path = tmp_path / "mine.py"
    if file is not None:
        path.write_text(file)
    for make in (lambda: config(method=str(path)), lambda: parsed("--method", str(path))):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            make()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parsed(yaml=f"method: {path}", tmp_path=tmp_path)


def test_a_method_file_that_failed_is_read_again_when_it_is_fixed(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "fixed.py"
    failing = "METHOD = {'epsilon': 0.3}\nraise ValueError('no')"
    path.write_text(failing)
    os.utime(path, (1, 1))
    with pytest.raises(ValueError, match="no"):
        config(method=str(path))
    path.write_text("METHOD = {'epsilon': 0.3}".ljust(len(failing)))
    os.utime(path, (1, 1))  # Python's cache of bytecode compares the size and the second of the change
    assert config(method=str(path)).epsilon == 0.3


@pytest.mark.parametrize("name", ["esop", "my_method", ""])
def test_an_unknown_method_is_refused_with_those_there_are(name, tmp_path):
    with pytest.raises(ValueError, match=f"--method must be one of d1, wd1, .*, or a path to a .py file, got '{name}'"):
        parsed("--method", name)
    with pytest.raises(ValueError, match=r"--method must be one of d1, .* got None"):
        parsed(yaml="method:", tmp_path=tmp_path)


# --- Combinations -----------------------------------------------------------------------------------------------------

SERVER = {"rollout_mode": "server", "rollout_server_base_url": ["http://a:1"]}
BUDGET = {"max_compute_tokens": 100}
REFUSED = [
    ({"rollout_mode": "server"}, "--rollout_mode server needs --rollout_server_base_url URL"),
    (SERVER | {"rollout_server_base_url": ["localhost:30000"]}, "takes addresses http://HOST:PORT"),
    (SERVER | {"rollout_server_timeout": 7200}, "--rollout_server_timeout 7200 must be below --ddp_timeout 1800"),
    ({"method": "espo", "estimator": "replay", "num_views": 2}, "trl would raise each ratio to the power of a draw's"),
    ({"estimator": "random_masks"}, "--objective reinforce, clipped_views$"),
    ({"method": "spg", "objective": "reinforce"}, r"estimator spg does not go .* of bounds alone \(spg, stable_drl\)"),
    ({"method": "spg", "estimator": "elbo"}, r"--estimator elbo does not go .* estimators of bounds \(spg\)"),
    ({"method": "bgpo", "estimator": "coupled"}, "bgpo takes each draw .* --estimator elbo, espo, counts$"),
    (
        {"method": "stable-drl", "gradient_accumulation_steps": 3, "steps_per_generation": 2},
        r"stable_drl weighs a row against the others .* gradient_accumulation_steps \(3\) must be a multiple .* \(2\)",
    ),
    ({"method": "wd1", "loss_type": "luspo"}, "reinforce has no loss_type luspo: use one of sum, grpo"),
    ({"method": "spg", "beta": 0.1}, "and no KL can be computed from bounds: set --beta 0"),
    ({"kl": "k3_again", "loss_type": "cispo"}, "k3_again is averaged by loss_type, and cispo is not one of sum, "),
    ({"method": "tracerl", "sync_ref_model": True}, "sync_ref_model changes a reference model, and this run has none"),
    ({"method": "espo", "use_bias_correction_kl": True}, "use_bias_correction_kl belongs to TRL's own KL"),
    (BUDGET | {"lr_scheduler_type": "cosine"}, "lr_scheduler_type cosine needs max_steps: use .* linear"),
    (BUDGET | {"lr_scheduler_type": "linear", "warmup_steps": 3}, "warmup_steps: a linear learning rate .* 0"),
    ({"router_aux_loss_coef": 0.001}, "router_aux_loss_coef 0.001 needs the router's logits"),
    ({"advantage": "leave_one_out", "scale_rewards": "group"}, "set --scale_rewards none"),
    ({"method": "wd1", "multi_objective_aggregation": "normalize_then_sum"}, "signed_softmax .* sum_then_normalize"),
    ({"right_share": [0.8, 0.2]}, r"the smaller first, got \[0.8, 0.2\]"),
    ({"method": "egspo-sa", "right_share": [0.2, 0.8], "refills": 1}, "state_reward reads .* set --refills 0"),
    ({"method": "tracerl", "loss_type": "grpo"}, "some of a row's views, but clipped_views with loss_type grpo"),
    ({"split_views": True}, "some of a row's views, but trl with loss_type bnpo needs all"),
    ({"method": "tracerl", "kl": "k2_draws"}, "k2_draws with .* --kl k3, k3_to_old, k3_steps, k3_likely, .*, k3_again"),
    ({"method": "egspo-sa", "objective": "clipped_views"}, "egspo-sa .* reads none of it: .*--objective clipped_steps"),
    ({"method": "egspo-sa", "split_views": False}, "state_reward needs one draw of views for all updates"),
    ({"score_as_sampled": True, "temperature": 0.0}, "at temperature 0 each token has probability 1"),
    ({"scored_tokens": "canvas", "eos_stop": True}, "canvas counts tokens after an EOS, which eos_stop skips"),
    ({"method": "d2", "cfg_scale": 1.0}, "segments scores tokens in the sampler's states .* set --cfg_scale 0"),
    ({"loss_type": "vespo", "sampling_weight_cap": 2.0}, "sampling_weight_cap weighs single tokens and vespo"),
    ({"method": "agrpo", "p_mask_prompt": 0.1}, "replay scores tokens given the whole prompt"),
    # Drawn views, and what counts them
    ({"method": "tracerl", "num_views": 4, "draw_steps": "entropy"}, "k3_to_old counts all views alike, and replay dr"),
    (
        {"method": "cj-grpo", "num_views": 4, "draw_steps": "entropy"},
        "loss_type views counts all views alike, .* set --draw_steps uniform, or use --loss_type sum, grpo, bnpo, ",
    ),
    ({"method": "egspo", "draw_steps": "entropy"}, "objective clipped_steps counts all views alike, and replay draws"),
    (
        {"method": "agrpo-entropy", "beta": 0.1, "kl": "k3_to_old"},
        "penalty k3_to_old counts all views alike, and replay .*: set --draw_steps uniform, .* --kl k3, k3_per_canvas",
    ),
    ({"method": "agrpo", "beta": 0.1, "kl": "k3_kept"}, "penalty k3_kept is not known to use each view's .* --kl k3, "),
    ({"method": "agrpo", "beta": 0.1, "kl": "k2_sequence"}, "penalty k2_sequence is not known to use each view"),
    (
        {"method": "spg", "scored_tokens": "unpadded"},
        "unpadded may leave out some .* --scored_tokens ended, drawn",
    ),
    ({"method": "stable-drl", "scored_tokens": "steps"}, "spg takes the first tokens of a canvas for the completion"),
    # Refills
    (
        {"right_share": [0.2, 0.8], "refills": 1, "scale_rewards": "batch"},
        "scale_rewards batch scales the advantages of one batch together, and refills 1 .* set --refills 0",
    ),
    (
        {"method": "lightning-rl", "refills": 1},
        "normalize_then_sum scales the advantages of one batch together, and re",
    ),
    # Entropies of all tokens
    (
        {"method": "gdpo", "top_entropy_quantile": 0.2},
        "views of gauss may leave some out: .* --estimator one_step, rep",
    ),
    ({"method": "espo", "antithetic": False, "top_entropy_quantile": 0.2}, "views of espo may leave some out"),
    # What would do nothing
    ({"num_views": 3}, "the estimator one_step does not read it; elbo, espo, counts, .* would"),
    ({"method": "cj-grpo", "draw_steps": "entropy"}, "would do nothing: replay scores every step unless num_views"),
    ({"method": "egspo", "mean_step": True}, "would do nothing: the steps of highest entropy are not drawn"),
    ({"method": "cj-grpo", "split_views": True}, "--split_views True would do nothing: there is one update"),
    ({"score_as_sampled": True, "temperature": 1.0}, "--score_as_sampled True would do nothing: at temperature 1"),
    ({"save_at_compute": [0.5]}, "save_at_compute .* would do nothing: its shares are of max_compute_tokens"),
    ({"eubo_beta": 2.0}, "--eubo_beta 2.0 would do nothing: the objective trl does not read it; spg, stable"),
    ({"method": "wd1", "epsilon": 0.2}, "the objective reinforce does not read it; trl, clipped_views, .* would"),
    ({"hint_rows": 2}, "--hint_rows 2 would do nothing: it counts completions with hints, and hints is none"),
    ({"reward_temperature": 0.1}, "the advantage trl does not read it; tilted_softmax would"),
    ({"method": "lightning-rl", "reward_temperature": 0.1}, "the advantage standardised_batch does not read it"),
    ({"method": "agrpo", "kl": "k3_to_old"}, "--kl k3_to_old would do nothing: it says what beta weighs"),
    ({"beta": 0.0, "use_bias_correction_kl": True}, "would do nothing: it changes the KL that beta weighs"),
    ({"sync_ref_model": True, "beta": 0.0}, "sync_ref_model changes a reference .* or use a KL to one, with --beta"),
    ({"ref_model_sync_steps": 64}, "--ref_model_sync_steps 64 would do nothing: it says how the reference .* is false"),
    ({"ref_model_mixup_alpha": 0.9}, "--ref_model_mixup_alpha 0.9 would do nothing: it says how the reference model f"),
    ({"rollout_own_batch": False}, "--rollout_own_batch False would do nothing: it is for servers, .* is trainer"),
    ({"rollout_server_timeout": 9.0}, "--rollout_server_timeout 9.0 would do nothing: it is for servers"),
    ({"p_mask_prompt": 0.0, "protect_special_tokens": True}, "would do nothing: no token of a prompt is masked"),
    (BUDGET | {"save_at_compute": [0.5, 0.0]}, r"--save_at_compute 0.5 0.0 \(must be numbers in \(0, 1\] or None"),
    # What TRL's loss reads with another loss_type
    (
        {"loss_type": "sapo", "epsilon": 0.2},
        "--epsilon 0.2 would do nothing: loss_type sapo does not read it; grpo, bnpo, .*, luspo, cispo would",
    ),
    ({"loss_type": "sapo", "delta": 3.0}, "--delta 3.0 would do nothing: loss_type sapo does not read it"),
    ({"loss_type": "vespo", "epsilon_high": 0.3}, "--epsilon_high 0.3 would do nothing: loss_type vespo does not"),
    ({"loss_type": "cispo", "delta": 3.0}, "--delta 3.0 would do nothing: loss_type cispo does not read it; grpo, .*"),
    ({"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 4.0}, "--epsilon 0.2 would do nothing: cispo has no lower"),
    ({"sapo_temperature_pos": 2.0}, "--sapo_temperature_pos 2.0 would do nothing: loss_type bnpo .* it; sapo would"),
    ({"loss_type": "sapo", "vespo_k_neg": 1.0}, "--vespo_k_neg 1.0 would do nothing: loss_type sapo .*; vespo would"),
    ({"method": "wd1", "vespo_k_neg": 1.0}, "--vespo_k_neg 1.0 would do nothing: the objective reinforce .* trl would"),
]
UNREAD = {  # method -> settings that neither its estimator nor its objective reads
    "d1": {"segments": 4, "stratified": True},
    "wd1": {"top_entropy_quantile": 0.2},
    "spg": {"ratio_cap": 2.0, "epsilon_high": 0.3, "sampling_weight_cap": 2.0},
    "cj-grpo": {"antithetic": True, "state_reward": 0.5},
    "bgpo": {"segment_steps": 4, "eubo_share": 1.0, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    "ebpo": {"delta": 3.0},
}


@pytest.fixture
def own_penalty(monkeypatch):
    """A user's penalty that is averaged according to loss_type."""
    monkeypatch.setitem(PENALTIES, "k3_again", replace(PENALTIES["k3"]))


@pytest.mark.usefixtures("own_penalty")
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_settings_that_contradict_each_other_are_refused_with_the_reason(given, message):
    with pytest.raises(ValueError, match=message):
        config(**given)


@pytest.mark.parametrize("method", UNREAD)
def test_a_setting_that_nothing_reads_is_refused_with_those_that_would(method):
    for name, value in UNREAD[method].items():
        said = rf"--{name} {value} would do nothing: the (estimator|objective) \w+ does not read it; \w+.* would$"
        with pytest.raises(ValueError, match=said):
            config(method=method, **{name: value})


def refusal(**given) -> str:
    """The error for these settings; "" if they are accepted."""
    try:
        config(**given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", METHODS)
def test_unread_values_of_a_method_with_another_choice_are_not_refused(monkeypatch, name):
    """Another estimator or objective than the method's is refused only for a contradiction, never because the method
    also sets what the other one does not read."""
    monkeypatch.setattr("d1.rl.config.try_entries", lambda args: None)  # other tests cover it
    changes = [{"estimator": other} for other in ESTIMATORS] + [{"objective": other} for other in OBJECTIVES]
    said = [refusal(method=name, **change) for change in [*changes, {"objective": "trl"}, {"beta": 0.0}]]
    assert not [text for text in said if "would do nothing" in text]
    assert said.count("") >= 4


def test_a_flag_without_effect_is_refused_only_if_its_value_is_not_the_methods():
    args = config(method="espo", estimator="one_step")
    assert (args.num_views, args.antithetic, args.importance_sampling_level) == (2, True, "sequence")
    assert config(method="espo", estimator="one_step", num_views=2).num_views == 2
    with pytest.raises(ValueError, match="--num_views 4 would do nothing"):
        config(method="espo", estimator="one_step", num_views=4)


def test_settings_that_something_reads_are_accepted():
    for given in (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0},
        {"loss_type": "vespo", "vespo_lambda_neg": 1.0},
        {"loss_type": "cispo", "epsilon": 0.2},
        {"loss_type": "cispo", "epsilon_high": 4.0},
        {"method": "tracerl", "num_iterations": 1, "delta": 3.0},
        {"sync_ref_model": True, "ref_model_sync_steps": 64, "ref_model_mixup_alpha": 0.9},
        SERVER | {"rollout_own_batch": True, "rollout_server_timeout": 9.0},
        {"protect_special_tokens": True},
        {"use_bias_correction_kl": True},
        {"calls_per_turn": 2},  # of tools that a trainer gets: `check_single_turn`
        BUDGET | {"lr_scheduler_type": "constant", "save_at_compute": [0.5, 1.0]},
    ):
        assert refusal(**given) == ""


def test_a_users_own_entries_may_read_any_setting(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "mine", Estimator(draw))
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(OBJECTIVES["reinforce"].loss))
    reads = {"num_views": 3, "segments": 4, "antithetic": True, "stratified": True, "draw_steps": "entropy"}
    more = {"eubo_beta": 2.0, "ratio_cap": 2.0, "epsilon": 0.3, "delta": 3.0, "importance_sampling_level": "sequence"}
    assert config(estimator="mine", objective="mine", **reads, **more).ratio_cap == 2.0


# --- A trial of a user's functions ------------------------------------------------------------------------------------

PUSH = Path(__file__).parents[2] / "my_method.py"
HEAD = """
import torch
from d1.rl.losses import Advantage, Objective, Penalty
from d1.scoring import Estimator, Views

def per_row(inputs): return (inputs.logps * inputs.mask).sum(-1)
"""


# What a file defines around the expression that its function f returns.
LOSS = "def f(inputs, settings): {}\nMETHOD = {{'objective': 'mine', 'beta': 0}}\nOBJECTIVES = {{'mine': Objective(f)}}"
FREE = LOSS.replace("(f)", "(f, reads_old=False)")
KL = "def f(inputs, settings): {}\nMETHOD = {{'kl': 'mine', 'beta': 0.1}}\nPENALTIES = {{'mine': Penalty(f)}}"
TO_OLD = KL.replace("(f)", "(f, to='old')")
ADVANTAGE = "def f(groups): {}\nMETHOD = {{'advantage': 'mine'}}\nADVANTAGES = {{'mine': Advantage(f)}}"
OF_BOUNDS = ADVANTAGE.replace("groups", "inputs, settings").replace("(f)", "(f, reads=('old',))")
VIEWS = "def f(sampled, random, settings): {}\nMETHOD = {{'estimator': 'mine'}}\nESTIMATORS = {{'mine': Estimator(f)}}"
TWO = "noise = torch.ones(3, 2, 11, dtype=bool); weights = torch.ones(3, 2, 8); "
ENTRY = "[A-Z]+\\['mine'\\]: f \\(.*mine.py, line 7\\)"
MISTAKES = [
    (LOSS, "return None", "returned None: expected a pair"),
    (LOSS, "return per_row(inputs), {}", r"returned a tensor of shape \(3,\): expected a scalar tensor with"),
    (LOSS, "return per_row(inputs).mean().detach(), {}", r"returned a tensor of shape \(\) without gradient"),
    (LOSS, "return per_row(inputs).mean(), {'text': 'much'}", "gave the metric 'text': str 'much', expected a number"),
    (LOSS, "return settings.no_such_thing", "AttributeError in line 7: .* no attribute 'no_such_thing'"),
    (LOSS, "return inputs.view_logps.exp_().exp_().mean() * inputs.logps.mean(), {}", "RuntimeError in line"),
    (FREE, "return (per_row(inputs) - inputs.old).mean(), {}", "not scored: an Objective needs reads_old=True"),
    (FREE, "return (inputs.view_logps - inputs.view_old).mean(), {}", "TypeError in line 7: unsupported operand"),
    (KL, "return per_row(inputs)", r"returned a tensor of shape \(3,\): expected a scalar"),
    (KL, "return (inputs.logps - inputs.old).pow(2).mean()", "not scored: .* to='old' or to='reference'"),
    (TO_OLD, "return (inputs.logps - inputs.reference).pow(2).mean()", "TypeError in line 7"),
    (ADVANTAGE, "return groups.mean(1)", r"returned a tensor of shape \(3,\).*: expected floats of shape \(3, 6\)"),
    (ADVANTAGE, "return groups > 0", "expected floats"),
    (
        OF_BOUNDS,
        "return inputs.old_bounds[:1]",
        r"returned a tensor of shape \(1, 6\).*: expected floats of shape \(3, 6\)",
    ),
    (OF_BOUNDS, "return inputs.old_bounds - inputs.reference_bounds", "TypeError in line 7: unsupported operand"),
    (OF_BOUNDS, "return inputs.old_bounds * settings.no_such_thing", "AttributeError in line 7"),
    (LOSS, "return per_row(inputs).mean() / inputs.views_per_draw, {}", "the loss is -?inf; `views_per_draw` is 0 if"),
    (VIEWS, "return None", "returned None: expected Views, of d1.scoring"),
    (VIEWS, TWO + "return Views(noise, weights)", "gave 2 views, but its entry says at most 1"),
    (VIEWS, TWO + "return Views(noise, weights[:, :1])", "2 views have noise and 1 have weights"),
    (VIEWS, TWO + "return Views(noise[:, :, :8], weights)", r"views.noise must be \(3, views, 11\)"),
    (VIEWS, TWO + "return Views(noise.float(), weights)", "views need bool noise and float weights, got torch.float32"),
]


@pytest.mark.parametrize(("file", "body", "message"), MISTAKES)
def test_a_mistake_in_a_users_function_is_one_line_before_anything_is_loaded(tmp_path, file, body, message):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + file.format(body))
    with pytest.raises(ValueError, match=f"^{ENTRY}.*{message}") as error:
        config(method=str(path))
    assert "\n" not in str(error.value)


def test_tools_that_a_config_names_are_those_of_the_command():
    with pytest.raises(ValueError, match=r"^tools calculator: d1 rl reads these names; give the trainer functions"):
        check_single_turn(config(tools=["calculator"]))


def test_a_trial_leaves_the_global_generator_alone(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + LOSS.format("return (per_row(inputs) * torch.rand(len(inputs.mask))).mean(), {}"))
    before = torch.get_rng_state()
    config(method=str(path))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_trial_cannot_show_is_one_line_at_the_step_at_which_it_happens(tiny_model_dir, tmp_path, monkeypatch):
    calls = []

    def tires(inputs, settings):
        calls.append(inputs)
        loss = OBJECTIVES["reinforce"].loss(inputs, settings)[0]
        return (loss if len(calls) < 3 else loss.detach()), {}

    monkeypatch.setitem(OBJECTIVES, "mine", Objective(tires))
    trainer = make_method(tiny_model_dir, tmp_path, "d1", objective="mine", beta=0.0)
    with pytest.raises(ValueError, match=r"^tires \(.*\) returned a tensor of shape \(\) without gradient: expected a"):
        trainer.train()


def test_weights_that_would_be_broadcast_over_views_are_refused():
    inputs = random_inputs()
    with pytest.raises(ValueError, match=r"weights must be \(6, 3, 5\), got \(6, 1, 5\)"):
        replace(inputs, weights=inputs.weights[:, :1])


def test_what_a_loss_counts_is_an_average_over_micro_batches_and_at_least_one_in_all():
    """Six micro-batches of one row: four have an advantage, three views score something, or nothing does."""
    ones = torch.ones(1, 8)
    batch = {"prompt_mask": torch.ones(1, 4).long(), "completion_mask": ones.long(), "advantages": torch.ones(1)}
    batch |= {"view_weights": ones.view(1, 1, 1, 8), "reveal_steps": torch.tensor([[1, 0, 2, 3, 5, 4, 7, 6]])}
    scores = Scores(-ones, -ones.unsqueeze(1), torch.tensor(8))
    for counted, expected in (((4, 3, 20), (4 / 6, 3 / 6, 20 / 6)), ((0, 0, 0), (1 / 6, 1 / 6, 1 / 6))):
        active, views, tokens = map(torch.tensor, counted)
        batch |= {"active_rows": active[None], "scoring_views": views[None, None], "num_items_in_batch": tokens}
        batch |= {"scored_pairs": 2 * tokens[None, None], "repeated_tokens": 3 * tokens[None, None]}
        inputs = loss_inputs(batch, scores, 0, parts=6)
        assert inputs.scored_pairs.item() == pytest.approx(max(2 * tokens.item(), 1) / 6)
        assert inputs.repeated_tokens.item() == pytest.approx(max(3 * tokens.item(), 1) / 6)
        found = [inputs.active_rows.item(), inputs.scoring_views.item(), inputs.tokens.item()]
        assert found == pytest.approx(expected, rel=1e-6)
    assert torch.equal(inputs.reveal_steps, batch["reveal_steps"])
    in_blocks = loss_inputs(batch, scores, 0, blocks=CanvasBlocks(4)).reveal_steps  # two blocks of four tokens
    assert in_blocks.tolist() == [[1, 0, 2, 3, 1, 0, 3, 2]]


# --- What an entry states ---------------------------------------------------------------------------------------------


def trained(model_dir, folder, method, **changes):
    trainer = make_method(model_dir, folder, method, **changes)
    trainer.train()
    return trainer


def assert_same_run(one, other):
    assert all(torch.equal(weight, weights(other.model)[name]) for name, weight in weights(one.model).items())
    assert [entry["compute_tokens"] for entry in logged(one)] == [entry["compute_tokens"] for entry in logged(other)]


def k3_by_hand(inputs, settings):
    d = (inputs.view_old - inputs.view_logps).exp()
    return ((d - d.log() - 1) * (inputs.weights != 0)).sum() / inputs.views


def test_a_users_penalty_to_the_sampling_policy_pulls_like_ours(tiny_model_dir, tmp_path, monkeypatch):
    inputs, run = random_inputs(), settings(loss_type="dapo")
    found, expected = Penalty(k3_by_hand, to="old")(inputs, run), PENALTIES["k3_to_old"](inputs, run)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(found, inputs), gradient(expected, inputs), rtol=1e-10, atol=1e-14)
    monkeypatch.setitem(PENALTIES, "mine", Penalty(PENALTIES["k3_to_old"].value, to="old"))
    given = {"objective": "reinforce", "beta": 10.0, "loss_type": "grpo"}  # alone it would score no old log-probs
    mine, ours = (trained(tiny_model_dir, tmp_path / kl, "d1", kl=kl, **given) for kl in ("mine", "k3_to_old"))
    assert_same_run(mine, ours)
    assert logged(mine)[1]["kl"] > 1e-4
    assert {"old_view_logps", "ref_view_logps"} & rollout_buffer(mine)[0].keys() == {"old_view_logps"}
    assert mine.ref_model is None
    without = trained(tiny_model_dir, tmp_path / "without", "d1", **{**given, "beta": 0.0})
    assert "old_view_logps" not in rollout_buffer(without)[0]
    assert any(not torch.equal(weight, weights(without.model)[name]) for name, weight in weights(mine.model).items())


def test_a_users_estimator_of_bounds_goes_with_objectives_of_bounds(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "mine", Estimator(draw_blocks, linear=False))
    monkeypatch.setitem(OBJECTIVES, "its", Objective(OBJECTIVES["spg"].loss, linear=False))
    assert config(estimator="mine", objective="its", beta=0.0).objective == "its"
    assert "and no KL can be computed from bounds" in refusal(estimator="mine", objective="its", beta=0.1)
    for one in ({"estimator": "mine", "objective": "reinforce"}, {"estimator": "elbo", "objective": "its"}):
        assert "estimators of bounds (spg, mine)" in refusal(**one, beta=0.0)


def test_a_users_draws_with_inverse_chances_need_an_objective_of_views(monkeypatch):
    drawn = replace(ESTIMATORS["random_masks"], settings=None)
    monkeypatch.setitem(ESTIMATORS, "mine", drawn)
    for entry, accepted in (
        (Objective(OBJECTIVES["clipped_views"].loss), False),
        (Objective(OBJECTIVES["clipped_views"].loss, per_view=True), True),
        (Objective(OBJECTIVES["reinforce"].loss, reads_old=False), True),
    ):
        monkeypatch.setitem(OBJECTIVES, "its", entry)
        said = refusal(estimator="mine", objective="its")
        assert said == "" if accepted else "its would raise each ratio to the power of a draw's weight" in said


def test_a_users_objective_over_a_group_gets_its_ratios(tiny_model_dir, tmp_path, monkeypatch):
    row = OBJECTIVES["stable_drl"]
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(row.loss, over_group=True, linear=False))
    mine, ours = (
        trained(tiny_model_dir, tmp_path / name, "stable-drl", objective=name) for name in ("mine", "stable_drl")
    )
    assert_same_run(mine, ours)
    assert logged(mine)[1]["weight_max"] == logged(ours)[1]["weight_max"] != 1.0
    with pytest.raises(ValueError, match="mine weighs a row against the others of its prompt"):
        make_method(tiny_model_dir, tmp_path, "stable-drl", objective="mine", steps_per_generation=2)


def test_a_users_advantage_of_plain_rewards_takes_any_scale(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", Advantage(lambda groups: groups.sign(), centred=False))
    monkeypatch.setitem(ADVANTAGES, "centred", Advantage(lambda groups: groups.sign()))
    assert config(advantage="mine", scale_rewards="group").advantage == "mine"
    said = refusal(advantage="centred", scale_rewards="group")
    assert "centred is computed from rewards minus their group's mean: set --scale_rewards" in said


def test_the_readmes_objective_pays_for_no_old_log_probs(tiny_model_dir, tmp_path):
    """Tokens computed: 4 passes in sampling, 3 times a view in each of two updates, and 2 views for both's old
    log-probs."""
    base = {name: value for name, value in SETTINGS.items() if name not in ("p_mask_prompt", "num_iterations")}
    paid, text = tmp_path / "paid.py", PUSH.read_text().replace("push, reads_old=False", "push")
    paid.write_text(text.replace('"push"', '"paid"').replace('"half"', '"halves"'))
    trainers = []
    for file, pays in ((PUSH, False), (paid, True)):
        trainers.append(make_trainer(tiny_model_dir, tmp_path / file.stem, base=base, method=str(file)))
        trainers[-1].train()
        assert ("old_view_logps" in rollout_buffer(trainers[-1])[0]) == pays
        assert ("ratio_max" in logged(trainers[-1])[-1]) == pays
    compute, more = (logged(trainer)[-1]["compute_tokens"] for trainer in trainers)
    assert more / compute == (4 + 6 + 2) / (4 + 6)
    free, paying = (weights(trainer.model) for trainer in trainers)
    assert all(torch.equal(weight, paying[name]) for name, weight in free.items())


# --- Values of a config file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("reward_weights: [1e-1, 2, 0.5]", [0.1, 2, 0.5]),
        ("max_steps: 2.0", 2),
        ("max_steps: '2'", 2),
        ("num_iterations: 2.0", 2),
        ("gradient_accumulation_steps: 1.0", 1),
        ("save_steps: 0.5", 0.5),
        ("save_steps: 20.0", 20),
        ("max_completion_length: 1e2", 100),
        ("learning_rate: 2e-5", 2e-5),
        ("beta: 1e-2", 0.01),
        ("run_name: 1e1", "1e1"),
        ("lora_r: 8.0", 8),
        ("lora_target_modules: [q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("lr_scheduler_kwargs: {min_lr_rate: 1e-1}", {"min_lr_rate": 0.1}),
        ("chat_template_kwargs: {enable_thinking: false, year: '2024'}", {"enable_thinking": False, "year": "2024"}),
        ("report_to: null", []),
        ("report_to: none", []),
    ],
)
def test_values_of_a_config_file_have_the_types_of_the_flags(line, expected, tmp_path):
    name = line.partition(":")[0]
    (tmp_path / "run.yaml").write_text(line)
    flags = [str(word) for flag, value in HERE.items() for word in (f"--{flag}", value)]
    args, model_args = make_parser().parse_args_and_config([*flags, "--config", str(tmp_path / "run.yaml")])
    value = getattr(args if hasattr(args, name) else model_args, name)
    assert value == expected
    if not isinstance(value, dict):
        assert str(value) == str(expected)  # 2 and 2.0 are equal


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("reward_weights: [x]", r"out of range: --reward_weights x"),
        ("max_steps: 2.5", r"out of range: --max_steps 2.5"),
        ("num_iterations: true", r"out of range: --num_iterations True"),
        ("num_iterations: [1, 2]", r"out of range: --num_iterations 1 2"),
        ("dataset: [a, b]", r"dataset in the --config file must be text, got a list: \['a', 'b'\]"),
        ("model_path: {a: 1}", r"model_path in the --config file must be text, got a mapping: {'a': 1}"),
        (
            "chat_template_kwargs: [1]",
            r"chat_template_kwargs in the --config file must be a mapping, got a list: \[1\]",
        ),
        ("5: 1", r"--config .*run.yaml: the name 5 is no text: lines are NAME: VALUE"),
        ("? [a]\n: 1", r"--config .*run.yaml is no yaml"),
        ("- a", r"--config .*run.yaml must have lines NAME: VALUE"),
    ],
)
def test_a_config_file_with_values_of_another_kind_is_refused_when_it_is_read(line, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        parsed(yaml=line, tmp_path=tmp_path)

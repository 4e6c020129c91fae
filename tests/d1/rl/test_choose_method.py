"""Methods: what a name sets, what overrides it, and which settings are refused in combination."""

import ast
import inspect
import os
from dataclasses import fields, replace

import pytest
import torch

from d1.rl import checks
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import OBJECTIVES, PENALTIES, Objective
from d1.rl.methods import D1, METHODS
from d1.rl.train import make_parser
from d1.scoring import ESTIMATORS, Estimator
from d1.scoring.masks import draw_one_step as draw

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


# --- The table --------------------------------------------------------------------------------------------------------


# From the authors' main run: updates per rollout, temperature, largest norm of a gradient, rate, completions per
# prompt; None if their sources do not say.
MAIN_RUNS = {
    "d1": (12, 0.9, 0.2, 3e-6, 6),
    "wd1": (12, 0.9, 0.2, 3e-6, 6),
    "coupled-grpo": (2, 1.0, 0.2, 1e-6, 10),
    "espo": (8, 1.0, 0.2, 3e-6, 6),
    "spg": (4, 0.9, 0.2, 3e-6, 6),
    "agrpo": (1, 0.6, 1.0, 5e-6, 8),
    "agrpo-entropy": (1, 0.6, 1.0, 5e-6, 8),
    "cj-grpo": (1, 0.6, 1.0, 5e-7, 8),
    "d2": (8, 0.3, 0.2, 3e-6, 6),
    "tracerl": (4, 0.8, 1.0, 1e-6, 8),
    "just-grpo": (1, 1.0, 1.0, 5e-6, 16),
    "unigrpo": (4, 0.8, 1.0, 1e-6, 8),
    "bgpo": (1, 0.6, 1.0, 5e-7, 8),
    "stable-drl": (2, 0.9, 0.2, 1e-6, 16),
    "egspo": (4, 0.9, 0.2, 3e-5, 8),
    "egspo-sa": (4, 0.9, 0.2, 3e-5, 8),
    "gdpo": (12, None, None, 3e-7, None),
    "gdsd": (8, 1.0, 0.2, 3e-6, 16),
    "rldf": (1, 1.0, None, 1e-6, 4),
    "dipo": (1, 1.0, None, None, 8),
    "ebpo": (1, 0.6, 1.0, 5e-7, 8),
}


@pytest.mark.parametrize("name", MAIN_RUNS)
def test_a_row_has_the_values_of_its_authors_main_run(name):
    args = config(method=name)
    names = ("num_iterations", "temperature", "max_grad_norm", "learning_rate", "num_generations")
    for setting, value in zip(names, MAIN_RUNS[name], strict=True):
        assert value in (None, getattr(args, setting))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_accepted_as_it_is_and_sets_all_that_its_row_has(name):
    method = METHODS[name]
    known = {field.name for field in fields(DiffuGRPOConfig)}
    assert {"temperature", "top_k", "top_p", "remasking", "max_grad_norm", "scored_tokens"} <= D1.keys()
    assert D1.keys() <= method.values.keys()  # so that no value of another method is left
    assert {*method.values, *method.scale} <= known
    assert not method.values.keys() & method.scale.keys()
    for args in (config(method=name), parsed("--method", name)):
        given = {**method.values, **method.scale}
        if given.get("diffusion_steps", 0) is None:  # one a token
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


# --- What stands above what -------------------------------------------------------------------------------------------


def test_the_later_wins_of_defaults_scale_yaml_method_and_flags(tmp_path):
    espo = METHODS["espo"].values
    yaml = "learning_rate: 0.5\nepsilon: 0.1\nbeta: 0.7\nblock_length: 8\n"
    args = parsed("--method", "espo", "--beta", "0.9", yaml=yaml, tmp_path=tmp_path)
    assert (args.learning_rate, args.block_length) == (0.5, 8)  # the yaml's, above the paper's scale and the default
    assert (args.epsilon, args.beta) == (espo["epsilon"], 0.9)  # the method's above the yaml's; a flag above both
    assert args.estimator == "espo"
    assert args.num_generations == METHODS["espo"].scale["num_generations"]
    args = parsed("--method", "agrpo", yaml="block_length: 8", tmp_path=tmp_path)
    assert (args.learning_rate, args.num_generations) == (5e-6, 8)  # the paper's scale, above the default


def test_a_method_in_a_yaml_comes_before_its_other_lines_wherever_it_stands(tmp_path):
    args = parsed(yaml="epsilon: 0.1\nlearning_rate: 0.5\nmethod: espo\n", tmp_path=tmp_path)
    assert (args.method, args.estimator, args.epsilon, args.learning_rate) == ("espo", "espo", 0.1, 0.5)
    args = parsed("--beta", "0.9", yaml="method: espo\nbeta: 0.7", tmp_path=tmp_path)
    assert args.beta == 0.9
    # A method on the command line replaces the yaml's: no value of the yaml's row is left.
    args = parsed("--method", "agrpo", yaml="method: espo\nlearning_rate: 0.5", tmp_path=tmp_path)
    assert differing(args, parsed("--method", "agrpo", "--learning_rate", "0.5")) == {}


def test_in_python_what_is_given_stands_above_the_method():
    args = config(method="espo", epsilon=0.3, learning_rate=0.5)
    assert (args.epsilon, args.learning_rate, args.estimator) == (0.3, 0.5, "espo")
    assert differing(args, parsed("--method", "espo", "--epsilon", "0.3", "--learning_rate", "0.5")) == {}


@pytest.mark.parametrize("words", [("--method=espo",), ("--method", "d1", "--method", "espo")])
def test_a_method_spelled_another_way_is_the_whole_method(words):
    assert differing(parsed(*words), parsed("--method", "espo")) == {}


# --- Mistakes ---------------------------------------------------------------------------------------------------------

IMPORTS = """
from d1.rl.losses import Advantage, Objective, Penalty
from d1.scoring import Estimator
def f(*given): return None
METHOD = {}
"""


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "no method file .*mine.py"),
        ("OBJECTIVES = {}", "mine.py: METHOD must be a dictionary of settings, METHOD = {...}, got None"),
        ("METHOD = ['espo']", r"METHOD must be a dictionary of settings, .* got \['espo'\]"),
        ("METHOD = {1: 2}", "METHOD must be a dictionary of settings, .* got {1: 2}"),
        ("METHOD = {'epsilon_hihg': 1}", "mine.py: METHOD has epsilon_hihg, which is not a setting"),
        ("METHOD = {'method': 'espo'}", "mine.py: METHOD has method, which is not a setting"),
        ("METHOD = {}; import no_such_thing", "mine.py: ModuleNotFoundError: No module named 'no_such_thing'"),
        (
            IMPORTS + "OBJECTIVES = [f]",
            r"OBJECTIVES must be a dictionary .* OBJECTIVES = {\"name\": Objective\(",
        ),
        (IMPORTS + "PENALTIES = {1: Penalty(f)}", "PENALTIES must be a dictionary from names to rows"),
        (IMPORTS + "OBJECTIVES = {'spg': Objective(f)}", "OBJECTIVES already has spg; choose another name"),
        (IMPORTS + "ADVANTAGES = {'trl': Advantage(f)}", "ADVANTAGES already has trl; choose another name"),
        (IMPORTS + "PENALTIES = {'k3': Penalty(f)}", "PENALTIES already has k3; choose another name"),
        (IMPORTS + "ESTIMATORS = {'replay': Estimator(f)}", "ESTIMATORS already has replay"),
        (
            IMPORTS + "ESTIMATORS = {'mine': f}",
            r"ESTIMATORS\['mine'\] must be a row: .* d1.scoring;",
        ),
        (
            IMPORTS + "OBJECTIVES = {'mine': f}",
            r"mine.py: OBJECTIVES\['mine'\] must be a row: .* d1\.rl;",
        ),
        (IMPORTS + "PENALTIES = {'mine': f}", r"write PENALTIES = {\"name\": Penalty\(function\)}"),
        (IMPORTS + "ADVANTAGES = {'mine': f}", r"write ADVANTAGES = {\"name\": Advantage\(function\)}"),
        (IMPORTS + "ESTIMATORS = {'mine': Estimator(3)}", r"ESTIMATORS\['mine'\]: draw must be a function, got 3"),
        (IMPORTS + "ESTIMATORS = {'mine': Estimator(f, views=3)}", r"ESTIMATORS\['mine'\]: views must be a function"),
        (
            IMPORTS + "OBJECTIVES = {'mine': Objective(None)}",
            r"OBJECTIVES\['mine'\]: loss must be a function",
        ),
        (IMPORTS + "PENALTIES = {'mine': Penalty('k3')}", r"PENALTIES\['mine'\]: value must be a function"),
        (IMPORTS + "Penalty(f, to='base')", "a Penalty must have to='reference' or to='old', got 'base'"),
        (IMPORTS + "Objective(f, reads_old=False, over_group=True)", "over_group compares with the old policy"),
        (
            IMPORTS + "OBJECTIVES = {'mine': Objective(f, settings=('epsilom',))}",
            r"OBJECTIVES\['mine'\] reads epsilom, which is not a setting",
        ),
        (
            IMPORTS + "METHOD = {'objective': 'yours'}; OBJECTIVES = {'not_yours': Objective(f)}",
            "--objective must be one of .*not_yours",
        ),
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


def test_a_method_file_that_failed_is_read_again_when_it_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "mended.py"
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


def test_method_without_a_name_is_one_line(capsys):
    with pytest.raises(SystemExit):
        parsed("--method")
    assert "argument --method: expected one argument" in capsys.readouterr().err.splitlines()[-1]


# --- Combinations -----------------------------------------------------------------------------------------------------

SPG = {"method": "spg"}
REFUSED = [
    ({"rollout_mode": "server"}, "--rollout_mode server needs --rollout_server_base_url URL"),
    ({"rollout_mode": "server", "rollout_server_base_url": ["localhost:30000"]}, "takes addresses http://HOST:PORT"),
    (
        {"rollout_mode": "server", "rollout_server_base_url": ["http://a:1"], "rollout_server_timeout": 7200},
        "--rollout_server_timeout 7200: processes wait for each other for --ddp_timeout",
    ),
    (
        {"method": "espo", "estimator": "replay", "num_views": 2},
        "a ratio of whole completions needs all of their tokens",
    ),
    ({"estimator": "replay", "num_views": 2}, "trl would raise each ratio to the power of a draw's weight"),
    (
        {"method": "d1", "estimator": "random_masks"},
        "random_masks needs --objective clipped_views, clipped_steps, bgpo, gdsd or rldf, or one without old log-probs",
    ),
    ({**SPG, "objective": "reinforce"}, "spg gives means over hidden tokens, not log-probabilities: .* and reinforce"),
    ({**SPG, "estimator": "elbo"}, "the objective spg computes its bounds from means .* --estimator spg"),
    ({"method": "stable-drl", "estimator": "one_step"}, "the objective stable_drl computes its bounds"),
    ({"method": "bgpo", "estimator": "coupled"}, "bgpo takes each draw .* --estimator elbo, espo, counts, complements"),
    ({"method": "gdsd", "estimator": "replay"}, "gdsd takes each draw as an estimate of the whole completion"),
    (
        {"method": "stable-drl", "gradient_accumulation_steps": 3, "steps_per_generation": 2},
        r"stable_drl weighs a row against the others .* gradient_accumulation_steps \(3\) must be a multiple .* \(2\)",
    ),
    ({"method": "wd1", "loss_type": "luspo"}, "reinforce has no loss_type luspo: use one of sum, grpo"),
    ({"method": "wd1", "loss_type": "views"}, "reinforce has no loss_type views: use one of sum, grpo"),
    ({"loss_type": "active"}, "the objective trl has no loss_type active: use one of grpo, "),
    ({"loss_type": "sum"}, "the objective trl has no loss_type sum: use one of grpo, "),
    ({**SPG, "beta": 0.1}, "and no KL can be computed from bounds: set --beta 0"),
    ({"kl": "k3_again", "loss_type": "cispo"}, "k3_again is averaged by loss_type, and cispo is not one of sum, "),
    ({"method": "espo", "use_bias_correction_kl": True}, "use_bias_correction_kl belongs to TRL's own KL"),
    (
        {"max_compute_tokens": 100, "lr_scheduler_type": "cosine"},
        "cosine changes the learning rate over max_steps, .* linear",
    ),
    (
        {"max_compute_tokens": 100, "lr_scheduler_type": "linear", "warmup_steps": 3},
        "warmup_steps: a linear learning rate .* 0",
    ),
    ({"save_at_compute": [0.5]}, "save_at_compute .* would do nothing: its shares are of max_compute_tokens"),
    ({"router_aux_loss_coef": 0.001}, "router_aux_loss_coef 0.001 needs the router's logits"),
    ({"advantage": "leave_one_out", "scale_rewards": "group"}, "set --scale_rewards none"),
    (
        {"method": "wd1", "multi_objective_aggregation": "normalize_then_sum"},
        "signed_softmax is computed from rewards minus their group's mean, which normalize_then_sum does not give",
    ),
    ({"right_share": [0.8, 0.2]}, r"the smaller first, got \[0.8, 0.2\]"),
    ({"right_share": [0.2]}, "right_share needs two shares"),
    (
        {"method": "tracerl", "loss_type": "grpo"},
        "clipped_views with loss_type grpo needs all of them: use --objective",
    ),
    (
        {"split_views": True},
        "split_views gives each update some of a row's views, but trl with loss_type bnpo needs all",
    ),
    (
        {"method": "bgpo", "num_iterations": 2, "split_views": True},
        "some of a row's views, but bgpo with loss_type sum",
    ),
    (
        {"method": "egspo", "kl": "k2_draws"},
        "k2_draws with .* needs all .* --kl k3, k3_to_old, k3_steps, k3_likely or k3_again",
    ),
    ({"method": "tracerl", "kl": "k2_draws"}, "some of a row's views, but k2_draws with loss_type views needs all"),
    (
        {"method": "egspo-sa", "objective": "clipped_views", "loss_type": "views"},
        "state_reward 0.5 of method egspo-sa .* clipped_views reads none of it: .*--objective clipped_steps",
    ),
    (
        {"method": "egspo-sa", "split_views": False},
        "state_reward needs one draw of views for all updates: set --split_views",
    ),
    (
        {"score_as_sampled": True, "temperature": 0.0},
        "at temperature 0 each token has probability 1; set another --temp",
    ),
    (
        {"scored_tokens": "canvas", "eos_stop": True},
        "canvas counts tokens after an EOS, which eos_stop skips: set --eos_s",
    ),
    ({"method": "agrpo", "eos_stop": True}, "scored_tokens steps counts tokens after an EOS"),
    ({"method": "d2", "cfg_scale": 1.0}, "segments scores tokens in the sampler's states .* set --cfg_scale 0"),
    (
        {"method": "bgpo", "sampling_weight_cap": 2.0},
        "--sampling_weight_cap 2.0 would do nothing: .* bgpo",
    ),
    (
        {"method": "spg", "sampling_weight_cap": 2.0},
        "--sampling_weight_cap 2.0 would do nothing: .* spg",
    ),
    ({"loss_type": "vespo", "sampling_weight_cap": 2.0}, "sampling_weight_cap weighs single tokens and vespo"),
    ({"method": "agrpo", "p_mask_prompt": 0.1}, "replay scores tokens given the whole prompt"),
    ({"method": "just-grpo", "p_mask_prompt": 0.1}, "left_to_right scores tokens given the whole prompt"),
    # What would do nothing
    ({"num_views": 3}, "the estimator one_step does not read it; elbo, espo, counts, .* would"),
    ({"method": "espo", "estimator": "coupled", "num_views": 4}, "--num_views 4 would do nothing"),
    ({"method": "just-grpo", "num_views": 4}, "--num_views 4 would do nothing"),
    ({"method": "cj-grpo", "antithetic": True}, "--antithetic True would do nothing: the estimator replay"),
    ({"method": "cj-grpo", "state_reward": 0.5}, "--state_reward 0.5 would do nothing: .* clipped_steps would"),
    ({**SPG, "stratified": True}, "--stratified True would do nothing"),
    ({"segments": 4}, "--segments 4 would do nothing: the estimator one_step does not read it; segments would"),
    ({"method": "d2", "segment_steps": 2}, "the estimator segments does not read it; replay would"),
    ({"method": "gdpo", "num_views": 4}, "--num_views 4 would do nothing: the estimator gauss"),
    ({"method": "bgpo", "antithetic": True}, "--antithetic True would do nothing: the estimator counts"),
    ({"method": "bgpo", "segment_steps": 4}, "--segment_steps 4 would do nothing"),
    ({"method": "espo", "draw_steps": "entropy"}, "--draw_steps entropy would do nothing: the estimator espo"),
    ({"method": "cj-grpo", "draw_steps": "entropy"}, "would do nothing: replay scores every step unless num_views"),
    ({"method": "cj-grpo", "mean_step": True}, "would do nothing: replay scores every step unless num_views"),
    ({"method": "egspo", "mean_step": True}, "would do nothing: the steps of highest entropy are not drawn"),
    ({"method": "cj-grpo", "split_views": True}, "--split_views True would do nothing: there is one update"),
    ({"score_as_sampled": True, "temperature": 1.0}, "--score_as_sampled True would do nothing: at temperature 1"),
    ({"eubo_beta": 2.0}, "--eubo_beta 2.0 would do nothing: the objective trl does not read it; spg, stable"),
    ({"method": "bgpo", "eubo_share": 1.0}, "--eubo_share 1.0 would do nothing"),
    ({**SPG, "ratio_cap": 2.0}, "--ratio_cap 2.0 would do nothing: .* stable_drl would"),
    ({"method": "wd1", "epsilon": 0.2}, "the objective reinforce does not read it; trl, clipped_views, .* would"),
    ({**SPG, "epsilon_high": 0.3}, "--epsilon_high 0.3 would do nothing: the objective spg"),
    ({"method": "bgpo", "loss_type": "grpo"}, "--loss_type grpo would do nothing: the objective bgpo"),
    ({"method": "bgpo", "importance_sampling_level": "sequence"}, "--importance_sampling_level sequence would do noth"),
    (
        {"method": "ebpo", "delta": 3.0},
        "--delta 3.0 would do nothing: the objective clipped_sequences .* trl, clipped_",
    ),
    ({"method": "gdsd", "epsilon_high": 0.3}, "--epsilon_high 0.3 would do nothing: the objective gdsd"),
    ({"method": "rldf", "epsilon": 0.3}, "--epsilon 0.3 would do nothing: the objective rldf"),
    ({"method": "wd1", "top_entropy_quantile": 0.2}, "--top_entropy_quantile 0.2 would do nothing"),
    ({**SPG, "entropy_coef": 0.1}, "--entropy_coef 0.1 would do nothing"),
    ({**SPG, "use_adaptive_entropy": True}, "--use_adaptive_entropy True would do nothing"),
    ({"method": "agrpo", "off_policy_mask_threshold": 0.1}, "--off_policy_mask_threshold 0.1 would do nothing"),
    (
        {"method": "agrpo", "kl": "k3_to_old"},
        "--kl k3_to_old would do nothing: it says what beta weighs, and beta is 0",
    ),
]


@pytest.fixture
def own_penalty(monkeypatch):
    """A user's penalty that is averaged according to loss_type."""
    monkeypatch.setitem(PENALTIES, "k3_again", replace(PENALTIES["k3"]))


@pytest.mark.usefixtures("own_penalty")
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_means_nothing_is_refused_with_the_reason(given, message):
    with pytest.raises(ValueError, match=message):
        config(**given)


def refusal(**given) -> str:
    """The error for these settings; "" if they are accepted."""
    try:
        config(**given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("own_penalty")
def test_every_contradiction_has_a_test(monkeypatch):
    reasons, met = checks.contradictions, set()
    lines, first = inspect.getsourcelines(reasons)

    def noted(settings):
        for reason in (found := reasons(settings)):
            met.add(found.gi_frame.f_lineno - first + 1)
            yield reason

    monkeypatch.setattr(checks, "contradictions", noted)
    assert all(refusal(**given) for given, _ in REFUSED)
    yields = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.Yield)]
    assert len(yields) > 15
    assert [one.lineno for one in yields if met.isdisjoint(range(one.lineno, one.end_lineno + 1))] == []


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_leaves_behind_beside_another_choice_is_no_reason_to_refuse(monkeypatch, name):
    """A flag given together with a method is refused only if it causes a contradiction; the row itself does not prevent
    it."""
    monkeypatch.setattr("d1.rl.config.try_rows", lambda args: None)  # with rows that other tests cover
    changes = [{"estimator": other} for other in ESTIMATORS] + [{"objective": other} for other in OBJECTIVES]
    said = [refusal(method=name, **change) for change in [*changes, {"objective": "trl"}, {"beta": 0.0}]]
    assert not [text for text in said if "would do nothing" in text]
    assert said.count("") >= 4


def test_flags_beside_a_method_are_said_to_do_nothing_only_if_they_are_not_its_own():
    args = config(method="espo", estimator="one_step")
    assert (args.num_views, args.antithetic, args.importance_sampling_level) == (2, True, "sequence")
    assert config(method="espo", estimator="one_step", num_views=2).num_views == 2
    with pytest.raises(ValueError, match="--num_views 4 would do nothing"):
        config(method="espo", estimator="one_step", num_views=4)


def test_a_users_own_rows_may_read_any_setting(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "mine", Estimator(draw))
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(OBJECTIVES["reinforce"].loss))
    reads = {"num_views": 3, "segments": 4, "antithetic": True, "stratified": True, "draw_steps": "entropy"}
    more = {"eubo_beta": 2.0, "ratio_cap": 2.0, "epsilon": 0.3, "delta": 3.0, "importance_sampling_level": "sequence"}
    assert config(estimator="mine", objective="mine", **reads, **more).ratio_cap == 2.0

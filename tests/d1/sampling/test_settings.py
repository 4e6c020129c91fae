"""The settings of a rollout check themselves; the flags of commands give the same settings."""

import dataclasses
import math
import re
import subprocess
import sys

import pytest
from transformers import BertConfig, LlamaConfig

from d1.models.distribution import MODEL_DISTRIBUTION, Distribution
from d1.runs.cli import SettingsParser
from d1.sampling import SamplingSettings
from d1.sampling.caches import CACHES, Cache
from d1.sampling.reveal import REMASKING, RULES, Order, Rule
from d1.sampling.settings import RANGES, SamplingFlags, sampling_flag, sampling_settings

GOOD = {"gen_length": 12, "block_length": 4, "steps": 6}
PARALLEL = {"sampler": "parallel"}
TRUNCATED = {"top_k": 2, "top_p": 0.9, "record_as_sampled": True}
NUMBERS = [math.nan, math.inf, -math.inf, -1.0, "1", None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({name: value}, f"{name} must be an integer in") for name in GOOD for value in (0, 2.0, "4", True)],
        *[({name: value}, f"{name} must be in") for name in ("temperature", "cfg_scale") for value in NUMBERS],
        *[(PARALLEL | {"reveal_level": value}, "reveal_level must be in") for value in NUMBERS[:-1]],
        ({"steps": 2}, "12 tokens in 3 blocks need between 3 and 12 steps, got 2"),
        *[({"temperature": 1.0, "top_k": value}, "top_k must be an integer in") for value in (-1, 2.0, "3", None)],
        *[({"temperature": 1.0, "top_p": value}, "top_p must be in") for value in (*NUMBERS, 0.0, 1.1)],
        *[({name: value}, "need a temperature above 0") for name, value in TRUNCATED.items()],
        ({"remasking": "margin"}, "remasking must be one of low_confidence, random, .*got 'margin'"),
        (PARALLEL | {"remasking": "entropy"}, "needs remasking low_confidence, got entropy"),
        ({"sampler": "fast"}, r"sampler must be one of exact, cached, parallel, cached\+parallel, scdd, got 'fast'"),
        ({"sampler": "cached", "kv_cache": "suffix"}, "kv_cache must be one of prefix, dual, delayed"),
        (PARALLEL | {"reveal": "margin"}, "reveal must be one of threshold, factor, entropy"),
        ({"kv_cache": "dual"}, "kv_cache='dual' would be ignored by the sampler exact"),
        ({"reveal": "factor"}, "would be ignored by the sampler exact"),
        ({"sampler": "cached", "reveal_level": 0.5}, "would be ignored by the sampler cached"),
        ({"edit_threshold": 0.5}, "would be ignored by the sampler exact: choose a parallel one"),
        (PARALLEL | {"edit_threshold": 1.0}, r"edit_threshold must be in \[0, 1\) or None, got 1.0"),
        (PARALLEL | {"edit_threshold": 0.5, "max_post_steps": -1}, r"max_post_steps must be an integer in \[0, 256\]"),
        (PARALLEL | {"max_post_steps": 3}, "max_post_steps would be ignored: nothing is edited"),
        (PARALLEL | {"editing": "fast"}, "editing must be one of quality, speed, got 'fast'"),
        (PARALLEL | {"editing": "speed", "reveal": "factor"}, "has a level of the rule threshold, not of factor"),
        ({"sampler": "cached+parallel", "edit_threshold": 0.5}, "use the sampler parallel, which is exact"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**GOOD | changes)


@pytest.mark.parametrize(
    ("changes", "in_use"),
    [
        ({}, (None, None, 0.0, None, 0)),
        ({"sampler": "cached"}, ("dual", None, 0.0, None, 0)),
        (PARALLEL | {"reveal": "factor"}, (None, "factor", RULES["factor"].level, None, 0)),
        (PARALLEL | {"reveal_level": 0}, (None, "threshold", 0, None, 0)),
        ({"sampler": "cached+parallel"}, ("dual", "threshold", 0.9, None, 0)),
        # The presets are LLaDA2.1's, and single values win.
        (PARALLEL | {"editing": "quality"}, (None, "threshold", 0.7, 0.5, 16)),
        (PARALLEL | {"editing": "speed"}, (None, "threshold", 0.5, 0.0, 16)),
        (
            PARALLEL | {"editing": "speed", "edit_threshold": 0.9, "max_post_steps": 2, "reveal_level": 0.95},
            (None, "threshold", 0.95, 0.9, 2),
        ),
    ],
)
def test_what_is_not_said_is_the_tables_default(changes, in_use):
    chosen = SamplingSettings(**GOOD | changes)
    assert (chosen.cache, chosen.rule, chosen.level, chosen.edits, chosen.post_steps) == in_use
    assert chosen.max_passes() == 6 + 3 * in_use[-1]


def test_the_writes_of_an_edited_position_are_no_more_than_the_passes_of_its_block():
    settings = SamplingSettings(16, 10**9, 8, sampler="parallel", edit_threshold=0.5, max_post_steps=3)
    assert settings.max_writes == 16 + 3


def test_settings_know_whether_they_draw_from_what_and_what_they_record():
    """At temperature 0 nothing is drawn, and the model's own log-probability is recorded."""
    greedy, warm = SamplingSettings(**GOOD), SamplingSettings(**GOOD, temperature=0.5, top_k=2, top_p=0.9)
    assert (greedy.draws, greedy.draw_distribution, greedy.record_distribution) == (
        False,
        MODEL_DISTRIBUTION,
        MODEL_DISTRIBUTION,
    )
    assert (warm.draws, warm.draw_distribution, warm.record_distribution) == (
        True,
        Distribution(0.5, 2, 0.9),
        MODEL_DISTRIBUTION,
    )
    assert dataclasses.replace(warm, record_as_sampled=True).record_distribution == warm.draw_distribution


# --- Flags ------------------------------------------------------------------------------------------------------------

IN_BLOCKS = LlamaConfig(block_size=4)
FIELDS = dataclasses.fields(SamplingSettings)


def parsed(line: str = "") -> SamplingFlags:
    return SettingsParser(SamplingFlags).parse_args(line.split())


@pytest.mark.parametrize(
    ("flag", "table", "entry"),
    [
        ("reveal", RULES, Rule(lambda logps, entropies, level: 1, 0.5)),
        ("remasking", REMASKING, Order(lambda logps, entropies, uniform: logps)),
        ("kv_cache", CACHES, Cache(lambda *args, **options: None)),
    ],
)
def test_an_entry_from_outside_is_a_choice_of_its_flag(monkeypatch, flag, table, entry):
    with pytest.raises(SystemExit):
        parsed(f"--{flag} mine")
    monkeypatch.setitem(table, "mine", entry)
    assert getattr(parsed(f"--{flag} mine"), flag) == "mine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnFlags(SamplingFlags):
    gen_length: int | None = sampling_flag("gen_length", help="tokens, as told")
    kv_cache: str | None = None
    seed: int = 7


def test_a_command_leaves_flags_out_and_changes_others(capsys):
    parser = SettingsParser(OwnFlags)
    flags = parser.parse_args(["--steps", "3"])
    assert (flags.gen_length, flags.diffusion_steps, flags.kv_cache, flags.seed) == (None, 3, None, 7)
    assert parsed().gen_length is None  # the model's own, or 128
    assert "tokens, as told" in parser.format_help()
    for flag in ("--kv_cache", "--seed"):
        assert flag not in parser.format_help()
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "1"])


def test_every_setting_with_a_help_text_is_a_flag():
    """A flag has the range, the default and the choices of its setting; that of `steps` is --diffusion_steps."""
    settings = {"diffusion_steps" if one.name == "steps" else one.name: one for one in FIELDS if one.metadata}
    flags = {one.name: one for one in dataclasses.fields(SamplingFlags) if one.name != "seed"}
    assert list(flags) == list(settings)
    for name, one in settings.items():
        default = None if one.default is dataclasses.MISSING else one.default
        assert flags[name].default == default
        assert flags[name].metadata.get("choices") == one.metadata.get("choices")
        assert flags[name].metadata.get("type") == RANGES.get(one.name)


ALL = "--temperature 0.5 --cfg_scale 1 --sampler cached+parallel --kv_cache prefix --reveal factor --reveal_level 2"


@pytest.mark.parametrize(
    ("line", "config", "expected"),
    [
        ("", LlamaConfig(), (128, 32, 64)),
        ("", IN_BLOCKS, (128, 4, 64)),
        ("--gen_length 1", IN_BLOCKS, (1, 4, 1)),
        ("--gen_length 13 --block_length 5", LlamaConfig(), (13, 5, 6)),
        ("--diffusion_steps 128 --block_length 8", None, (128, 8, 128)),
        (ALL, None, (128, 32, 64, 0.5, 1.0, "low_confidence", "cached+parallel", "prefix", "factor", 2.0)),
    ],
)
def test_what_is_said_is_kept_and_steps_and_blocks_that_are_left_open_are_filled_in(line, config, expected):
    assert sampling_settings(parsed(line), config) == SamplingSettings(*expected)


@pytest.mark.parametrize(
    ("line", "config", "message"),
    [
        ("--block_length 8", IN_BLOCKS, "has blocks of 4 tokens, so block_length must be 4, not 8"),
        ("--sampler cached", BertConfig(), "bert is an encoder"),
    ],
)
def test_flags_that_make_no_sense_or_do_not_suit_the_model_are_refused(line, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampling_settings(parsed(line), config)


def test_settings_rules_and_caches_need_no_torch():
    names = ("settings", "reveal", "caches")
    code = f"import sys, {', '.join(f'd1.sampling.{name}' for name in names)}; "
    subprocess.run([sys.executable, "-c", code + "assert not {'torch', 'transformers'} & set(sys.modules)"], check=True)

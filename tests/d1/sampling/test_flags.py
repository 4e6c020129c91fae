"""The flags of the commands that sample: one table, and the settings made from it."""

import argparse
import dataclasses
import re
import subprocess
import sys

import pytest
from transformers import BertConfig, LlamaConfig

from d1.sampling import SamplingSettings
from d1.sampling.settings import FLAGS, add_model_flags, add_sampling_flags, sampling_settings

IN_BLOCKS = LlamaConfig(block_size=4)


def parsed(line: str = "", leave_out=(), **changes):
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, leave_out, **changes)
    return vars(parser.parse_args(line.split()))


def test_every_field_of_the_settings_has_its_flag_and_the_same_default():
    """Except for what only RL sets: the distribution apart from the temperature, and what is recorded."""
    fields = {field.name: field.default for field in dataclasses.fields(SamplingSettings)}
    assert [fields.pop(name) for name in ("top_k", "top_p", "record_as_sampled")] == [0, 1.0, False]
    assert [{"diffusion_steps": "steps"}.get(name, name) for name in FLAGS if name != "seed"] == [*fields]
    flags = parsed()
    assert {name: flags[name] for name in FLAGS if name in [*fields][3:]} == dict([*fields.items()][3:])


def test_a_command_leaves_flags_out_and_changes_others():
    flags = parsed("--steps 3", leave_out=("seed", "kv_cache"), gen_length={"default": None})
    assert list(flags) == [name for name in FLAGS if name not in ("seed", "kv_cache")]
    assert (flags["gen_length"], flags["diffusion_steps"]) == (None, 3)
    assert parsed()["gen_length"] == 128


def test_commands_share_the_flags_of_a_model():
    parser = argparse.ArgumentParser()
    add_model_flags(parser, checkpoint_path={"default": ""})
    flags = vars(parser.parse_args(["--model_name", "m", "--plain_chat_template"]))
    unset = {"dtype": None, "attn_implementation": None}
    assert flags == {"model_path": "m", "checkpoint_path": "", "plain_chat_template": True, **unset}


@pytest.mark.parametrize(
    ("line", "config", "lengths"),
    [
        ("", None, (128, 32, 64)),
        ("", LlamaConfig(), (128, 32, 64)),
        ("", IN_BLOCKS, (128, 4, 64)),
        ("--gen_length 1", IN_BLOCKS, (1, 4, 1)),
        ("--gen_length 13 --block_length 5", LlamaConfig(), (13, 5, 6)),
        ("--diffusion_steps 128 --block_length 8", None, (128, 8, 128)),
    ],
)
def test_steps_and_blocks_that_are_left_open_are_filled_in(line, config, lengths):
    assert sampling_settings(parsed(line), config) == SamplingSettings(*lengths)


def test_what_is_said_is_kept():
    line = "--temperature 0.5 --cfg_scale 1 --sampler cached+parallel --kv_cache prefix --reveal factor "
    chosen = SamplingSettings(128, 32, 64, 0.5, 1.0, "low_confidence", "cached+parallel", "prefix", "factor", 2.0)
    assert sampling_settings(parsed(line + "--reveal_level 2")) == chosen
    assert sampling_settings(parsed("--remasking random")).draws


@pytest.mark.parametrize(
    ("line", "config", "message"),
    [
        ("--block_length 8", IN_BLOCKS, "has blocks of 4 tokens, so block_length must be 4, not 8"),
        ("--sampler cached", BertConfig(), "bert is an encoder"),
        ("--diffusion_steps 3", None, "128 tokens in 4 blocks need between 4 and 128 steps, got 3"),
    ],
)
def test_what_makes_no_sense_or_does_not_go_with_the_model_is_refused(line, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampling_settings(parsed(line), config)


def test_the_flags_need_no_torch():
    code = "import d1.sampling.settings, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

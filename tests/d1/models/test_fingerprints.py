"""An adapter is compared with the model that it was trained on, by the record of its run.

The fingerprints themselves are tested in tests/d1/runs/test_record.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from d1.models import load_model
from d1.models.convert import merge
from d1.runs.record import hash_settings
from d1.sft import train as sft
from tests.conftest import save_tiny_model
from tests.faults import edit_json


@pytest.fixture(scope="module")
def run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an SFT run on the tiny model, with a checkpoint: do not write to it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "completion": "2"}) + "\n")
    flags = f"--model_name {tiny_model_dir} --train_data {folder / 'rows.jsonl'} --output_dir {folder} --job_name job"
    sizes = "--max_length 64 --test_split 0 --batch_size 1 --max_steps 1 --lora_r 2 --debugging"
    sft.main(sft.make_parser().parse_args([*flags.split(), *sizes.split()]))
    return folder / "job"


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "trained on another model" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("part", ["", "checkpoint-1"])
def test_another_base_of_the_same_shape_is_a_warning(run, tiny_model_dir, other_base, part, caplog, tmp_path):
    adapter = str(run / part)
    load_model(adapter)
    load_model(tiny_model_dir, adapter=adapter)
    load_model(shutil.copytree(tiny_model_dir, tmp_path / "copy"), adapter=adapter)
    merge(str(tiny_model_dir), [adapter], str(tmp_path / "merged"))
    assert warnings_of(caplog) == []
    load_model(other_base, adapter=adapter)
    (warning,) = warnings_of(caplog)
    assert f"The adapter {adapter} was trained on another model than {other_base}: " in warning
    assert "\n" not in warning
    recorded = json.loads((run / "run.json").read_text())["settings"]["contents of model_name"]["model"]
    found = hash_settings({"model_name": str(other_base)})["contents of model_name"]["model"]
    assert recorded != found
    assert f"is {recorded} in run.json, and here it is {found}." in warning
    merge(str(other_base), [adapter], str(tmp_path / "merged on another"))
    assert len(warnings_of(caplog)) == 1


def test_a_base_that_was_trained_on_since_is_a_warning(run, tiny_model_dir, caplog, tmp_path):
    """Its folder is the same, and its weights are not."""
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    adapter = shutil.copytree(run, tmp_path / "job")
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(base))
    load_model(adapter)
    assert warnings_of(caplog) == []
    save_tiny_model(base, seed=1)
    load_model(adapter)
    assert len(warnings_of(caplog)) == 1


def test_the_adapter_below_counts(run, tiny_model_dir, caplog, tmp_path):
    """RL after SFT is on the base with SFT's adapter: without it, or with another one, the weights differ."""
    first, second = shutil.copytree(run, tmp_path / "first"), tmp_path / "second"
    model: Any = get_peft_model(load_model(tiny_model_dir), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(str(second))
    edit_json(second / "adapter_config.json", base_model_name_or_path=str(first))
    settings = {"model_path": str(first)}
    (second / "run.json").write_text(json.dumps({"settings": settings | hash_settings(settings)}))
    load_model(second)
    assert warnings_of(caplog) == []
    load_model(tiny_model_dir, adapter=second)
    assert len(warnings_of(caplog)) == 1
    edit_json(first / "adapter_config.json", lora_alpha=1)
    load_model(second)
    (warning,) = warnings_of(caplog)
    assert f"The adapter {second} was trained on another model than {tiny_model_dir} with {first}: " in warning


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"settings": {}}', '{"settings": {"contents of model_name": 1}}'])
def test_an_adapter_without_a_readable_record_is_not_compared(run, other_base, record, caplog, tmp_path):
    adapter = shutil.copytree(run, tmp_path / "job")
    (adapter / "run.json").write_text(record)
    load_model(other_base, adapter=adapter)
    assert warnings_of(caplog) == []


def test_a_folder_with_the_name_of_the_hub_model_is_not_compared(run, other_base, caplog, tmp_path):
    """The record has a commit, which no file of a folder has."""
    adapter = shutil.copytree(run, tmp_path / "job")
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="some/base")
    load_model(shutil.copytree(other_base, tmp_path / "base"), adapter=adapter)
    assert warnings_of(caplog) == []
    load_model(other_base, adapter=adapter)
    assert len(warnings_of(caplog)) == 1

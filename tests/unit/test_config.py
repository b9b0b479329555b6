"""The schema: defaults compose, limits name their key, a saved config reads back."""

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mtptrain import config as schema
from mtptrain.cli import compose
from mtptrain.config import Config, EngineConfig
from mtptrain.config_io import config_yaml, load_config
from mtptrain.errors import UserError
from mtptrain.near import is_option, near_names, option_keys, unknown_keys


def test_no_overrides_give_the_dataclasses_defaults() -> None:
    assert compose(["head=mtp"]) == [Config()]


def test_every_section_has_slots_so_that_unknown_keys_fail() -> None:
    sections = [c for c in vars(schema).values() if dataclasses.is_dataclass(c)]
    assert len(sections) >= 15
    for section in sections:
        assert "__slots__" in vars(section), section.__name__


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("name=a/b", "must be a plain folder name"),
        ("head.label=../x", "must be a plain folder name"),
        ("threads=-1", "must be >= 0"),
        ("data.source=files", "needs at least one file"),
        ("data.max_length=100", "must exceed data.responses.max_new_tokens=256"),
        ("data.max_rejects=1.5", "must be in [0, 1]"),
        ("precompute.captures=[]", "name at least one capture"),
        ("precompute.captures=[final,final]", "names a capture twice"),
        ("precompute.captures=[before_1]", "is neither `final` nor `after_<layer>`"),
        ("train.loss.step_weights=[1.0]", "needs one weight for each of the 3 steps"),
        ("train.optim.lr=0", "must be in (0, 10]"),
        ("train.optim.lr=1e38", "must be in (0, 10]"),
        ("train.optim.eps=-1", "must be in (0, 1)"),
        ("head.init_std=-1", "must be in (0, 10]"),
        ("head.sliding_window=-4", "must be >= 0"),
        ("train.ema=1", "must be in [0, 1)"),
        ("validate.k=0", "must be in 1..16"),
        ("export.engines=[]", "name at least one engine"),
    ],
)
def test_a_refused_value_names_its_key(override: str, limit: str) -> None:
    with pytest.raises(UserError) as error:
        compose([override])
    message = str(error.value)
    assert limit in message
    assert "\n" not in message
    assert message.split("=")[0] in {override.split("=")[0], "data.train", "precompute.captures"}


def test_a_saved_config_reads_back(tmp_path: Path) -> None:
    (cfg,) = compose(["+recipe=llama70b", "train.loss.step_weights=[0.5,0.3,0.2]", "head.sliding_window=0"])
    (tmp_path / "config.yaml").write_text(config_yaml(cfg), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == cfg


def test_option_keys_are_those_of_the_composed_config() -> None:
    def keys(node: object, prefix: str = "") -> list[str]:
        if not isinstance(node, dict):
            return []
        return [k for name, child in node.items() for k in [f"{prefix}{name}", *keys(child, f"{prefix}{name}.")]]

    plain = OmegaConf.to_container(OmegaConf.structured(Config()))
    assert sorted(option_keys()) == sorted(keys(plain))
    assert is_option("train.optim.lr")
    assert is_option("target.shape.hidden_size")
    assert not is_option("train.lr")


def test_unknown_keys_are_found_at_any_depth() -> None:
    found = unknown_keys({"train": {"optim": {"lr": 1, "lrr": 2}, "step": 3}, "nme": 4, "target": {"shape": {"anything": 5}}})
    assert list(found) == ["train.optim.lrr", "train.step", "nme"]


def test_near_names_are_few_and_nearest_first() -> None:
    assert near_names("smolm2", ["tiny", "smollm2", "llama8b"]) == ["smollm2"]
    assert near_names("train.lrr", list(option_keys()))[0] == "train.optim.lr"
    assert near_names("step", ["steps", "step_decay", "stop", "setup", "other"])[0] == "steps"
    assert near_names("zzz", ["tiny", "smollm2"]) == []
    assert len(near_names("aaaa", [f"aaa{i}" for i in range(9)])) == 3


def test_engine_options_may_not_hold_what_mtptrain_sets() -> None:
    EngineConfig(options={"gpu_memory_utilization": 0.5})
    with pytest.raises(UserError, match=r"engine\.options\.dtype=bfloat16: mtptrain sets it itself; use target\.dtype"):
        EngineConfig(options={"dtype": "bfloat16"})

"""The resolved config as text, saved beside every artefact; needs omegaconf only, not Hydra."""

from pathlib import Path

from omegaconf import OmegaConf

from mtptrain.config import Config


def config_yaml(cfg: Config) -> str:
    """The whole config, defaults included, as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def load_config(path: Path) -> Config:
    """A config saved with `config_yaml`."""
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))
    assert isinstance(loaded, Config)
    return loaded

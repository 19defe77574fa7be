"""Where configs lie: conf/ read with the command line's scalars, and experiments/ as a second root."""

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra_plugins.trainwright_launcher._yaml import OverrideLikeLoader
from omegaconf import OmegaConf
from yaml import YAMLError, load

from trainwright.places import CONF, EXPERIMENTS


class TrainwrightConfigSource(FileConfigSource):
    """Files in which a value means what it means on the command line: `hydra.searchpath=[trainwright:///team/conf]`."""

    @staticmethod
    def scheme() -> str:
        return "trainwright"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        try:
            text = path.read_text(encoding="utf-8")
            config = OmegaConf.create(load(text, Loader=OverrideLikeLoader) or {})
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigLoadError(f"{path}: cannot be read: {error}") from error
        except YAMLError as error:
            raise ConfigLoadError(f"{path}: not readable as YAML: {error}") from error
        header = ConfigSource._get_header_dict(text[:512])
        return ConfigResult(provider=self.provider, path=f"{self.scheme()}://{self.path}", config=config, header=header)


class TrainwrightSearchPath(SearchPathPlugin):
    """Adds experiments/ to the search path. Other Hydra applications on the same machine are left alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.provider == "main" and element.path in (str(CONF), f"file://{CONF}"):
                from trainwright.config import (
                    register_resolvers,  # every Hydra application pays for this module's imports
                )

                register_resolvers()
                element.path = f"{TrainwrightConfigSource.scheme()}://{CONF}"
                search_path.append("trainwright", f"{TrainwrightConfigSource.scheme()}://{EXPERIMENTS}")

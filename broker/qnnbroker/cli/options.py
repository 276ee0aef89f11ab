# SPDX-License-Identifier: Apache-2.0
"""The broker's options and where their values come from: default, file, environment, flag.

Every field of BrokerConfig is an option; nothing is listed here by name.
"""

import dataclasses
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qnnbroker.broker.config import BrokerConfig
from qnnbroker.protos.errors import InvalidRequest

from .problems import WrongUsage

CONFIG_FILE_ENV = "QNNBROKER_CONFIG"
_PREFIX = "QNNBROKER_"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d+) ?(KiB|MiB|GiB)?")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the broker.

    `kind` is the type of its value: str, int, float, bool or a tuple of ints.
    """

    name: str
    kind: Any
    default: Any
    help: str
    unit: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()

    @property
    def length(self) -> int:
        """How many numbers a tuple has; 0 for one value."""
        return len(typing.get_args(self.kind))

    @property
    def wanted(self) -> str:
        """The kind of value, for messages."""
        if self.length:
            return f"{self.length} whole numbers"
        if self.kind is int and self.unit == "bytes":
            return "a number of bytes (KiB, MiB and GiB may follow)"
        return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[
            self.kind
        ]

    def from_toml(self, value: Any, where: str) -> Any:
        """A value of the configuration file.

        Raises:
            WrongUsage: another type.
        """
        if self.length:
            if isinstance(value, list) and len(value) == self.length:
                if all(type(v) is int for v in value):
                    return tuple(value)
        elif self.kind is float:
            if type(value) in (int, float):
                return float(value)
        elif type(value) is self.kind:
            return value
        elif self.unit == "bytes" and isinstance(value, str):
            return self.from_text(value, where)
        raise self._wrong(value, where)

    def from_text(self, text: str, where: str) -> Any:
        """A value of a flag or of the environment.

        Raises:
            WrongUsage: it does not read as this option's kind.
        """
        value: Any = text
        try:
            if self.length:
                value = [int(part) for part in text.split(",")]
                if len(value) != self.length:
                    raise ValueError
            elif self.kind is int and self.unit == "bytes":
                match = _SIZE.fullmatch(text.strip())
                value = int(match[1]) * _UNITS[match[2] or ""] if match else text
            elif self.kind in (int, float):
                value = self.kind(text)
            elif self.kind is bool:
                value = _TRUTH[text.strip().lower()]
        except (ValueError, KeyError):
            raise self._wrong(text, where) from None
        if type(value) is str and self.kind is not str:
            raise self._wrong(text, where)
        return self.from_toml(value, where)

    def _wrong(self, value: Any, where: str) -> WrongUsage:
        return WrongUsage(
            f"{where}: {self.name} wants {self.wanted}, found {value!r}", reason="CONFIG"
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of an option, and its source: default, file, environment or flag."""

    option: Option
    value: Any
    source: str
    place: str = ""


def all_options() -> dict[str, Option]:
    """Every option of the broker by name, in BrokerConfig's order."""
    hints = typing.get_type_hints(BrokerConfig)
    options = {}
    for field in dataclasses.fields(BrokerConfig):
        kind = hints[field.name]
        if isinstance(kind, types.GenericAlias):
            assert typing.get_origin(kind) is tuple, field.name
            assert set(typing.get_args(kind)) == {int}, field.name
        else:
            assert kind in (str, int, float, bool), field.name
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        options[field.name] = Option(
            field.name, kind, default, field.metadata["help"], field.metadata["unit"]
        )
    return options


def config_path(named: str | None) -> tuple[Path, bool]:
    """Where the configuration file is, and whether it was named (then it has to be there)."""
    if named or (named := os.environ.get(CONFIG_FILE_ENV)):
        return Path(named).absolute(), True
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification wants a relative one ignored.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.config"))
    return root / "qnnbroker" / "config.toml", False


def read_config_file(named: str | None) -> tuple[Path | None, dict[str, Any]]:
    """The file's path and its values; (None, {}) when there is none at the usual place.

    Raises:
        WrongUsage: a named file is missing; not TOML; an unknown option; a value of another type.
    """
    path, must_exist = config_path(named)
    where = f"config file {str(path)!r}"
    try:
        if not path.is_file() and (path.exists() or must_exist):
            found = "something else" if path.exists() else "nothing"
            raise WrongUsage(f"{where}: a file wanted, found {found} there", reason="CONFIG")
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        return None, {}
    except OSError as error:
        raise WrongUsage(f"{where}: cannot be read: {error.strerror}", reason="CONFIG") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongUsage(f"{where}: not TOML: {error}", reason="CONFIG") from error
    options = all_options()
    values = {}
    for key, value in content.items():
        if key not in options:
            raise WrongUsage(
                f"{where}: no option is called {key!r}; there are {', '.join(options)}",
                reason="CONFIG",
            )
        values[key] = options[key].from_toml(value, where)
    return path, values


def effective(
    config_file: str | None, flags: Mapping[str, str | None]
) -> tuple[Path | None, dict[str, Setting]]:
    """Every option with its value and source, and the path of the file that was read.

    Args:
        config_file: as `--config` named it.
        flags: texts by option name; None where the flag was not given.

    Raises:
        WrongUsage: a value that does not fit its option, with the place it came from.
    """
    path, from_file = read_config_file(config_file)
    settings = {}
    for name, option in all_options().items():
        text, variable = flags.get(name), os.environ.get(option.variable)
        if text is not None:
            value = option.from_text(text, f"flag {option.flag}")
            settings[name] = Setting(option, value, "flag", option.flag)
        elif variable:
            value = option.from_text(variable, f"environment variable {option.variable}")
            settings[name] = Setting(option, value, "environment", option.variable)
        elif name in from_file:
            settings[name] = Setting(option, from_file[name], "file", str(path))
        else:
            settings[name] = Setting(option, option.default, "default")
    return path, settings


def broker_config(settings: Mapping[str, Setting]) -> BrokerConfig:
    """The BrokerConfig of these settings.

    Raises:
        WrongUsage: a value out of range.
    """
    values = {name: setting.value for name, setting in settings.items()}
    for name, value in values.items():
        if name.endswith("_dir") and value:  # the broker changes its directory
            values[name] = os.path.abspath(value)
    try:
        return BrokerConfig(**values)
    except InvalidRequest as error:
        raise WrongUsage(str(error), reason="CONFIG") from error

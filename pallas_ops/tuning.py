"""Which tuning config a kernel runs with.

In order: the call's `config=`, the context `use`, the user's cache (`python -m pallas_ops.tune`),
the table shipped for the device, the kernel's heuristic. An entry of cache or table that does not
fit a call is passed over; a config that the user gave and that does not fit raises.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import json
import logging
import os
import pathlib
import re
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import platformdirs

from pallas_ops._version import __version__

logger = logging.getLogger("pallas_ops")

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Tunable:
    """What can be tuned in an implementation, by functions of `(*avals, **params)` of a call.

    `config_type` is a frozen dataclass of ints, bools, strings and None. Calls of equal `key`, a
    dict that JSON can hold, share a config. `candidates` are those worth trying; `heuristic`, which
    takes the kind of device first (None: unknown), gives one that fits.
    """

    config_type: type
    key: Callable[..., dict[str, Any]]
    candidates: Callable[..., Iterable[Any]]
    heuristic: Callable[..., Any]


class Configs(NamedTuple):
    """Configs that the user gave; `exclusive` ones rule out implementations that take none."""

    items: tuple[Any, ...]
    exclusive: bool

    def of_type(self, config_type: type) -> Any | None:
        return next((c for c in self.items if type(c) is config_type), None)


# Part of the keys of JAX's compilation caches.
_override = jax.make_user_context(None)
_CONFIG_TYPES: dict[tuple[str, str], type] = {}


def register(operation: str, implementation: str, config_type: type) -> None:
    """Makes a type of configs known to `use` and to what reads the cache."""
    _CONFIG_TYPES[operation, implementation] = config_type


def name_of(config_type: type) -> str:
    """A type's name with its module: kernels call theirs alike."""
    return f"{config_type.__module__}.{config_type.__qualname__}".removeprefix("builtins.")


def check_fields(config: Any) -> None:
    """Raises a TypeError where a config's field is not of its annotated type; True is no int."""
    for name, types in _field_types(type(config)).items():
        value = getattr(config, name)
        if type(value) not in types:
            expected = " or ".join(t.__name__.replace("NoneType", "None") for t in types)
            raise TypeError(f"{name} must be of type {expected}, got {value!r}")


@functools.cache
def _field_types(config_type: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(config_type)
    names = [field.name for field in dataclasses.fields(config_type)]
    return {name: typing.get_args(hints[name]) or (hints[name],) for name in names}


def _check_given(configs: tuple[Any, ...]) -> None:
    types = [type(c) for c in configs]
    if len(set(types)) < len(types):
        raise ValueError(f"configs must be of different types, got {configs}")
    for config in configs:
        if type(config) in _CONFIG_TYPES.values():
            check_fields(config)


@contextlib.contextmanager
def use(*configs: Any) -> Iterator[None]:
    """A context in which kernels run with the given configs, whatever tables and caches say.

    Each applies to every call within the context that is served by a kernel of its kind, gradients
    included; other implementations are chosen as without it. A call's own `config=` comes first,
    then the innermost context.

    Args:
      *configs: at most one of a type.

    Raises:
      TypeError: a value is no config of any kernel, or a config's field is of the wrong type.
      ValueError: two configs of one type; later, at a call: a config does not fit it.
    """
    for config in configs:
        if type(config) not in _CONFIG_TYPES.values():
            known = ", ".join(sorted(set(map(name_of, _CONFIG_TYPES.values()))))
            raise TypeError(
                f"configs must be of a kernel's config type, one of {known}; got {config!r}"
            )
    _check_given(configs)
    types = [type(c) for c in configs]
    outer = tuple(c for c in _override.value or () if type(c) not in types)
    with _override((*configs, *outer)):
        yield


def requested(config: Any) -> Configs | None:
    """The configs of a call with `config=config`: one, a sequence, or those of the context."""
    if config is not None:
        items = tuple(config) if isinstance(config, list | tuple) else (config,)
        if not items:
            raise ValueError(f"config must be None, a config or several, got {config}")
        _check_given(items)
        return Configs(items, exclusive=True)
    return Configs(_override.value, exclusive=False) if _override.value else None


class Call(NamedTuple):
    """A primitive as it runs on one device: what a config is looked up for."""

    operation: str
    implementation: str
    avals: tuple[Any, ...]
    params: tuple[tuple[str, Any], ...]


_collected: dict[Call, str | None] | None = None


@contextlib.contextmanager
def collect() -> Iterator[dict[Call, str | None]]:
    """Collects the calls of programs that are lowered, each with why no config is looked up."""
    global _collected
    outer, _collected = _collected, {}
    try:
        yield _collected
    finally:
        _collected = outer


def collected(call: Call, no_lookup: str | None) -> None:
    """Tells `collect` of a call, and why no config is looked up for it; None: one is."""
    if _collected is not None and _collected.setdefault(call, no_lookup) is not None:
        _collected[call] = no_lookup


def lookup(
    call: Call, tunable: Tunable, refuse: Callable[..., str | None], device_kind: str | None
) -> Any:
    """The config of a call for which the user gave none."""
    collected(call, None)
    params = dict(call.params)
    config, source = None, "heuristic"
    if device_kind is not None:
        key = tunable.key(*call.avals, **params)
        for name, find in (("cache", _from_cache), ("table", _from_table)):
            found = find(device_kind, call, key)
            config = None if found is None else _fitting(found, name, call, tunable, refuse)
            if config is not None:
                source = name
                break
    if config is None:
        config = tunable.heuristic(device_kind, *call.avals, **params)
    logger.debug("%s, %s: %s from the %s", call.operation, call.implementation, config, source)
    return config


def _fitting(found: dict[str, Any], source: str, call: Call, tunable: Tunable, refuse):
    config = None
    try:
        config = _made(tunable.config_type, found)
        reason = refuse(*call.avals, config=config, **dict(call.params))
    except Exception as error:  # no call fails of what is stored
        reason = str(error)
    if reason is not None:
        logger.warning(
            "%s, %s: the %s's config %s is passed over: %s",
            call.operation,
            call.implementation,
            source,
            found,
            reason,
        )
        return None
    return config


def _made(config_type: type, fields: dict[str, Any]) -> Any:
    config = config_type(**fields)
    check_fields(config)
    return config


# The table that is shipped: per device kind a file with a list of entries.


def _from_table(device_kind: str, call: Call, key: dict[str, Any]) -> dict[str, Any] | None:
    entries = shipped_table(device_kind)
    return entries.get((call.operation, call.implementation, _canonical(key)))


@functools.cache
def shipped_table(device_kind: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Configs by operation, implementation and key."""
    file = importlib.resources.files("pallas_ops") / "tables" / f"{_slug(device_kind)}.json"
    if not file.is_file():
        return {}
    return {
        (e["operation"], e["implementation"], _canonical(e["key"])): e["config"]
        for e in json.loads(file.read_text())["entries"]
    }


def read_table(path: pathlib.Path, device_kind: str) -> list[dict[str, Any]]:
    """The entries of a table that is to be added to, none where there is no file yet.

    Raises:
      ValueError: the file is no table, or one of another kind of device.
      OSError: it can't be read or written.
    """
    if not path.exists():
        if problem := _problem_writing_in(path.parent):
            raise OSError(f"{path} can't be written: {problem}")
        return []
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        table = json.loads(path.read_text())
        device, entries = table["device"], table["entries"]
        for e in entries:
            _made(_CONFIG_TYPES[e["operation"], e["implementation"]], e["config"])
            _canonical(e["key"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} is no table of configs: {error!r}") from error
    if device != device_kind:
        raise ValueError(f"{path} is a table for {device!r}, not for {device_kind!r}")
    path.open("a").close()
    return entries


def write_table(path: pathlib.Path, device_kind: str, entries: list[dict[str, Any]]) -> None:
    """Writes a table; of several entries for one key the last is kept."""
    by_name = {(e["operation"], e["implementation"], _canonical(e["key"])): e for e in entries}
    lines = ",\n".join(json.dumps(by_name[name]) for name in sorted(by_name))
    path.write_text(f'{{"device": {json.dumps(device_kind)}, "entries": [\n{lines}\n]}}\n')


# The user's cache: a file for each entry, so that writers need no lock.


def cache_directory() -> pathlib.Path | None:
    """Where this user's tuning results lie, or None where PALLAS_OPS_CACHE_DIR is empty.

    One folder for each version of this library and of JAX, under $PALLAS_OPS_CACHE_DIR or else the
    user's cache directory.
    """
    root = os.environ.get("PALLAS_OPS_CACHE_DIR")
    if root == "":
        return None
    base = pathlib.Path(root) if root else platformdirs.user_cache_path("pallas-ops")
    return base / "tuning" / f"{__version__}-jax-{jax.__version__}"


def cache_problem() -> str | None:
    """Why nothing can be written to the user's cache, found out without leaving anything there."""
    folder = cache_directory()
    if folder is None:
        return None
    there = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    problem = _problem_writing_in(there)
    return problem and f"the tuning cache {folder} can't be written: {problem}"


def _problem_writing_in(folder: pathlib.Path) -> str | None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def store(device_kind: str, call: Call, key: dict[str, Any], config: Any, **facts: Any):
    """Writes a config to the user's cache, whole or not at all; returns the file's path."""
    path = _cache_file(device_kind, call, key)
    if path is None:
        raise ValueError("PALLAS_OPS_CACHE_DIR is empty: there is no cache to write to")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        _entry(device_kind, call, key) | {"config": dataclasses.asdict(config)} | facts
    )
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def damaged() -> list[tuple[pathlib.Path, str]]:
    """Files of the user's cache that can't be used, and why."""
    root = cache_directory()
    paths = sorted(root.rglob("*.json")) if root else []
    found = [(path, _read(path)) for path in paths]
    return [(path, entry) for path, entry in found if isinstance(entry, str)]


def _from_cache(device_kind: str, call: Call, key: dict[str, Any]) -> dict[str, Any] | None:
    path = _cache_file(device_kind, call, key)
    if path is None or not os.path.exists(path):
        return None
    entry = _read(path)
    if isinstance(entry, str):
        _warn_once(path, entry)
        return None
    return entry["config"]


@functools.cache
def _warn_once(path: pathlib.Path, reason: str) -> None:
    logger.warning("tuning cache: %s is ignored: %s", path, reason)


def _read(path: pathlib.Path) -> dict[str, Any] | str:
    """An entry of the cache, or why it can't be used."""
    try:
        entry = json.loads(path.read_text())
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            return "it holds no config"
        if entry.get("format") != _FORMAT:
            return f"its format is {entry.get('format')!r}, not {_FORMAT}"
        name = str(entry.get("operation")), str(entry.get("implementation"))
        call = Call(name[0], name[1], (), ())
        if path != _cache_file(str(entry.get("device")), call, entry.get("key", {})):
            return "it holds another entry than its name says"
        if name not in _CONFIG_TYPES:
            return f"no config is known for {call.operation} by {call.implementation}"
        _made(_CONFIG_TYPES[name], entry["config"])
    except Exception as error:  # whatever a file holds, no call fails of it
        return f"it can't be used: {error}"
    return entry


def _entry(device_kind: str, call: Call, key: dict[str, Any]) -> dict[str, Any]:
    return dict(
        format=_FORMAT,
        device=device_kind,
        operation=call.operation,
        implementation=call.implementation,
        key=key,
    )


def _cache_file(device_kind: str, call: Call, key: dict[str, Any]) -> pathlib.Path | None:
    root = cache_directory()
    if root is None:
        return None
    digest = hashlib.sha256(_canonical(key).encode()).hexdigest()[:16]
    return root / _slug(device_kind) / f"{call.operation}-{call.implementation}-{digest}.json"


def _canonical(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _slug(device_kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")


def rounded(size: Any) -> Any:
    """A size up to the next power of two, 0 as it is; a symbolic one as text. For keys."""
    if not isinstance(size, int):
        return str(size)
    return 1 << (size - 1).bit_length() if size > 0 else 0

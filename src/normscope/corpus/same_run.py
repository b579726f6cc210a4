"""Whether a run continues an earlier one: what changed, by name, and what may change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from normscope.errors import NormscopeError

DIGESTS = ("fingerprint", "tokenizer", "structure", "config")  # explained by another name, precision or revision
LONG = 60  # characters of a value that are shown


def continued_manifest(
    old: Mapping[str, Any], new: Mapping[str, Any], earlier_digest: str, allow_versions: bool
) -> dict[str, Any]:
    """The manifest of a run that continues `old` with the options of `new`. Raises an error that names what changed.

    The place of the data and of the model, the memory budget and the format of the data may change if the entries and
    the model are the same; `limit` may be raised. `earlier_digest` is the digest of as many new entries as `old` has.
    """
    now = json.loads(json.dumps(new))  # as it is read back: lists, not tuples
    changed = [
        *_model_changes(old["model"], now["model"]),
        *_data_changes(old["data"], now["data"], earlier_digest),
        *_changes("options", old["options"], now["options"]),
        *_changes("code", old["code"], now["code"]),
    ]
    versions = list(_version_changes(old["versions"], now["versions"], allow_versions))
    if changed or versions:
        raise NormscopeError(_refusal(changed, versions))
    found = {**old, "memory": now["memory"]}
    if now["data"]["entries"] != old["data"]["entries"]:
        found["data"] = now["data"]
    if now["versions"] != old["versions"] and now["versions"] not in old.get("other_versions", []):
        found["other_versions"] = [*old.get("other_versions", []), now["versions"]]
    return found


def _refusal(changed: list[str], versions: list[str]) -> str:
    if not changed:
        return (
            "The folder contains a run made with other versions: "
            + "; ".join(versions)
            + ". Install the same versions, choose another folder, or, for a patch release, pass allow_versions=True."
        )
    return (
        "The folder contains a run with a different model, data or options: "
        + "; ".join([*changed, *versions])
        + ". Choose another folder, or use the same settings."
    )


def _model_changes(old: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    keys = [key for key in sorted({*old, *now}) if old.get(key) != now.get(key)]
    if set(keys) <= {"name"}:  # the same model from another place
        return []
    named = [key for key in keys if key not in DIGESTS]
    if named:
        return [_change(f"model.{key}", old.get(key), now.get(key)) for key in named]
    found = []
    for key in keys:
        if key == "config":
            found += _changes("model.config", old[key], now[key])
        else:
            found.append(_change(f"model.{key}", old.get(key), now.get(key)))
    return found


def _data_changes(old: Mapping[str, Any], now: Mapping[str, Any], earlier_digest: str) -> list[str]:
    """What differs in the data, if its entries do. A run whose limit was reached may get a higher limit."""
    limit = now["limit"]
    reached = old["limit"] is not None and old["entries"] == old["limit"]
    raised = reached and (limit is None or limit > old["limit"])
    if now["entries"] == old["entries"] and now["fingerprint"] == old["fingerprint"]:
        return []
    if raised and now["entries"] > old["entries"] and earlier_digest == old["fingerprint"]:
        return []
    found = _changes("data", {**old, "files": {}}, {**now, "files": {}})
    for name in sorted({*old["files"], *now["files"]}):
        was, is_ = old["files"].get(name), now["files"].get(name)
        if was != is_:
            found.append(f"the file {name} {'changed' if was and is_ else 'is new' if is_ else 'is no longer read'}")
    return found


def _version_changes(old: Mapping[str, str], now: Mapping[str, str], patches: bool) -> Iterator[str]:
    for name in sorted({*old, *now}):
        was, is_ = public_version(old.get(name, "")), public_version(now.get(name, ""))
        if was != is_ and not (patches and was.split(".")[:2] == is_.split(".")[:2]):
            yield _change(f"versions.{name}", was, is_)


def public_version(version: str) -> str:
    """A version without the build, such as +cpu: the device may change."""
    return version.partition("+")[0]


def _changes(part: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    keys = sorted({*old, *now})
    return [_change(f"{part}.{key}", old.get(key), now.get(key)) for key in keys if old.get(key) != now.get(key)]


def _change(name: str, was: Any, is_: Any) -> str:
    return f"{name}: was {_shortened(was)}, is {_shortened(is_)}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."

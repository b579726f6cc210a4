"""Maps as tables: pandas and polars DataFrames in long format, xarray Datasets with named dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    import pandas
    import polars
    import xarray

    from normscope.analysis import Analysis


def to_pandas(sides: Mapping[str, Analysis]) -> pandas.DataFrame:
    """A long table of all maps, one row for each cell."""
    frame: pandas.DataFrame = _package("pandas").DataFrame(_cells(sides))
    return frame


def to_polars(sides: Mapping[str, Analysis]) -> polars.DataFrame:
    """A long table of all maps, one row for each cell."""
    frame: polars.DataFrame = _package("polars").DataFrame(_cells(sides))
    return frame


def to_xarray(analysis: Analysis) -> xarray.Dataset:
    """One variable (layer, output, input) for each scope."""
    package = _package("xarray")
    coordinates: dict[str, Any] = {"layer": list(analysis.layers)}
    for name, labels in (("output", analysis.rows), ("input", analysis.columns)):
        coordinates[name] = [label.position for label in labels]
        coordinates[f"{name}_token"] = (name, [label.token for label in labels])
        coordinates[f"{name}_side"] = (name, [label.side for label in labels])
    variables = {scope: (("layer", "output", "input"), _array(analysis, scope)) for scope in analysis.scopes}
    # netCDF files have no truth values.
    attributes = {key: int(value) if isinstance(value, bool) else value for key, value in analysis.info.items()}
    made: xarray.Dataset = package.Dataset(variables, coordinates, attrs=attributes)
    return made


def _cells(sides: Mapping[str, Analysis]) -> dict[str, NDArray[Any]]:
    """The columns of the long table, the sides one after the other."""
    tables = [_side(analysis) for analysis in sides.values()]
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _side(analysis: Analysis) -> dict[str, NDArray[Any]]:
    shape = (len(analysis.scopes), len(analysis.layers), len(analysis.rows), len(analysis.columns))

    def along(axis: int, values: list[Any], kind: type) -> NDArray[Any]:
        """What is known by scope, layer, row or column, for every cell."""
        line: NDArray[Any] = np.array(values, dtype=kind).reshape([-1 if n == axis else 1 for n in range(4)])
        return np.broadcast_to(line, shape).ravel()

    rows, columns = analysis.rows, analysis.columns
    return {
        "scope": along(0, list(analysis.scopes), object),
        "layer": along(1, list(analysis.layers), np.int64),
        "output": along(2, [label.position for label in rows], np.int64),
        "input": along(3, [label.position for label in columns], np.int64),
        "output_token": along(2, [label.token for label in rows], object),
        "input_token": along(3, [label.token for label in columns], object),
        "output_side": along(2, [label.side for label in rows], object),
        "input_side": along(3, [label.side for label in columns], object),
        "value": np.concatenate([_array(analysis, scope).ravel() for scope in analysis.scopes]),
    }


def _array(analysis: Analysis, scope: str) -> NDArray[Any]:
    array: NDArray[Any] = analysis[scope].detach().cpu().numpy()
    return array


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise NormscopeError(
            f"to_{name}() needs {name}, which is not installed. Install it with: pip install 'normscope[frames]'"
        ) from error

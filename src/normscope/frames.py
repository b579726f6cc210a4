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
    """A long table of all maps, one row per cell."""
    frame: pandas.DataFrame = _import_frame_package("pandas").DataFrame(_long_frame_columns(sides))
    return frame


def to_polars(sides: Mapping[str, Analysis]) -> polars.DataFrame:
    """A long table of all maps, one row per cell."""
    frame: polars.DataFrame = _import_frame_package("polars").DataFrame(_long_frame_columns(sides))
    return frame


def frame_of(package: str, columns: Mapping[str, Any]) -> Any:
    """A DataFrame of pandas or polars from named columns."""
    return _import_frame_package(package).DataFrame(columns)


def to_xarray(analysis: Analysis) -> xarray.Dataset:
    """One variable (layer, output, input) per scope."""
    package = _import_frame_package("xarray")
    coordinates: dict[str, Any] = {"layer": list(analysis.layers)}
    for name, labels in (("output", analysis.rows), ("input", analysis.columns)):
        coordinates[name] = [label.position for label in labels]
        coordinates[f"{name}_token"] = (name, [label.token for label in labels])
        coordinates[f"{name}_side"] = (name, [label.side for label in labels])
    variables = {scope: (("layer", "output", "input"), _frame_map_array(analysis, scope)) for scope in analysis.scopes}
    # netCDF has no booleans.
    attributes = {key: int(value) if isinstance(value, bool) else value for key, value in analysis.info.items()}
    made: xarray.Dataset = package.Dataset(variables, coordinates, attrs=attributes)
    return made


def _long_frame_columns(sides: Mapping[str, Analysis]) -> dict[str, NDArray[Any]]:
    """The columns of the long table, with the sides concatenated."""
    tables = [_frame_columns_of_side(analysis) for analysis in sides.values()]
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _frame_columns_of_side(analysis: Analysis) -> dict[str, NDArray[Any]]:
    shape = (len(analysis.scopes), len(analysis.layers), len(analysis.rows), len(analysis.columns))

    def along(axis: int, values: list[Any], kind: type) -> NDArray[Any]:
        """Values along one axis, repeated for every cell."""
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
        "value": np.concatenate([_frame_map_array(analysis, scope).ravel() for scope in analysis.scopes]),
    }


def _frame_map_array(analysis: Analysis, scope: str) -> NDArray[Any]:
    array: NDArray[Any] = analysis[scope].detach().cpu().numpy()
    return array


def _import_frame_package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise NormscopeError(
            f"to_{name}() needs {name}, which is not installed. Install it with: pip install 'normscope[frames]'"
        ) from error

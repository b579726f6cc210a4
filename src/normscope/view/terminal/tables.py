"""Tables of an analysis in the terminal: mixing ratios, the first token's share, and a summary."""

from __future__ import annotations

import math

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from normscope.analysis import Analysis
from normscope.labels import number_ranges_label, shorten_label, visible_label_text
from normscope.view.scales import worst_completeness
from normscope.view.terminal.cells import LABEL, borderless_terminal_cells
from normscope.view.tokens import model_label

SUMMARY_TOKENS = 40  # tokens listed in the summary


def terminal_mixing_table(analysis: Analysis) -> RenderableType:
    """Layers x scopes: the mixing ratio in percent, averaged over the output tokens."""
    if not analysis.mixing_scopes:
        return Text("Cross-attention reads only encoder tokens, so it has no mixing ratio.", style="dim")
    table = borderless_terminal_cells()
    table.add_column("layer\n(from 1)", justify="right", style="dim")
    for scope in analysis.mixing_scopes:
        table.add_column(Text(_table_scope_name(scope), justify="right"), justify="right", min_width=5)
    means = [analysis.mixing_ratio(scope).double().mean(-1).tolist() for scope in analysis.mixing_scopes]
    for layer, shares in zip(analysis.layers, zip(*means, strict=True), strict=True):
        table.add_row(str(layer + 1), *(f"{100 * share:.1f}" if math.isfinite(share) else "-" for share in shares))
    title = Text.assemble(("Mixing ratio", "bold"), ": share of other tokens in an output, mean over outputs, in %")
    return Group(title, table)


def is_causal(analysis: Analysis) -> bool:
    """True if all columns are decoder tokens, as in a causal language model."""
    return all(label.side == "decoder" for label in analysis.columns)


def terminal_first_token_table(analysis: Analysis) -> Group:
    """Layers x scopes: the first token's mean share in the other outputs, by weight and by norm, in percent."""
    wanted = [analysis.aliases.get(alias) for alias in ("weights", "attention", "layer")]
    scopes = [scope for scope in analysis.scopes if scope in wanted] or list(analysis.scopes)
    others = [i for i, label in enumerate(analysis.rows) if label != analysis.columns[0]]
    table = borderless_terminal_cells()
    table.add_column("layer\n(from 1)", justify="right", style="dim")
    for scope in scopes:
        table.add_column(Text(_table_scope_name(scope), justify="right"), justify="right", min_width=5)
    means = [analysis.first_token_share(scope)[:, others].double().mean(-1).tolist() for scope in scopes]
    for layer, shares in zip(analysis.layers, zip(*means, strict=True), strict=True):
        table.add_row(str(layer + 1), *(f"{100 * share:.1f}" if math.isfinite(share) else "-" for share in shares))
    name = shorten_label(visible_label_text(analysis.columns[0].token), LABEL)
    title = Text.assemble(("First token", "bold"), f" {name}: its share in the other outputs by weight or norm, in %")
    return Group(title, table)


def terminal_layer_tables(analysis: Analysis) -> RenderableType:
    """The mixing ratios, and for causal models the first token's share, side by side if there is room."""
    mixing = terminal_mixing_table(analysis)
    if not is_causal(analysis):
        return mixing
    return Columns([mixing, terminal_first_token_table(analysis)], padding=(1, 4))


def terminal_summary_table(analysis: Analysis) -> Table:
    """The model, tokens, layers and scopes of an analysis, and its worst completeness error."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    family = analysis.info.get("family")
    table.add_row("model", Text(model_label(analysis) + (f" ({family})" if family else "")))
    shown = " ".join(shorten_label(visible_label_text(token), 24) for token in analysis.tokens[:SUMMARY_TOKENS])
    table.add_row("tokens", Text(f"{len(analysis.rows)}: {shown}" + " …" * (len(analysis.rows) > SUMMARY_TOKENS)))
    table.add_row("layers", Text(f"{number_ranges_label(layer + 1 for layer in analysis.layers)} (counted from 1)"))
    table.add_row("scopes", Text(" ".join(analysis.scopes)))
    error, scope, layer = worst_completeness(analysis)
    table.add_row("completeness", Text(f"worst error {error:.1e} ({scope}, layer {layer + 1})"))
    return table


def _table_scope_name(scope: str) -> str:
    """A scope name with one component per line: `ATTN`, `RES`, `-N`."""
    path, _, kind = scope.rpartition("-")
    parts: list[str] = []
    while path:
        part = next((p for p in ("XATTN", "ATTN", "MIX", "RES", "LN", "FF") if path.startswith(p)), path)
        parts.append(part)
        path = path[len(part) :]
    return "\n".join([*parts, f"-{kind}"])

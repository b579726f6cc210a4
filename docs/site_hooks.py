"""Hooks that extend `mkdocs build` (named in mkdocs.yml).

- Formulas between dollar signs become MathML, which browsers render without scripts or network.
- The notebooks in tutorials/ become pages, with their saved outputs.
- CONTRIBUTING.md, CHANGELOG.md and similar files at the top of the repository become pages of the site.
- The command-line reference is generated from the commands themselves.
- `<!-- modules: normscope.flow -->` becomes a table of that package's modules, with their docstrings' first paragraphs.
- Every report in findings/ is added to the navigation.
"""

from __future__ import annotations

import ast
import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files outside docs/ -> their pages.
ABOVE = {
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
PAPERS = {"emnlp2020": "EMNLP 2020", "emnlp2021": "EMNLP 2021", "ff": "Feed-forward"}
CORPORA = {"conll": "CoNLL-2003", "hansards": "Hansards", "sst2": "SST-2", "wikitext": "WikiText-2"}
ALONE = ("concepts.md", "families.md")
MATHS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
MODULES = re.compile(r"^<!-- modules: (?P<package>[\w.]+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    reports = sorted(Path(config.docs_dir, "findings").glob("*/report.md"))
    for section in config.nav or ():
        if isinstance(section, dict) and "Findings" in section:
            section["Findings"] += [
                {_title(path.parent.name): f"findings/{path.parent.name}/report.md"} for path in reports
            ]
    return config


def _title(report: str) -> str:
    """ff-stories-sst2 -> Feed-forward: stories, SST-2"""
    paper, *rest = report.split("-")
    return f"{PAPERS.get(paper, paper.capitalize())}: {', '.join(CORPORA.get(one, one) for one in rest)}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in ABOVE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, target in ABOVE.items():
            text = text.replace(f"]({other}", f"]({target}")
        files.append(File.generated(config, page, content=text))
    for notebook in sorted(Path(config.docs_dir, "tutorials").glob("*.ipynb")):
        text, pictures = page_of(json.loads(notebook.read_text(encoding="utf-8")), notebook.stem)
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=data))
    files.append(File.generated(config, "api/command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in ALONE:
        page.meta["hide"] = ["navigation"]  # a tab with one page needs no navigation
    if page.file.src_uri.startswith("findings/"):
        page.meta["search"] = {"boost": 0.3}  # searches show the guides first
    markdown = MODULES.sub(lambda match: module_table(match["package"]), markdown)
    here = Path(config.docs_dir, page.file.src_uri).parent
    up = "../" * page.file.src_uri.count("/")

    def linked(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        name = Path(target).name
        if target.endswith(("../" + name, "/" + name)) and name in ABOVE and target.startswith(".."):
            return f"[{text}]({up}{ABOVE[name]}{anchor or ''})"
        if "://" not in target and name.endswith(".ipynb"):  # on GitHub the notebook, on the site its page
            return f"[{text}]({target.removesuffix('.ipynb')}.md{anchor or ''})"
        # Reports link to tables that are not kept here.
        if page.file.src_uri.startswith("findings/") and "://" not in target and not (here / target).exists():
            return text
        return match[0]

    return LINK.sub(linked, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return MATHS.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    kind, latex = match.groups()
    drawn = convert(html.unescape(latex.strip()), display="block" if kind == "div" else "inline")
    return f'<div class="formula">{drawn}</div>' if kind == "div" else drawn


def page_of(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            for kind, content in _outputs(cell):
                if kind == "text":
                    parts.append(f"``` {{ .text .output }}\n{content.rstrip()}\n```")
                else:
                    name = f"{stem}-{len(pictures) + 1}.png"
                    pictures[name] = base64.b64decode(content)
                    parts.append(f"![Figure drawn by the code above]({name}){{ .output }}")
    note = f'!!! note "Notebook"\n    This page is the notebook `docs/tutorials/{stem}.ipynb` with its outputs.'
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n", pictures


def _outputs(cell: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            yield "text", "".join(output["text"])
        elif "image/png" in output.get("data", {}):
            yield "png", "".join(output["data"]["image/png"])
        elif "text/plain" in output.get("data", {}):
            yield "text", "".join(output["data"]["text/plain"])


def module_table(package: str) -> str:
    """The modules of a package and of its subpackages; for `normscope` itself, only the top-level modules."""
    folder = ROOT / "src" / Path(*package.split("."))
    found = folder.glob("*.py") if package == "normscope" else folder.rglob("*.py")
    paths = sorted(path for path in found if not path.name.startswith("_"))
    rows = (f"| `{_module_name(path)}` | {_summary(path)} |" for path in paths)
    return "\n".join(["| module | contents |", "|---|---|", *rows])


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


def _summary(path: Path) -> str:
    """The first paragraph of a module's docstring, for a cell of a table."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _tidy(text.split("\n\n")[0]).replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def command_line() -> str:
    """The reference of `normscope`: every command with its arguments and options, from the built-in help."""
    import typer.main

    from normscope.cli import app

    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        _tidy(group.help),
        "",
        "`normscope COMMAND --help` shows the same in the terminal. `normscope --install-completion` adds shell "
        "completion of commands, options and names.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | success |",
        "| 1 | an input or model was refused, or a check failed |",
        "| 2 | wrong options |",
        "| 3 | a corpus run could not analyse some entries |",
        "| 130 | stopped with Ctrl-C |",
        "",
    ]
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        text, _, example = _tidy(command.help).partition("Example: ")
        lines += [f"## normscope {name}", "", text.strip(), ""]
        if example:
            lines += ["```sh", example.strip(), "```", ""]
        lines += ["| option | | |", "|---|---|---|", *(_row(one) for one in command.params if not one.hidden), ""]
    return "\n".join(lines)


def _tidy(text: str | None) -> str:
    return " ".join((text or "").split())


def _row(parameter: Any) -> str:
    names = parameter.opts + parameter.secondary_opts
    metavar = parameter.metavar or ""
    if parameter.param_type_name == "argument":
        names, metavar = [metavar or parameter.name.upper()], ""
    value = "" if parameter.default in (None, False, (), []) or callable(parameter.default) else parameter.default
    value = getattr(value, "value", value)
    note = "required" if parameter.required else f"default: {value}" if value not in ("", True) else ""
    shown = ", ".join(f"`{name}`" for name in names) + (f" *{metavar}*" if metavar else "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (shown, _tidy(parameter.help), note)) + " |"

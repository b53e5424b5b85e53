"""A Sphinx extension for this site: API pages, docstrings in plain text, links, metadata files.

Docstrings and Markdown pages have one notation: single backquotes are code. Code that is the name
of a documented object becomes a link to it, once in each section.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import sphinx.util.inspect
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms.post_transforms import SphinxPostTransform

import shardio
from shardio import errors

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
API = DOCS / "reference" / "api"

# Pages of the repository outside `docs/`, and their names on the site.
OUTSIDE = {
    ROOT / "README.md": "index",
    ROOT / "CHANGELOG.md": "changelog",
    **{
        path: "contributing/packages/" + "-".join(path.parent.relative_to(ROOT).parts)
        for tree in ("shardio", "converters", "tools/shardio_tools")
        for path in sorted((ROOT / tree).rglob("README.md"))
    },
}

# Names of `shardio` that have a page; all errors are on that of `shardio.errors`.
_NAMES = sorted({*shardio.__all__} - {*errors.__all__, "__version__"}, key=str.lower)

# Pages below which generated pages are listed.
LISTS = {
    "reference/api": [
        *(f"api/shardio.{name}" for name in [*_NAMES, *shardio._MODULES]),
        "api/returned",
    ],
    "reference/loader": [
        f"loader/{page}"
        for page in ("order", "views", "transforms", "faults", "resume", "devices", "speed")
    ],
    "contributing/README": [
        f"packages/{doc.rpartition('/')[2]}" for doc in OUTSIDE.values() if "packages" in doc
    ],
}

# Classes of objects that public functions return.
RETURNED = (
    "shardio.samples.view.SampleView",
    "shardio.samples.mixture.Mixture",
    "shardio.batch.batch.Skipped",
    "shardio._base.statistics.LoaderStats",
    "shardio._base.statistics.LoadingStats",
    "shardio._base.statistics.ItemStats",
    "shardio._base.statistics.SkippedItem",
    "shardio.shard.writer.ShardSummary",
    "shardio.dataset.generation.Generation",
)
# What variables in pages and docstrings are objects of.
VARIABLES = {
    "batch": "shardio.Batch",
    "dataset": "shardio.ShardDataset",
    "loader": "shardio.ShardLoader",
    "mixture": "shardio.samples.mixture.Mixture",
    "reader": "shardio.ShardReader",
    "view": "shardio.samples.view.SampleView",
    "writer": "shardio.ShardWriter",
}

# What Sphinx writes for `npt.NDArray[…]`.
ARRAY = re.compile(
    r"~?(?:numpy\.)?ndarray\[tuple\[~?(?:typing\.)?Any, \.\.\.\], "
    r"~?(?:numpy\.)?dtype\[([~\w.]+(?:\[[~\w.]+\])?)\]\]"
)

# --- API pages: written before Sphinx looks for its sources --------------------------------------


def write_api_pages(app: Sphinx) -> None:
    """Write a page for each public name of `shardio` and for each of its public modules."""
    pages = dict(_api_pages())
    for path, doc in OUTSIDE.items():
        if doc != "index":
            # Searches find what is valid now, for users.
            text = "---\nnosearch: true\n---\n" + path.read_text("utf-8")
            pages[DOCS / f"{doc}.markdown"] = relink(text, path, doc)
    for path in sorted((DOCS / "examples").glob("*.ipynb")):
        pages[path.with_suffix(".markdown")] = notebook_page(path)
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for folder in {path.parent for path in pages}:
        for path in {*folder.glob("*.rst"), *folder.glob("*.markdown")} - set(
            pages
        ):  # of an earlier version
            path.unlink()


def notebook_page(path: Path) -> str:
    """Return a notebook with its outputs as Markdown."""
    pieces = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        pieces.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
            if output["output_type"] == "stream":
                pieces.append(f"```text\n{''.join(output['text'])}```")
            elif "image/png" in data:
                source = data["image/png"].replace("\n", "")
                pieces.append(f'<p><img alt="output" src="data:image/png;base64,{source}"></p>')
            elif "text/html" in data:
                # A blank line would end a block of HTML.
                lines = [line for line in data["text/html"].splitlines() if line.strip()]
                pieces.append("\n".join(["<div>", *lines, "</div>"]))
    return "\n\n".join(pieces) + "\n"


def _api_pages() -> Iterator[tuple[Path, str]]:
    for name in _NAMES:
        yield API / f"shardio.{name}.rst", _title(name) + _described(name)
    returned = "".join(_directive(path, _imported(path)) for path in RETURNED)
    yield API / "returned.rst", _title("Returned objects") + returned
    for name in shardio._MODULES:
        module = import_module(f"shardio.{name}")
        own = {
            f"shardio.{name}.{each}": getattr(module, each)
            for each in module.__all__
            if name == "errors" or each not in shardio.__all__
        }
        functions_first = sorted(own, key=lambda path: _rank(own[path]))
        directives = "".join(_directive(path, own[path]) for path in functions_first)
        front = [each for each in module.__all__ if name != "errors" and each in shardio.__all__]
        also = ", ".join(f"``shardio.{each}``" for each in front)
        text = f".. module:: shardio.{name}\n\n.. automodule:: shardio.{name}\n   :no-index:\n\n"
        text += f"Pages of their own: {also}.\n\n" if also else ""
        yield API / f"shardio.{name}.rst", _title(f"shardio.{name}") + text + directives


def _rank(thing: object) -> int:
    return 0 if inspect.isroutine(thing) else 1 if isinstance(thing, type) else 2


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"


def _described(name: str) -> str:
    thing = getattr(shardio, name)
    if thing.__name__ == name:
        return _directive(f"shardio.{name}", thing)
    # `shardio.open` and `shardio.connect` are classes of other names.
    home = f"{thing.__module__}.{thing.__name__}"
    shown = f"shardio.{thing.__name__}" if thing.__name__ in shardio.__all__ else home
    text = f".. py:function:: shardio.{name}{_signature(thing)} -> {thing.__name__}\n\n"
    text += f"   Return a :py:class:`{thing.__name__} <{shown}>`, which has all parameters.\n\n"
    return text if shown != home else text + _directive(home, thing)


def _directive(path: str, thing: Any) -> str:
    if not isinstance(thing, type) and not inspect.isroutine(thing):
        value = f"   :value: {thing!r}\n" if isinstance(thing, int) else ""
        return f".. py:data:: {path}\n{value}\n"
    path += _signature(thing) if _is_overloaded(thing) else ""
    if not isinstance(thing, type):
        return f".. autofunction:: {path}\n\n"
    if issubclass(thing, BaseException):
        return f".. autoexception:: {path}\n   :show-inheritance:\n\n"
    annotated = {
        name
        for each in thing.__mro__
        for name, kind in vars(each).get("__annotations__", {}).items()
        if "ClassVar" not in str(kind)
    }
    own = {name for each in thing.__mro__ if "shardio" in each.__module__ for name in vars(each)}
    public = [n for n in dir(thing) if not n.startswith("_") and n in own | annotated]
    members = [n for n in public if n in annotated or inspect.getdoc(getattr(thing, n, None))]
    shown = f"   :members: {', '.join(members)}\n   :undoc-members:\n" if members else ""
    return f".. autoclass:: {path}\n{shown}\n"


def _is_overloaded(thing: Any) -> bool:
    """Return True if Sphinx would show the overloads, which are for type checkers."""
    analyzer = ModuleAnalyzer.for_module(thing.__module__)
    analyzer.analyze()
    return not {thing.__name__, f"{thing.__name__}.__init__"}.isdisjoint(analyzer.overloads)


def _signature(thing: Any) -> str:
    signature = sphinx.util.inspect.signature(thing)
    return sphinx.util.inspect.stringify_signature(
        signature, show_return_annotation=False, unqualified_typehints=True
    )


# --- docstrings ----------------------------------------------------------------------------------


def to_restructuredtext(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn a docstring in plain text into reStructuredText: code, indented blocks, and the rest."""
    text = "\n".join(lines)
    if what == "module":  # what comes after the first paragraph is about the source
        text = text.partition("\n\n")[0]
    pieces = re.split(r"(`[^`]+`)", text)
    pieces[::2] = [
        re.sub(r"(?<!^)(?<!\n)\*|[_|](?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]
    ]
    pieces[1::2] = [f"`{piece}`" for piece in pieces[1::2]]
    # A paragraph that ends with a colon, and an indented block behind it: code.
    text = re.sub(r"(?m)^( *)(\S.*):\n\n(?=\1    )", r"\1\2::\n\n", "".join(pieces))
    lines[:] = text.split("\n")


def shorten_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Leave out signatures of classes whose instances users do not make; shorten array types."""
    is_result = is_dataclass(obj) and "Args:" not in (obj.__doc__ or "")
    if what == "class" and (is_result or name in RETURNED):
        return ("", "")
    if what not in ("class", "function", "method"):
        return None
    return ARRAY.sub(r"NDArray[\1]", signature or ""), ARRAY.sub(r"NDArray[\1]", returns or "")


# --- links ---------------------------------------------------------------------------------------


def relink(text: str, source: Path, doc: str) -> str:
    """Return Markdown of the file `source` with its relative links made those of the page `doc`."""

    def replaced(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (source.parent / target).resolve()
        if path in OUTSIDE:
            doc_there = OUTSIDE[path]
            path = DOCS / (doc_there + (".md" if doc_there == "index" else ".markdown"))
        return f"]({os.path.relpath(path, (DOCS / doc).parent)}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", replaced, text)


def on_source_read(app: Sphinx, doc: str, source: list[str]) -> None:
    """Adapt the links of a page, and list the API pages below their overview."""
    path = Path(app.env.doc2path(doc))
    if path.suffix == ".md":
        source[0] = relink(source[0], path, doc)
    if doc in LISTS:
        entries = "\n".join(LISTS[doc])
        source[0] += f"\n:::{{toctree}}\n:hidden:\n\n{entries}\n:::\n"


def on_include_read(app: Sphinx, path: Path, parent: str, source: list[str]) -> None:
    """Adapt the links of a page that lies outside `docs/`."""
    source[0] = relink(source[0], (DOCS / path).resolve(), parent)


class LinkCode(SphinxPostTransform):
    """Make code that names a documented object a link to it, once in each section of a page."""

    default_priority = 5  # before Sphinx resolves references

    def run(self, **kwargs: Any) -> None:
        """Wrap the literals of a page."""
        known = {name: kind for name, _, kind, *_ in self.env.domains.python_domain.get_objects()}
        module = self.env.docname.rpartition("/")[2]  # of an API page, or its class
        seen: set[tuple[int, str]] = set()
        for literal in list(self.document.findall(nodes.literal)):
            target = _target(literal.astext(), module, known)
            section = literal.parent
            while section.parent and not isinstance(section, nodes.section):
                if isinstance(section, nodes.title | nodes.reference | addnodes.pending_xref):
                    target = None
                section = section.parent
            if target and (id(section), target) not in seen:
                seen.add((id(section), target))
                xref = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=target)
                xref["refdoc"] = self.env.docname
                literal.replace_self(xref)
                xref += literal


class Dashes(SphinxPostTransform):
    """Put a dash between a parameter, or an error, and its description."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Replace the hyphens that napoleon and Sphinx write."""
        for text in list(self.document.findall(nodes.Text)):
            if text.startswith(" -- "):
                text.parent.replace(text, nodes.Text(" \N{EN DASH} " + text.removeprefix(" -- ")))


def _target(text: str, module: str, known: dict[str, str]) -> str | None:
    """Return the documented object that code names, if it is nothing but such a name."""
    found = re.fullmatch(r"(\w[\w.]*)(\(.*\))?", text)
    if found is None:
        return None
    first, _, rest = found[1].partition(".")
    name = f"{VARIABLES.get(first, first)}.{rest}" if rest else first
    modules = [f"shardio.{each}.{name}" for each in shardio._MODULES] if found[2] else []
    for each in (name, f"shardio.{name}", f"shardio.errors.{name}", *modules):
        if each in known and "." in each:
            return each
    local = f"{module}.{name}"
    return local if local in known and (found[2] or known[local] == "function") else None


# --- files beside the pages ----------------------------------------------------------------------

CITATION = """\
cff-version: 1.2.0
message: If you use shardio, please cite it as below.
type: software
title: shardio
abstract: {abstract}
version: {version}
license: {license}
authors:
  - name: the shardio developers
keywords: [data loading, machine learning, video, shared memory]
"""


def write_metadata(app: Sphinx, exception: Exception | None) -> None:
    """Write `llms.txt`, a list of all pages as Markdown, and `CITATION.cff` beside the pages."""
    if exception is not None or app.builder.format != "html":
        return
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    facts = {"abstract": table["description"], "license": table["license"]}
    cited = CITATION.format(version=shardio.__version__, **facts)
    (app.outdir / "CITATION.cff").write_text(cited, "utf-8")
    lines = [f"# {app.config.project}", "", f"> {table['description']}.", ""]
    lines.append("The sources of all pages, in Markdown; API pages have the docstrings as HTML.")
    toctree = app.env.tocs[app.config.root_doc]
    for section in toctree.findall(addnodes.toctree):
        lines += ["", f"## {section['caption']}", ""]
        for _, doc in section["entries"]:
            lines += _entries(app, doc)
    (app.outdir / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _entries(app: Sphinx, doc: str) -> Iterator[str]:
    """Yield a line for a page, and for each of those below it."""
    suffix = Path(app.env.doc2path(doc)).suffix
    is_api = suffix == ".rst"
    target = f"{doc}.html" if is_api else f"_sources/{doc}{suffix}.txt"
    yield f"- [{app.env.titles[doc].astext()}]({target})"
    for tree in app.env.tocs[doc].findall(addnodes.toctree):
        for _, below in tree["entries"]:
            yield from _entries(app, below)


def prune_navigation(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Resolve a page's navigation, which has titles only, from trees without sections.

    Sphinx copies the sections of all pages for each page before it drops them: a third of a build.
    """
    resolve = context["toctree"]

    def toctree(**options: Any) -> str:
        whole = app.env.tocs
        if options.get("titles_only"):
            app.env.tocs = _titles(app)
        try:
            found: str = resolve(**options)
        finally:
            app.env.tocs = whole
        return found

    context["toctree"] = toctree


def _titles(app: Sphinx) -> dict[str, Any]:
    """Return the trees of all pages with nothing below a page's title but further pages."""
    if not hasattr(app, "_titles"):
        trees = {name: tree.deepcopy() for name, tree in app.env.tocs.items()}
        for title in (each for tree in trees.values() for each in tree.children if len(each) > 1):
            if below := [*title.findall(addnodes.toctree)]:
                title[1][:] = below
            else:
                title.pop(1)
        app._titles = trees  # type: ignore[attr-defined]
    return app._titles  # type: ignore[attr-defined, no-any-return]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension to Sphinx."""
    app.connect("builder-inited", write_api_pages)
    app.connect("autodoc-process-docstring", to_restructuredtext, priority=400)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("source-read", on_source_read)
    app.connect("include-read", on_include_read)
    app.connect("html-page-context", prune_navigation, priority=400)  # before the theme's own
    app.connect("build-finished", write_metadata)
    app.add_post_transform(LinkCode)
    app.add_post_transform(Dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""The site of the documentation: `make docs` builds it, and every warning is an error."""

import contextlib
import inspect
import logging
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import projector_dedup
from projector_dedup import options

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

from parameters import listed  # noqa: E402  # it lies beside this file

SHARED = (inspect.getdoc(options) or "").splitlines()  # describes the arguments that several classes have

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
copyright = author = PROJECT["authors"][0]["name"]
version = release = PROJECT["version"]

logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of its plugins when it is imported

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
nitpicky = False  # types of SQLAlchemy and of our own insides are named in signatures, and have no page here
highlight_language = "none"  # of indented blocks: commands and what they print

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]  # tabs, around fences of code

copybutton_prompt_text = "$ "  # of a console block the commands are copied, and not what they print

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"  # the parameters as a list, each with its type
autodoc_typehints_format = "short"
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]  # at the root of the site, where programs look for it
html_copy_source = False
html_show_sphinx = False

# Pages link to each other as files of the repository, so that they can be read there. Files outside of `docs` that are
# pages of the site have a page here that includes them: links lead to that one.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/results.md",
    "benchmarks/README.md": "project/results.md",
    "tests/core/costs.md": "project/costs.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
PICTURE = re.compile(r"^!\[(.*)\]\((.*)-light\.svg\)$", re.MULTILINE)
TWINS = "\n\n".join(f"```{{image}} \\2-{each}.svg\n:class: only-{each}\n:alt: \\1\n```" for each in ("light", "dark"))


def on_the_site(text: str, folder: Path) -> str:
    """Return the text of a file in ``folder`` with its links to files as paths of the site.

    A picture that has a dark twin beside it is shown with that twin.
    """

    def path_of(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if not target.exists():  # a wrong link, of which Sphinx warns, or code that looks like a link
            return link[1]
        page = PAGES.get(os.path.relpath(target, ROOT))
        return "/" + (page or os.path.relpath(target, DOCS))

    return PICTURE.sub(TWINS, LINK.sub(path_of, text))


def setup(app: Sphinx) -> None:
    """Rewrite the links of each page, and of each file that a page includes."""

    def page_read(_app: Sphinx, page: str, source: list[str]) -> None:
        source[0] = on_the_site(source[0], (DOCS / page).parent)

    def included(_app: Sphinx, path: Path, _page: str, source: list[str]) -> None:
        source[0] = on_the_site(source[0], (DOCS / path).resolve().parent)

    def docstring_read(_app: Sphinx, _kind: str, _name: str, described: Any, _options: Any, lines: list[str]) -> None:
        if inspect.isfunction(described) or (inspect.isclass(described) and not issubclass(described, BaseException)):
            with contextlib.suppress(ValueError):  # a class without a signature, such as an alias of dict
                shared = SHARED if any("projector_dedup.options" in line for line in lines) else ()
                lines[:] = listed(lines, inspect.signature(described).parameters, shared)

    for decorator in (projector_dedup.projector, projector_dedup.on):
        source = ModuleAnalyzer.for_module(decorator.__module__)
        source.analyze()
        source.overloads.clear()  # for type checkers: docs/api/delivering.md has one signature for people

    app.connect("autodoc-process-docstring", docstring_read)
    app.connect("source-read", page_read)
    app.connect("include-read", included)

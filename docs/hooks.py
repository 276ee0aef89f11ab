# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does not do by itself: pages that live elsewhere in the repository, and their links.

README.md, WIRE.md and others stay where people look for them in a clone; here they become pages.
Their links, and those of the pages in docs/, are written for the clone and are turned into the
site's. The diagrams are drawn by mermaid in the reader's browser; the script is part of the site,
so that it reads offline.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from zoo.errors import ZooError  # noqa: E402
from zoo.fetch import Member, Package  # noqa: E402

#: The smaller build: flow, sequence and state diagrams are all that we draw.
MERMAID = Package(
    name="@mermaid-js/tiny",
    version="11.17.2",
    kind="npm",
    licence="MIT",
    sha256="28302a2f6bd556bfd223acff76a1fd511bcc9e6f1cac1bad91b904469aeca102",
    members={
        "mermaid.js": Member(
            "package/dist/mermaid.tiny.js",
            "7a644017d37f93c8359790884e6b67fb1f747c78eb20475952404bd87190a3f8",
        ),
        "LICENSE": Member(
            "package/LICENSE", "ec9fb67dcb25eccc416ed56e1aab819222c805a2a4bfe4cb19e7556bf2ffde80"
        ),
    },
)
#: Pages of the site that are files elsewhere in the repository.
PAGES = {
    "index.md": "README.md",
    "wire.md": "protos/WIRE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_HAS_SCHEME = re.compile(r"[a-z]+:")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from elsewhere, and the script for the diagrams."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    try:
        script = MERMAID.file("mermaid.js")
    except ZooError as error:
        raise PluginError(f"the script for the diagrams: {error}") from error
    files.append(File.generated(config, "scripts/mermaid.js", abs_src_path=str(script)))
    licence = script.with_name("LICENSE")
    files.append(File.generated(config, "scripts/mermaid-LICENSE.txt", abs_src_path=str(licence)))
    config.extra_javascript.append("scripts/mermaid.js")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the clone into links of the site; files that are no pages are copied."""
    here = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if _HAS_SCHEME.match(target):
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        return f"{opening}{_uri(place, config, files)}{anchor or ''}{closing}"

    return _LINK.sub(turned, markdown)


def _uri(place: str, config: MkDocsConfig, files: Files) -> str:
    """Where a file of the repository is in the site; a missing one stays, for mkdocs to refuse."""
    for name, source in PAGES.items():
        if place == source:
            return name
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    path = ROOT / place
    if not path.is_file():
        return place
    # As text, which a browser shows instead of saving it.
    name = f"sources/{place}.txt"
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return name

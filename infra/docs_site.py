"""Hooks of MkDocs (mkdocs.yml): what the site shows that does not lie in `docs/`.

README is its first page and the base policy's card a page. Links to code keep their text and lose their target: the site
is read without the repository beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
CARD, CURVES = "etude/data/base/README.md", "etude/data/base/losses.png"
PLACES = {f"../{CARD}": "card.md", f"../{CURVES}": "pictures/losses.png", "losses.png": "pictures/losses.png"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=_front(ROOT / "README.md")))
    files.append(File.generated(config, "card.md", content=_card(ROOT / CARD)))
    files.append(File.generated(config, "pictures/losses.png", abs_src_path=str(ROOT / CURVES)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _LINK.sub(_placed, markdown)


def _placed(match: re.Match[str]) -> str:
    picture, text, target = match.groups()
    if target in PLACES:
        return f"{picture}[{text}]({PLACES[target]})"
    return text if target.startswith("../") else match[0]


def _front(readme: Path) -> str:
    """Links relative to the repository become links relative to `docs/`; other files of it are named, not linked."""
    text = readme.read_text().replace("](docs/", "](")
    return re.sub(
        r"\[([^\]]*)\]\((?!https?:)([^)]*)\)",
        lambda m: m[0] if (ROOT / "docs" / m[2].split("#")[0]).exists() else m[1],
        text,
    )


def _card(path: Path) -> str:
    """Without the front matter, which is for model hubs."""
    return path.read_text().split("---\n", 2)[2]

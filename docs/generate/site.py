"""The website: what `mkdocs build` does beyond its own, a hook that mkdocs.yml names.

Pages are written for the repository: they link to README, examples and source beside docs/. On the
site those files are pages too, and the links lead to them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from manyhands.algorithms.registry import SPECS

ROOT = Path(__file__).parents[2]
TOP = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".ipynb": "json"}
_FENCED = re.compile(r"(?ms)^(```.*?^```$)")
_LINK = re.compile(r"(\]\()([^)\s#]+)(?=#|\))")


def on_config(config: Any) -> Any:
    """The pages of the algorithms, in the order of their rows."""
    for part in config.nav:
        if "Algorithms" in part:
            part["Algorithms"] = [f"algorithms/{name}.md" for name in SPECS]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that some page links to."""
    texts = {f"docs/{f.src_uri}": f.content_string for f in files.documentation_pages()}
    waiting = [*TOP, *(target for page, text in texts.items() for target in outside(page, text))]
    while waiting:
        path = waiting.pop()
        if path in texts:
            continue
        texts[path] = content(path)
        files.append(File.generated(config, uri_of(path), content=texts[path]))
        if path in TOP:
            waiting += outside(path, texts[path])
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they lead on the site."""
    here = next((p for p, uri in TOP.items() if uri == page.file.src_uri), None)
    path = here or f"docs/{page.file.src_uri}"
    folder = posixpath.dirname(page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        if is_elsewhere(found[2]):
            return found[0]
        return found[1] + posixpath.relpath(uri_of(target(path, found[2])), folder or ".")

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(lead, part) for part in parts[::2]]
    return "".join(parts)


def outside(page: str, text: str) -> list[str]:
    """Files of the repository, not of docs/, that a page links to."""
    links = [m[2] for part in _FENCED.split(text)[::2] for m in _LINK.finditer(part)]
    found = [target(page, link) for link in links if not is_elsewhere(link)]
    return [path for path in found if not path.startswith("docs/") and (ROOT / path).is_file()]


def content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path in TOP:
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text}\n````\n"


def uri_of(path: str) -> str:
    """Where a file of the repository lies on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return TOP.get(path) or f"files/{path}.md"


def target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def is_elsewhere(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is not None

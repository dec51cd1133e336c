"""Usage: gh api repos/OWNER/NAME/releases | wheel_index.py > index.html

Writes the page with which pip finds the wheels of the releases: pip install --find-links=<its
address> torchkiln. Links carry the digests, which pip compares.
"""

from __future__ import annotations

import html
import json
import sys
from typing import Any


def page(releases: list[dict[str, Any]]) -> str:
    links = []
    for release in releases:
        for asset in release["assets"]:
            if asset["name"].endswith(".whl"):
                digest = (asset.get("digest") or "").replace(":", "=")
                address = asset["browser_download_url"] + (f"#{digest}" if digest else "")
                links.append(
                    f'<a href="{html.escape(address)}">{html.escape(asset["name"])}</a><br>'
                )
    return "\n".join(["<!DOCTYPE html>", "<title>torchkiln</title>", *links, ""])


if __name__ == "__main__":
    sys.stdout.write(page(json.load(sys.stdin)))

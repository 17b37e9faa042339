"""`python -m infra.pictures [--console URL] [--runs RUN[,RUN]] [--attempt NAME] [--out docs/pictures]`

Takes the pictures in docs/console.md of a console that runs (`etude demo`, `etude up`; where reading needs a token, as in compose:
ETUDE_CONSOLE_TOKEN). Needs Chromium. Left out: the newest run, and the newest of its attempts that was solved. A picture of two
runs beside each other is taken where two are named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, sync_playwright

WINDOW = {"width": 1280, "height": 1000}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pages(page: Page, runs: list[str], attempt: str) -> dict[str, str]:
    """Name of the picture -> path of the page. Asks the console for what was left out."""
    if not runs:
        page.goto("/")
        runs = re.findall(r'href="/runs/([^/"]+)"', page.content())[:1]
        if not runs:
            raise SystemExit("--runs: left out, and the console knows no run; start one")
    if not attempt:
        page.goto(f"/runs/{quote(runs[0])}/attempts?outcome=solved")
        found = re.search(rf'href="/runs/{re.escape(runs[0])}/attempts/([^"?]+)"', page.content())
        if not found:
            raise SystemExit(f"--attempt: left out, and nothing is solved in {runs[0]} yet")
        attempt = found[1]
    run = f"/runs/{quote(runs[0])}"
    found_pages = {
        "overview": "/",
        "run": run,
        "problems": f"{run}/problems",
        "attempt": f"{run}/attempts/{attempt}",
        "tokens": f"{run}/attempts/{attempt}#tokens",
        "alerts": "/alerts",
    }
    if len(runs) > 1:
        found_pages["compare"] = "/compare?" + "&".join(f"run={quote(name)}" for name in runs)
    return found_pages


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.pictures", description=__doc__.splitlines()[2])
    parser.add_argument("--console", default="http://127.0.0.1:8708", metavar="URL")
    parser.add_argument("--runs", default="", help="by commas")
    parser.add_argument("--attempt", default="")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser here: none of {', '.join(BROWSERS)} is on the PATH")
    with sync_playwright() as driver:
        # Root needs --no-sandbox; the pages are our own.
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-dev-shm-usage"])
        token = os.environ.get("ETUDE_CONSOLE_TOKEN")
        context = chromium.new_context(
            base_url=options.console,
            viewport=WINDOW,
            color_scheme="dark",
            extra_http_headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        page = context.new_page()
        for name, path in pages(page, list(filter(None, options.runs.split(","))), options.attempt).items():
            page.goto(path, wait_until="networkidle")
            path_out = options.out / f"console_{name}.png"
            page.screenshot(path=path_out)
            print(path_out)
        chromium.close()


if __name__ == "__main__":
    main()

"""Find a browser for the tests of the page, or say why there is none: `python -m tests.page.browser` exits with 1 then.

Chromium comes from Debian (`apt-get install chromium`) or from playwright (`playwright install chromium`).
`TANDEM_BROWSER` names another one.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Return the path of a Chromium; None: there is none, or playwright's own has to be found by itself."""
    named = os.environ.get("TANDEM_BROWSER")
    found = (shutil.which(name) for name in ([named] if named else NAMES))
    return next(filter(None, found), None)


def why_none() -> str:
    """Return why no browser can be driven here, in one line; "" if one can be."""
    if importlib.util.find_spec("playwright") is None:
        return "no playwright: `make test-page` installs it"
    has_own = any(_own_folder().glob("chromium*"))
    if find_browser() is None and not has_own:
        return "no Chromium: `apt-get install chromium`, or `.venv/bin/playwright install chromium`"
    return ""


def _own_folder() -> Path:
    return Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")


if __name__ == "__main__":
    sys.exit(why_none() or None)

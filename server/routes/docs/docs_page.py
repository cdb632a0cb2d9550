"""`/docs`: Swagger UI over `/openapi.json`, from files of the installed package `fastapi-swagger`.

The page names its files relative to itself, so that it works below a proxy's prefix, and
its content security policy lets it load from this server and ask this server only.
"""

from importlib.resources import files

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Tandem</title>
<link rel="icon" href="docs/favicon-32x32.png"><link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<noscript>The same as a document: <a href="openapi.json">openapi.json</a>.</noscript>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script>
</body>
</html>
"""
MEDIA_TYPES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "start.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
# The default validator is a service elsewhere.
_START = b"""SwaggerUIBundle({
  url: "openapi.json", dom_id: "#page", validatorUrl: null, tryItOutEnabled: true, deepLinking: true,
  defaultModelsExpandDepth: 0,
});
"""


def read_file(name: str) -> bytes:
    """Return a file of the page, by its name in `MEDIA_TYPES`."""
    return _START if name == "start.js" else (files("fastapi_swagger") / "resources" / name).read_bytes()

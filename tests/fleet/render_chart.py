"""Render a chart with Helm and check its objects against the schemas of Kubernetes, in the environment `helm`.

`python render_chart.py CHART` reads a list of values from standard input, as JSON, and writes for each of them its
objects, or the error that Helm gave, and what the schemas say of them.
"""

import json
import sys

import kubernetes_validate
import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint

KUBERNETES = "1.37"
OF_EXTENSIONS = {"InferencePool"}  # whose schemas Kubernetes does not have


def render(chart: Chart, values: dict) -> dict:
    try:
        texts = chart.render(values, name="one", namespace="models", is_install=True)
    except HelmError as error:
        return {"error": str(error)}
    objects = [item for text in texts.values() for item in yaml.safe_load_all(text) if item]
    return {"objects": objects, "faults": [fault for item in objects for fault in find_faults(item)]}


def find_faults(item: dict) -> list[str]:
    if item["kind"] in OF_EXTENSIONS:
        return []
    try:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{item['kind']}: {'.'.join(map(str, error.path))}: {error.message}"]
    return []


if __name__ == "__main__":
    found = lint(sys.argv[1], strict=True)
    rendered = [render(Chart.load(sys.argv[1]), values) for values in json.load(sys.stdin)]
    json.dump({"lint": found["errors"], "rendered": rendered}, sys.stdout)

"""Validate objects of Prometheus Operator, KEDA and the Gateway API; see check_manifests.sh.

python scripts/manifest_schemas.py GATEWAY_API_PACKAGE FILE...
"""

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from cloudcoil.models.keda import v1alpha1 as keda  # type: ignore[import-not-found]
from cloudcoil.models.prometheus_operator import v1 as operator  # type: ignore[import-not-found]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

_PACKAGES = ("cloudcoil.models.keda", "cloudcoil.models.prometheus_operator")
_GROUPS = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io")


def refuse_unknown_fields(schema: Any) -> Any:
    """Close every object of a schema, in place: a field that it does not list is an error."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            refuse_unknown_fields(part)
    elif isinstance(schema, list):
        for part in schema:
            refuse_unknown_fields(part)
    return schema


def read_schemas(gateway_api: Path) -> dict[str, Any]:
    """Return the schemas by kind."""
    models = (operator.PodMonitor, operator.PrometheusRule, keda.ScaledObject)
    schemas = {model.__name__: model.model_json_schema(by_alias=True) for model in models}
    for kind in ("Gateway", "HTTPRoute"):
        text = (gateway_api / "gateway.networking.k8s.io" / "v1" / f"{kind}.mjs").read_text()
        found = re.search(r"const schema = (\{.*?\n\});", text, re.DOTALL)
        if found is None:
            sys.exit(f"the package has no schema of {kind}")
        schemas[kind] = json.loads(found[1])
        # Kubernetes' own.
        schemas[kind]["properties"]["metadata"] = {}
    return {kind: refuse_unknown_fields(schema) for kind, schema in schemas.items()}


def main() -> None:
    """Print a line for each object; the exit status is 1 if one is invalid."""
    package, *files = map(Path, sys.argv[1:])
    versions = [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    version = json.loads((package / "package.json").read_text())["version"]
    print(", ".join([*versions, f"@kubernetes-models/gateway-api {version}"]))
    schemas, invalid = read_schemas(package), False
    for file in files:
        for manifest in yaml.safe_load_all(file.read_text()):
            if manifest["apiVersion"].partition("/")[0] in _GROUPS:
                validator = Draft202012Validator(schemas[manifest["kind"]])
                errors = [
                    f"{error.json_path}: {error.message}"
                    for error in validator.iter_errors(manifest)
                ]
                print(f"{file.stem}: {manifest['kind']}: {'; '.join(errors) or 'valid'}")
                invalid |= bool(errors)
    sys.exit(invalid)


if __name__ == "__main__":
    main()
